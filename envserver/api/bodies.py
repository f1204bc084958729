"""Request bodies, read raw and validated once, whatever their content type says.

In: the bytes of a body and the type it should have. Out: the validated value, or an error that
names the place in FastAPI's shape: `{"type", "loc", "msg", "input"}`. What the sender sent never
comes back at more than a few hundred characters.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, Final, TypeVar

import orjson
from pydantic import BaseModel, TypeAdapter, ValidationError
from starlette.requests import Request

from ..errors import InputError, UsageError

T = TypeVar("T")

_MOST_ERRORS: Final = 100
_LONGEST_INPUT: Final = 400
_POSITION: Final = re.compile(r" at line (\d+) column (\d+)$")


class Refused(InputError):
    """A body that is JSON and not of the form asked for; `errors` say where."""

    kind = "input"

    def __init__(self, errors: list[dict[str, Any]]) -> None:
        first = errors[0]
        place = ".".join(str(part) for part in first["loc"])
        super().__init__(f"{place}: {first['msg']}", place=place)
        self.errors = errors


class Unreadable(UsageError):
    """A body that is no text, or nests deeper than anything that is meant."""

    kind = "unreadable"

    def __init__(self) -> None:
        super().__init__("There was an error parsing the body")


def refusal(kind: str, place: Sequence[str | int], message: str, value: object) -> dict[str, Any]:
    """One error in FastAPI's shape."""
    return {"type": kind, "loc": list(place), "msg": message, "input": shown(value)}


async def read_body(request: Request, wanted: TypeAdapter[T]) -> T:
    """The request's body as `wanted`.

    Raises:
        Refused: no body, no JSON, or JSON of another form.
        Unreadable: not UTF-8, or nested too deeply.
    """
    return parse_body(await request.body(), wanted)


def parse_body(raw: bytes, wanted: TypeAdapter[T]) -> T:
    """`raw` as `wanted`; raises as `read_body`."""
    if not raw:
        raise Refused([refusal("missing", ["body"], "Field required", None)])
    try:
        return wanted.validate_json(raw)
    except ValidationError as error:
        raise _refused(raw, error) from None


def request_body(model: type[BaseModel], *, listed: bool = False) -> dict[str, Any]:
    """The request body for the OpenAPI document: bodies are read raw, so FastAPI does not know
    them.
    """
    schema = model.model_json_schema()
    if listed:
        schema = {"type": "array", "items": schema}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _refused(raw: bytes, error: ValidationError) -> UsageError:
    found = error.errors(include_url=False, include_context=True)[:_MOST_ERRORS]
    if found[0]["type"] == "json_invalid":
        return _no_json(raw, str(found[0]["ctx"]["error"]))
    return Refused([refusal(e["type"], ["body", *e["loc"]], e["msg"], e["input"]) for e in found])


def _no_json(raw: bytes, reason: str) -> UsageError:
    try:
        raw.decode()
    except UnicodeDecodeError:
        return Unreadable()
    if reason.startswith("recursion limit"):
        return Unreadable()
    place = _POSITION.search(reason)
    offset = _offset(raw, int(place[1]), int(place[2])) if place else 0
    error = refusal("json_invalid", ["body", offset], "JSON decode error", {})
    return Refused([{**error, "ctx": {"error": _POSITION.sub("", reason)}}])


def _offset(raw: bytes, line: int, column: int) -> int:
    start = 0
    for _ in range(line - 1):
        start = raw.find(b"\n", start) + 1
    return max(0, start + column - 1)


def shown(value: object) -> object:
    """`value` as it may stand in an answer: short, and of types that every JSON reader knows."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, bool | float):
        return value
    if isinstance(value, int):
        return value if abs(value) < 2**63 else str(value)[:_LONGEST_INPUT]
    if isinstance(value, str) and len(value) <= _LONGEST_INPUT:
        return value
    try:
        text = orjson.dumps(value)
    except (TypeError, ValueError):
        text = b""
    if text and len(text) <= _LONGEST_INPUT:
        return orjson.loads(text)
    return f"{str(value)[:_LONGEST_INPUT]}…"
