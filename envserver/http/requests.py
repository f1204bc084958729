"""Reads raw request bodies, validates them once, and detects clients that disconnect.

A validation error names its place in exactly FastAPI's form (`{"type", "loc", "msg", "input"}` and
sometimes `"ctx"`), and echoes at most a few hundred characters of the input."""

from __future__ import annotations

import asyncio
import codecs
import json
import math
import reprlib
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any, Final, Self, TypeVar

import orjson
from envserver_records.errors import InputError, TooLargeError, UsageError
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails
from starlette.requests import Request
from starlette.types import Receive

_PLACE: Final = "#/components/schemas/"
_LATER: Final = "#/later/"

Json = dict[str, Any]


def schema_later(model: type[BaseModel], *, is_answer: bool = False) -> Json:
    """Returns a reference that `fill_schemas` replaces. `is_answer`: the schema becomes a
    component, in which fields with a default are required."""
    mode = "serialization" if is_answer else "validation"
    return {"$ref": f"{_LATER}{mode}/{model.__module__}/{model.__qualname__}"}


def fill_schemas(part: Any, components: Json) -> None:
    """Replaces the references of `schema_later` in `part`, and moves nested schemas (`$defs`) to
    `components`."""
    if isinstance(part, list):
        for each in part:
            fill_schemas(each, components)
    elif isinstance(part, dict):
        reference = part.get("$ref")
        if isinstance(reference, str) and reference.startswith(_LATER):
            _fill(part, reference, components)
        elif isinstance(reference, str):
            part["$ref"] = reference.replace("#/$defs/", _PLACE)
        for name, schema in part.pop("$defs", {}).items():
            _add(name, schema, components)
        for each in list(part.values()):
            fill_schemas(each, components)


def _fill(part: Json, reference: str, components: Json) -> None:
    mode, module, name = reference.removeprefix(_LATER).split("/")
    model: type[BaseModel] = getattr(sys.modules[module], name)
    if mode == "validation":
        part.clear()
        part.update(model.model_json_schema())
    else:
        part["$ref"] = _PLACE + name
        _add(name, model.model_json_schema(mode="serialization"), components)


def _add(name: str, schema: Json, components: Json) -> None:
    if name not in components:
        components[name] = schema
        fill_schemas(schema, components)


M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")

_MOST_ERRORS: Final = 100
_LONGEST_INPUT: Final = 1000
_LONGEST_NAME: Final = 200
_MOST_READ_TWICE: Final = 1_000_000
_MOST_VALUES: Final = 20_000_000
"""Maximum number of values in a body; each can take a hundred bytes while it is parsed."""

SERVER_ENDS: Final = "envserver.server_ends"
"""Key in an `http.disconnect` message: the server is shutting down; the client is still there."""

ABORT: Final = "envserver.abort"
"""Extension of a scope: its `abort` closes the connection at once, with what waits to be sent."""

_LONGEST_KEY: Final = 256
_BRIEFLY: Final = reprlib.Repr()
_BRIEFLY.maxstring = _BRIEFLY.maxother = 200


class Refused(InputError):
    """The body is JSON but does not have the expected form; `errors` say where."""

    kind = "input"

    def __init__(self, errors: list[dict[str, Any]]) -> None:
        first = errors[0]
        place = ".".join(str(part) for part in first["loc"])
        super().__init__(f"{place}: {first['msg']}", place=place)
        self.errors = errors


class Unreadable(UsageError):
    """The body is not valid text, or is nested too deeply."""

    kind = "unreadable"

    def __init__(self) -> None:
        super().__init__("There was an error parsing the body")


def refusal(kind: str, place: Sequence[str | int], message: str, value: object) -> dict[str, Any]:
    """Returns one error in FastAPI's form."""
    loc = [part[:_LONGEST_NAME] if isinstance(part, str) else part for part in place]
    return {"type": kind, "loc": loc, "msg": message, "input": shown(value)}


_adapter: Final[Callable[[Any], TypeAdapter[Any]]] = lru_cache(TypeAdapter)


async def read_body(request: Request, model: type[M]) -> M:
    body: M = parse_body(await request.body(), _adapter(model))
    return body


