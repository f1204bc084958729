"""Converts the error that ended an agent to the failure that its worker posts.

Limits, failures of engines and sandboxes, and rewards that cannot be keep their kind; all else is
the agent's error. An error that no further attempt can avoid is marked as a bug.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

from envserver_records.errors import (
    AgentError,
    ConfigError,
    EngineError,
    LimitReached,
    RewardError,
    SandboxError,
    ServiceError,
)
from envserver_records.extras import missing_module_hint

from ..tools.calling import may_be_bug, place_of

MAX_TRACEBACK_CHARACTERS = 8000
MAX_MESSAGE_CHARACTERS = 2000
OUTPUT = "output"
"""The detail of an error that holds the agent's output until then."""

_BUGS = (
    *(ConfigError, RewardError),
    *(ImportError, NameError, SyntaxError, TypeError, AttributeError, SystemExit),
)


def failure_of(
    error: BaseException, own_file: str = "", method: Callable[..., Any] | None = None
) -> dict[str, Any]:
    """Returns the failure of a rollout that `error` ended: {"kind", "message", "detail"}.

    Traceback entries of `own_file` are left out at the top; they are not the agent's. `method`: see
    `place_of`. Detail `sandbox`: the place of a sandbox's error, even if `error` wraps it.
    """
    places = [
        place_of(failure, method) for failure in _chain(error) if isinstance(failure, SandboxError)
    ]
    behind = {"sandbox": places[0]} if places else {}
    if isinstance(error, LimitReached | EngineError | SandboxError | ServiceError):
        detail = {name: value for name, value in error.detail.items() if name != OUTPUT} | behind
        return {"kind": error.kind, "message": str(error), "detail": detail}
    ours = isinstance(error, AgentError | RewardError)
    message = str(error) if ours else f"{type(error).__name__}: {error}"
    return {
        "kind": RewardError.kind if isinstance(error, RewardError) else AgentError.kind,
        "message": sendable(message[:MAX_MESSAGE_CHARACTERS]),
        "detail": {
            "traceback": _traceback(error, own_file),
            "place": place_of(error, method),
            **may_be_bug(error),
            **bug_of(error, method),
            **behind,
        },
    }


def _chain(error: BaseException) -> list[BaseException]:
    """Returns `error`, and the errors in its groups, causes and contexts."""
    chain, seen = [error], {id(error)}
    for known in chain:  # it grows meanwhile
        inner = known.exceptions if isinstance(known, BaseExceptionGroup) else ()
        context = None if known.__suppress_context__ else known.__context__
        for each in (*inner, known.__cause__, context):
            if each is not None and id(each) not in seen:
                seen.add(id(each))
                chain.append(each)
    return chain


def ended_by(error: BaseException) -> AgentError:
    what = f"{type(error).__name__}({error})"
    return AgentError(f"The environment raised {what}, which ends its process", bug="exit")


def output_of(error: BaseException) -> Any:
    """Returns what the agent had when `error` ended it: `LimitReached(..., output=...)`, and
    AgentError for a framework that hides which error it was. It is scored if a limit is the cause.
    """
    return error.detail.get(OUTPUT) if isinstance(error, LimitReached | AgentError) else None


def bug_of(error: BaseException, method: Callable[..., Any] | None = None) -> dict[str, str]:
    """Returns the details of an error in the environment's code or setup; nothing for others.

    `bug`: what happened, its place in the environment's code, and what helps. `missing`: "yes"
    where a library or a setting is missing, so that nothing can work.
    """
    if isinstance(error, AgentError) and error.detail.get("bug"):
        place = place_of(error.__cause__ or error, method)
        return {"bug": sendable(f"A bug in the environment: {error.message} {place}".strip())}
    if not isinstance(error, _BUGS):
        return {}
    if isinstance(error, ConfigError):
        return {"bug": sendable(f"The environment cannot run: {error}"), "missing": "yes"}
    message = str(error)[:MAX_MESSAGE_CHARACTERS]
    text = f"A bug in the environment: {type(error).__name__}: {message} {place_of(error, method)}"
    if not isinstance(error, ImportError):
        return {"bug": sendable(text)}
    hint = f" {missing_module_hint(error.name)}" if error.name else ""
    return {"bug": sendable(text + hint), "missing": "yes"}


def _traceback(error: BaseException, own_file: str) -> str:
    entry = error.__traceback__
    while entry is not None and entry.tb_frame.f_code.co_filename == own_file:
        entry = entry.tb_next
    text = "".join(traceback.format_exception(type(error), error, entry))
    return sendable(text[-MAX_TRACEBACK_CHARACTERS:])


def sendable(text: str) -> str:
    """Returns `text` without the lone surrogates that JSON cannot hold."""
    return text.encode(errors="backslashreplace").decode()
