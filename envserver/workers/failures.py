"""Pure functions between exceptions in a worker and failures on the wire.

The proxy's error bodies become typed errors; whatever ended an agent becomes the failure that is
posted. Limits, failures of engines and of sandboxes keep their kind; all else is the agent's error,
with traceback (where a framework wrapped one of the former, the server knows: the proxy told it).
"""

from __future__ import annotations

import traceback
from typing import Any

import orjson
from envserver_records.errors import (
    AgentError,
    EngineError,
    EngineGarbage,
    EnvserverError,
    InputError,
    LimitReached,
    RolloutError,
    SandboxError,
    SandboxLost,
    ServiceError,
    by_kind,
)

MAX_TRACEBACK_CHARACTERS = 8000
MAX_MESSAGE_CHARACTERS = 2000

_BY_CODE = by_kind(LimitReached, EngineError)
_OF_SANDBOXES = by_kind(SandboxError)
_HTTP_CONFLICT = 409


def error_of_answer(status: int, body: bytes) -> RolloutError:
    """The error that an answer of the proxy other than 200 stands for."""
    told = _told(body)
    if told is None:
        text = body[:MAX_MESSAGE_CHARACTERS].decode(errors="replace")
        unread: type[RolloutError] = EngineGarbage if status >= 500 else AgentError
        return unread(f"The model's endpoint answered HTTP {status}: {text}", status=status)
    message, code = str(told["message"]), told.get("code")
    if code == LimitReached.kind:
        return _limit(message, told)
    if code in _BY_CODE:
        return _BY_CODE[code](message, status=status)
    kind: type[RolloutError] = EngineError if status >= 500 else AgentError
    return kind(message, status=status)


def error_of_sandbox(status: int, body: bytes) -> EnvserverError:
    """The error that an answer other than 200 to a request about a sandbox stands for."""
    told = _told(body)
    if told is None:
        text = body[:MAX_MESSAGE_CHARACTERS].decode(errors="replace")
        return SandboxLost(f"The server answered HTTP {status}: {text}", status=status)
    message, code = str(told["message"]), told.get("code")
    if code == LimitReached.kind:
        return _limit(message, told)
    if code in _OF_SANDBOXES:
        return _OF_SANDBOXES[code](message)
    if status >= 500 or status == _HTTP_CONFLICT:
        return SandboxLost(message, status=status)
    return InputError(message)


def error_of_service(status: int, body: bytes) -> EnvserverError:
    """The error that an answer other than 200 of a service stands for."""
    told = _told(body)
    if told is None:
        text = body[:MAX_MESSAGE_CHARACTERS].decode(errors="replace")
        return ServiceError(f"The server answered HTTP {status}: {text}", status=status)
    message = str(told["message"])
    if told.get("code") == LimitReached.kind:
        return _limit(message, told)
    if status >= 500 or status == _HTTP_CONFLICT:
        return ServiceError(message, status=status)
    return InputError(message)


def _told(body: bytes) -> dict[str, Any] | None:
    """The `error` in an answer of the proxy, None where it holds none."""
    try:
        told = orjson.loads(body)["error"]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return None
    return told if isinstance(told, dict) and "message" in told else None


def _limit(message: str, told: dict[str, Any]) -> LimitReached:
    limit = told.get("limit") or told.get("param")
    return LimitReached(message, **({"limit": limit} if limit else {}))


def failure_of(error: BaseException, own_file: str = "") -> dict[str, Any]:
    """What is posted for a rollout that `error` ended: {"kind", "message", "detail"}.

    Args:
        own_file: traceback entries of this file are left out at the top; they are not the agent's.
    """
    if isinstance(error, LimitReached | EngineError | SandboxError | ServiceError):
        return {"kind": error.kind, "message": str(error), "detail": error.detail}
    message = str(error) if isinstance(error, AgentError) else f"{type(error).__name__}: {error}"
    return {
        "kind": AgentError.kind,
        "message": _sendable(message[:MAX_MESSAGE_CHARACTERS]),
        "detail": {"traceback": _traceback(error, own_file)},
    }


def _traceback(error: BaseException, own_file: str) -> str:
    entry = error.__traceback__
    while entry is not None and entry.tb_frame.f_code.co_filename == own_file:
        entry = entry.tb_next
    text = "".join(traceback.format_exception(type(error), error, entry))
    return _sendable(text[-MAX_TRACEBACK_CHARACTERS:])


def _sendable(text: str) -> str:
    """`text` without the lone surrogates that JSON cannot hold."""
    return text.encode(errors="backslashreplace").decode()
