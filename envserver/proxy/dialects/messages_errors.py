"""Errors in the format of Anthropic's messages API."""

from __future__ import annotations

from typing import Any

from envserver_records.errors import EnvserverError, LimitReached

from ..context_length import is_context_limit

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_of(error: EnvserverError) -> dict[str, Any]:
    """Returns the body or event for `error`; `detail["error_code"]`, if any, is for the client."""
    kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    if isinstance(error, LimitReached):  # sent with status 400: waiting does not help
        kind = "invalid_request_error"
    said: dict[str, Any] = {"type": kind, "message": _message(error)}
    if "error_code" in error.detail:
        said["details"] = {"error_code": error.detail["error_code"]}
    return {"type": "error", "error": said}


def _message(error: EnvserverError) -> str:
    """Returns the message; that of a full context in the words by which clients recognise it."""
    if not is_context_limit(error):
        return str(error)
    prompt, answer, most = (
        error.detail.get(name) for name in ("prompt_tokens", "answer_tokens", "context_tokens")
    )
    if prompt is None or most is None:
        return f"prompt is too long: {error.message}"
    if prompt > most or answer is None:
        return f"prompt is too long: {prompt} tokens > {most} maximum"
    return (
        f"input length and `max_tokens` exceed context limit: {prompt} + {answer} > {most}, "
        "decrease input length or `max_tokens` and try again"
    )