def parse_body(raw: bytes, wanted: TypeAdapter[T]) -> T:
    if not raw:
        raise Refused([refusal("missing", ["body"], "Field required", None)])
    if raw.count(b",") >= _MOST_VALUES:
        raise TooLargeError(f"The body has more than {_MOST_VALUES} values.")
    text = raw.removeprefix(codecs.BOM_UTF8)
    try:
        return wanted.validate_json(text)
    except ValidationError as error:
        raise _refused(text, wanted, error) from None


def request_body(model: type[BaseModel], *, listed: bool = False) -> dict[str, Any]:
    """Describes a body in the OpenAPI document: it is read raw, so FastAPI cannot infer it."""
    schema = schema_later(model)
    if listed:
        schema = {"type": "array", "items": schema}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _refused(raw: bytes, wanted: TypeAdapter[T], error: ValidationError) -> UsageError:
    """Returns the error that FastAPI would report, which is that of Python's own JSON parser. For
    large bodies the error has pydantic's wording."""
    large = len(raw) > _MOST_READ_TWICE
    found = error.errors(include_url=False, include_input=not large)
    if "recursion limit" in found[0]["msg"]:
        return Unreadable()
    try:
        value = None if large else json.loads(raw.decode())
    except json.JSONDecodeError as unread:
        return _no_json(unread.pos, unread.msg)
    except (ValueError, RecursionError):
        return Unreadable()
    if found[0]["type"] == "json_invalid":
        # Python accepts half of a surrogate pair, but cannot encode it again.
        return _no_json(0, str(found[0]["ctx"]["error"]))
    try:
        if not large:
            wanted.validate_python(value, from_attributes=True)
    except ValidationError as exact:
        found = exact.errors(include_url=False)
    return Refused([_as_fastapi(error) for error in found[:_MOST_ERRORS]])


def _no_json(position: int, reason: str) -> Refused:
    error = refusal("json_invalid", ["body", position], "JSON decode error", {})
    return Refused([{**error, "ctx": {"error": reason}}])


def _as_fastapi(found: ErrorDetails) -> dict[str, Any]:
    error = refusal(found["type"], ["body", *found["loc"]], found["msg"], found.get("input"))
    if context := found.get("ctx"):
        error["ctx"] = {name: shown(value) for name, value in context.items()}
    return error


def shown(value: object) -> object:
    """Shortens `value` for a response and converts it to plain JSON types."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, bool | float):
        return value
    if isinstance(value, int):
        return value if abs(value) < 2**63 else str(value)[:_LONGEST_INPUT]
    if isinstance(value, str) and len(value) <= _LONGEST_INPUT:
        return value
    try:
        text = orjson.dumps(value) if _is_small(value) else b""
    except (TypeError, ValueError):
        text = b""
    if text and len(text) <= _LONGEST_INPUT:
        return orjson.loads(text)
    return _BRIEFLY.repr(value)


def _is_small(value: object) -> bool:
    parts = [value]
    for part in parts:
        if isinstance(part, Mapping | list):
            parts.extend(part.values() if isinstance(part, Mapping) else part)
        if len(parts) > _LONGEST_INPUT:
            return False
    return True


class Hangup:
    """Detects that the client of a request has disconnected. Read the request's body first."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self.server_ends = False
        """True if the server is shutting down while the client is still connected."""

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._listen(), name="hang-up")
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task

    @property
    def gone(self) -> bool:
        return self._task.done()

    def then(self, call: Callable[[], None]) -> None:
        self._task.add_done_callback(lambda task: call())

    async def wait(self, *others: asyncio.Task[Any], seconds: float) -> None:
        """Waits until the client disconnects, one of `others` is done, or `seconds` have passed.
        Cancels the remaining `others` and raises the exception of a failed one."""
        try:
            await asyncio.wait(
                {self._task, *others}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            for other in others:
                other.cancel()
        for other in others:
            if other.done() and not other.cancelled():
                other.result()

    async def _listen(self) -> None:
        while (message := await self._receive())["type"] != "http.disconnect":
            pass
        self.server_ends = SERVER_ENDS in message


def key_of(request: Request) -> str | None:
    key = request.headers.get("idempotency-key")
    if key and len(key) > _LONGEST_KEY:
        raise InputError("The Idempotency-Key is too long.", place="Idempotency-Key")
    return key or None
