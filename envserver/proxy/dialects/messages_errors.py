"""Errors in the format of Anthropic's messages API."""

from __future__ import annotations

from typing import Any

from envserver_records.errors import EnvserverError

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    413: "request_too_large",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_of(error: EnvserverError) -> dict[str, Any]:
    """Returns the body or event for `error`; `detail["error_code"]`, if any, is for the client."""
    other = "invalid_request_error" if error.status < 500 else "api_error"
    said: dict[str, Any] = {"type": _TYPES.get(error.status, other), "message": str(error)}
    if "error_code" in error.detail:
        said["details"] = {"error_code": error.detail["error_code"]}
    return {"type": "error", "error": said}
