"""Turns failed HTTP answers of the server into typed errors.

In: status and body. Out: the error that the server raised, where its body has the form
`{"error": {"message", "code", "limit" or "param"}}`; else one by the status.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from .errors import (
    AgentError,
    EngineError,
    EngineGarbage,
    EnvserverError,
    InputError,
    LimitReached,
    SandboxError,
    SandboxLost,
    ServiceError,
    by_kind,
)

CONTEXT_IS_FULL: Final = "context_length_exceeded"
"""OpenAI's code for a prompt that is too long for the model."""
_MAX_TEXT_BYTES: Final = 2000
_CONFLICT: Final = 409


@dataclass(frozen=True, kw_only=True)
class ErrorReader:
    """The meaning of failed answers of one kind of endpoint.

    Args:
        endpoint: its name in messages.
        server_error: status 500 and above, and those in `server_statuses`.
        client_error: any other status.
        unreadable: the body has another form, with a status of `server_error`.
        unreadable_client_error: the same with another status; None: `unreadable`.
        by_code: errors that the body's `code` names, besides LimitReached.
        server_statuses: further statuses that are the server's fault.
    """

    endpoint: str
    server_error: type[EnvserverError]
    client_error: type[EnvserverError]
    unreadable: type[EnvserverError]
    unreadable_client_error: type[EnvserverError] | None = None
    by_code: Mapping[str, type[EnvserverError]] = field(default_factory=dict)
    server_statuses: frozenset[int] = frozenset()

    def read(self, status: int, body: bytes) -> EnvserverError:
        """Returns the error for an answer other than 200."""
        is_servers = status >= 500 or status in self.server_statuses
        problem = _problem(body)
        if problem is None:
            kind = self.unreadable
            if not is_servers and self.unreadable_client_error is not None:
                kind = self.unreadable_client_error
            text = body[:_MAX_TEXT_BYTES].decode(errors="replace")
            return kind(f"{self.endpoint} answered HTTP {status}: {text}", status=status)
        message, code = str(problem["message"]), str(problem.get("code"))
        if code == LimitReached.kind:
            limit = problem.get("limit") or problem.get("param")
            return LimitReached(message, **({"limit": limit} if limit else {}))
        if code == CONTEXT_IS_FULL:
            return LimitReached(message, limit="context")
        if code in self.by_code:
            return self.by_code[code](message, status=status)
        return (self.server_error if is_servers else self.client_error)(message, status=status)


MODEL: Final = ErrorReader(
    endpoint="The model's endpoint",
    server_error=EngineError,
    client_error=AgentError,
    unreadable=EngineGarbage,
    unreadable_client_error=AgentError,
    by_code=by_kind(LimitReached, EngineError, ServiceError),
)
"""Calls of the model."""

SANDBOX: Final = ErrorReader(
    endpoint="The server",
    server_error=SandboxLost,
    client_error=InputError,
    unreadable=SandboxLost,
    by_code=by_kind(SandboxError),
    server_statuses=frozenset({_CONFLICT}),
)
"""Requests about a sandbox."""

SERVICE: Final = ErrorReader(
    endpoint="The server",
    server_error=ServiceError,
    client_error=InputError,
    unreadable=ServiceError,
    server_statuses=frozenset({_CONFLICT}),
)
"""Calls of an environment's services."""


def _problem(body: bytes) -> dict[str, Any] | None:
    try:
        problem = msgspec.json.decode(body)["error"]
    except (msgspec.DecodeError, KeyError, TypeError, RecursionError):
        return None
    return problem if isinstance(problem, dict) and "message" in problem else None
