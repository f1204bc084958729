"""Responses: JSON, errors, and their description in the OpenAPI document.

Errors are problem details (RFC 9457) under /v1 and in FastAPI's form on the Atropos API. Every
EnvserverError has its status; other exceptions are logged and answered with 500, without their
message."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec
import orjson
import structlog
from envserver_records.errors import EnvserverError
from pydantic import BaseModel, ConfigDict
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from ..settings.section import Described
from .requests import Refused, refusal, request_body, schema_later

if TYPE_CHECKING:
    from fastapi import FastAPI


log = structlog.get_logger(__name__)


class Problem(Described):
    """Problem details (RFC 9457); some kinds have additional members."""

    model_config = ConfigDict(extra="allow")

    type: str
    title: str
    status: int
    detail: str


PROBLEM: Final = "application/problem+json"
_NATIVE: Final = ("/v1", "/healthz", "/readyz")


def answer_errors(app: FastAPI) -> None:
    from fastapi.exceptions import RequestValidationError

    app.add_exception_handler(EnvserverError, on_ours)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(Exception, _on_surprise)


def is_native(path: str) -> bool:
    """Returns whether errors on this path are problem details."""
    return path.startswith(_NATIVE)


def error_answer(
    path: str,
    status: int,
    message: str,
    *,
    kind: str = "about:blank",
    detail: object = None,
    headers: dict[str, str] | None = None,
    **more: Any,
) -> Response:
    """Builds an error response for a request of `path`.

    Args:
        kind: the snake_case name of the error; `about:blank` adds nothing to the status.
        detail: value of "detail" in the Atropos protocol; default: the message.
    """
    if not is_native(path):
        body = orjson.dumps({"detail": message if detail is None else detail})
        return Response(body, status, headers, "application/json")
    name, title = f"urn:envserver:error:{kind}", kind.replace("_", " ").capitalize()
    if kind == "about:blank":
        name, title = kind, f"HTTP {status}"
    problem = {"type": name, "title": title, "status": status, "detail": message}
    return Response(orjson.dumps({**problem, **more}, default=str), status, headers, PROBLEM)


async def on_ours(request: Request, error: Exception) -> Response:
    assert isinstance(error, EnvserverError)
    if error.status >= 500:
        log.error("request_failed", path=request.url.path, kind=error.kind, error=str(error))
    return answer_to(request.url.path, error)


def answer_to(path: str, error: EnvserverError) -> Response:
    more: dict[str, Any] = dict(error.detail)
    if error.hint:
        more["hint"] = error.hint
    errors = error.errors if isinstance(error, Refused) else None
    seconds = error.detail.get("retry_after_seconds")
    if errors is not None:
        more["errors"] = errors
    return error_answer(
        path,
        error.status,
        error.message,
        kind=error.kind,
        detail=errors,
        headers=None if seconds is None else {"retry-after": str(seconds)},
        **{key: value for key, value in more.items() if key not in _RESERVED},
    )


_RESERVED: Final = {"type", "title", "status", "detail", "kind", "headers", "path", "message"}


async def _on_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    headers = dict(error.headers or {})
    return error_answer(request.url.path, error.status_code, str(error.detail), headers=headers)


async def _on_invalid(request: Request, error: Exception) -> Response:
    from fastapi.exception_handlers import request_validation_exception_handler
    from fastapi.exceptions import RequestValidationError

    assert isinstance(error, RequestValidationError)
    if not is_native(request.url.path):
        return await request_validation_exception_handler(request, error)
    errors = [
        refusal(found["type"], found["loc"], found["msg"], found.get("input"))
        for found in error.errors()
    ]
    return await on_ours(request, Refused(errors))


async def _on_surprise(request: Request, error: Exception) -> Response:
    log.error("request_crashed", path=request.url.path, exc_info=error)
    return error_answer(request.url.path, 500, "Internal Server Error")


MEANINGS: Final = {
    400: "The request cannot be read.",
    401: "An access token is required.",
    403: "This token may not do this, or a page of another site tried to.",
    404: "The resource does not exist.",
    408: "The request took too long to arrive.",
    409: "The request conflicts with the current state; the problem says how.",
    413: "The body is too large.",
    414: "The URL is too long.",
    415: "The body has an unsupported media type.",
    422: "The request is invalid; `errors` says where.",
    421: "The request is for another host.",
    429: "Too many requests, or too much data; try again later.",
    431: "The headers are too large.",
    500: "An internal error; the server's log has details.",
    503: "The store is unavailable at the moment; nothing was changed.",
    507: "No space is left; nothing was changed.",
}
_ALWAYS: Final = (401, 403, 429, 503)
_OF_BODIES: Final = (400, 413, 422, 507)

Responses = dict[int | str, dict[str, Any]]


def json_answer(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Encodes `value` as a JSON response; numpy scalars and arrays are allowed."""
    try:
        body = orjson.dumps(value, default=str, option=orjson.OPT_SERIALIZE_NUMPY)
    except TypeError:
        # Older versions stored what orjson does not write: integers of more than 64 bits, and
        # what is nested deeply. msgspec wrote it then, so it can now.
        body = msgspec.json.encode(value, enc_hook=str)
    return Response(body, status, headers, media_type="application/json")


def route(
    model: type[BaseModel] | None = None,
    *errors: int,
    status: int = 200,
    body: type[BaseModel] | None = None,
    takes_body: bool = False,
    media_types: tuple[str, ...] = (),
    what: str = "Done.",
    also: Responses | None = None,
) -> dict[str, Any]:
    """Returns FastAPI's arguments for a route, which describe it in the OpenAPI document.

    Args:
        model: the JSON body of the answer; None if there is none.
        errors: error statuses of this route, in addition to those of every route.
        status: status on success, which `what` describes; `also`: other answers.
        body: what `read_body` reads; `takes_body`: adds the errors of bodies without one.
        media_types: binary media types that the route can also return.
    """
    success: dict[str, Any] = {"description": what}
    if model is not None:
        success["content"] = {"application/json": {"schema": schema_later(model, is_answer=True)}}
    for kind in media_types:
        success.setdefault("content", {})[kind] = {"schema": _BYTES}
    responses: Responses = {status: success}
    of_bodies = _OF_BODIES if body is not None or takes_body else ()
    for problem in sorted({*errors, *_ALWAYS, *of_bodies}):
        responses[problem] = {
            "description": MEANINGS[problem],
            "content": {PROBLEM: {"schema": schema_later(Problem)}},
        }
    extra = {"openapi_extra": request_body(body)} if body is not None else {}
    return {"status_code": status, "responses": responses | (also or {}), **extra}


_BYTES: Final = {"type": "string", "format": "binary"}
