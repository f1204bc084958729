"""Converts the error that ended an agent to the failure that its worker posts.

Limits and failures of engines and sandboxes keep their kind; all else is the agent's error, with a
traceback (where a framework wrapped one of the former, the server knows: the proxy reported it).
"""

from __future__ import annotations

import traceback
from typing import Any

from envserver_records.errors import (
    AgentError,
    EngineError,
    LimitReached,
    SandboxError,
    ServiceError,
)

MAX_TRACEBACK_CHARACTERS = 8000
MAX_MESSAGE_CHARACTERS = 2000


def failure_of(error: BaseException, own_file: str = "") -> dict[str, Any]:
    """Returns the failure of a rollout that `error` ended: {"kind", "message", "detail"}.

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
