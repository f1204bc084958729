"""Failed HTTP answers of the server become the errors that it raised."""

from __future__ import annotations

import json

import pytest
from envserver_records.errors import (
    AgentError,
    EngineError,
    EngineGarbage,
    EngineRefused,
    InputError,
    LimitReached,
    SandboxLost,
    SandboxUnavailable,
    ServiceError,
)
from envserver_records.http_errors import MODEL, SANDBOX, SERVICE, ErrorReader

_CASES = [
    (MODEL, 400, {"code": "engine_refused"}, EngineRefused),
    (MODEL, 500, {}, EngineError),
    (MODEL, 422, {"code": "unknown"}, AgentError),
    (MODEL, 502, None, EngineGarbage),
    (MODEL, 404, None, AgentError),
    (SANDBOX, 503, {"code": "sandbox_unavailable"}, SandboxUnavailable),
    (SANDBOX, 409, {}, SandboxLost),
    (SANDBOX, 400, {}, InputError),
    (SANDBOX, 400, None, SandboxLost),
    (SERVICE, 500, {}, ServiceError),
    (SERVICE, 409, {}, ServiceError),
    (SERVICE, 422, {}, InputError),
    (SERVICE, 422, None, ServiceError),
]


@pytest.mark.parametrize(("reader", "status", "problem", "kind"), _CASES)
def test_the_code_decides_then_the_status(
    reader: ErrorReader, status: int, problem: dict[str, str] | None, kind: type[Exception]
) -> None:
    body = json.dumps({"error": {"message": "why", **problem}}) if problem is not None else "why"

    error = reader.read(status, body.encode())

    assert type(error) is kind
    assert "why" in error.message


@pytest.mark.parametrize("reader", [MODEL, SANDBOX, SERVICE])
@pytest.mark.parametrize("key", ["limit", "param"])
def test_a_limit_keeps_its_name(reader: ErrorReader, key: str) -> None:
    body = json.dumps({"error": {"message": "m", "code": "limit_reached", key: "turns"}})

    error = reader.read(429, body.encode())

    assert isinstance(error, LimitReached)
    assert error.detail == {"limit": "turns"}


@pytest.mark.parametrize("body", [b"", b"[]", b'{"error": "text"}', b"\xff" * 5000, b"[" * 5000])
def test_a_body_of_another_form_is_shown_in_part(body: bytes) -> None:
    error = MODEL.read(500, body)

    assert isinstance(error, EngineGarbage)
    assert len(error.message) < 2100
