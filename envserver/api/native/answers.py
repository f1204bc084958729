"""JSON responses, and their description in the OpenAPI document.

Routes read raw requests and build responses themselves, so FastAPI cannot infer either; each
route declares its responses with `answers`.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
import orjson
from pydantic import BaseModel
from starlette.responses import Response

from ..problems import PROBLEM, Problem
from ..schemas import schema_later

MEANINGS: Final = {
    400: "The request cannot be read.",
    401: "A token is needed.",
    403: "This token, or a page of another site, may not do this.",
    404: "There is no such thing.",
    408: "The request took too long to arrive.",
    409: "The request conflicts with the current state; the problem says how.",
    413: "The body is too large.",
    414: "The URL is too long.",
    415: "The body is of another media type.",
    422: "The request has another form than asked for; `errors` say where.",
    421: "The request names another host.",
    429: "Too much at a time; ask again later.",
    431: "The headers are too large.",
    500: "A fault of the server; its log has it.",
    503: "The store cannot do it just now; nothing was done.",
    507: "There is no room left; nothing was done.",
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


def answers(
    model: type[BaseModel] | None = None,
    *errors: int,
    status: int = 200,
    media_types: tuple[str, ...] = (),
    body: bool = False,
    what: str = "Done.",
) -> Responses:
    """Describes the responses of a route for the OpenAPI document.

    Args:
        model: the JSON body; None if there is none.
        errors: error statuses of this route, in addition to those of every route.
        status: status on success.
        media_types: binary media types that the route can also return.
        body: whether the route takes a request body, which adds the errors of bodies.
        what: description of the success response.
    """
    success: dict[str, Any] = {"description": what}
    if model is not None:
        success["content"] = {"application/json": {"schema": schema_later(model, is_answer=True)}}
    for kind in media_types:
        success.setdefault("content", {})[kind] = {"schema": _BYTES}
    found: Responses = {status: success}
    for problem in sorted({*errors, *_ALWAYS, *(_OF_BODIES if body else ())}):
        found[problem] = {
            "description": MEANINGS[problem],
            "content": {PROBLEM: {"schema": schema_later(Problem)}},
        }
    return found


_BYTES: Final = {"type": "string", "format": "binary"}
