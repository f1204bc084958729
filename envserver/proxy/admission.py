"""Reads an agent's request, and refuses what no agent may ask of the engine.

Only fields of the API's table go on (`dialects/base.py`); others are ignored, and the calls say
so, or refused. The run may pass on more (`tokens.extra_fields`), and decides how agents may
constrain what is sampled (`tokens.constraints`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from envserver_records.errors import InputError
from envserver_records.records import Message

from ..settings.config import TokensConfig
from ..tokens.images import facts_of_all, urls_of
from .asgi import Scope, header
from .body import RAW, check_constraints, check_references, not_allowed
from .bounds import InFlight
from .dialects import DialectAdapter, Memory
from .dialects.base import FieldTable, ModelRequest, bad, is_ignored, is_off
from .dialects.conversation import check_images, check_media

_DEFAULT = TokensConfig()
_READ = ("messages", "input", "prompt", "system")
_MOST_NOTED = 16
_EMPTY: tuple[Any, ...] = ("", [], {})


class _Fields(NamedTuple):
    """A request's fields for the dialect and for the engine as they are, and the names of ignored
    ones."""

    known: dict[str, Any]
    passed: dict[str, Any]
    ignored: list[str]


def read_request(
    dialect: DialectAdapter,
    body: dict[str, Any],
    memory: Memory,
    tokens: TokensConfig = _DEFAULT,
) -> ModelRequest:
    """Reads a decoded request body within what the run allows (`tokens`)."""
    fields = _Fields({}, {}, [])
    for name, value in body.items():
        if value is not None:
            _sort(dialect.table, name, value, fields, tokens)
    request = dialect.read(fields.known, memory)
    request.fields |= fields.passed
    request.unchecked = not fields.passed.keys() <= RAW.keys()
    request.ignored = fields.ignored[:_MOST_NOTED]
    check_media(request.messages, tokens)
    check_references(request.fields, request.tools)
    check_constraints(request.fields, request.tools, tokens.constraints)
    for name in _READ:
        fields.known.pop(name, None)  # a retry's answer needs the rest only
    return request


async def admit_images(messages: list[Message], tokens: TokensConfig, in_flight: InFlight) -> None:
    """Checks the images of a request, all of their bytes."""
    check_images(await facts_of_all(urls_of(messages), in_flight.reading), tokens)


def _sort(table: FieldTable, name: str, value: Any, fields: _Fields, tokens: TokensConfig) -> None:
    """Checks one field and puts it where it belongs; one that switches nothing on is left out."""
    check = table.read.get(name) or table.engine.get(name)
    if check is not None:
        check(value, name)
        if name in table.read or value not in _EMPTY:
            fields.known[name] = value
    elif name in table.dropped and name not in tokens.extra_fields:
        return
    elif name in table.refused:
        if not is_off(name, value):
            raise bad(name, f"is not supported: {table.refused[name]}")
    elif name in RAW:
        if is_off(name, value):
            return
        if tokens.constraints != "all":
            raise not_allowed(name, "all")
        RAW[name](value, name)
        fields.passed[name] = value
    elif name in tokens.extra_fields:
        fields.passed[name] = value
    elif is_ignored(name):
        fields.ignored.append(name[:80])
    else:
        raise _unknown(name[:80])


def _unknown(name: str) -> InputError:
    return InputError(
        f"{name} is not among the fields that an agent may send. Leave it out; if this run's"
        f" agents need it, run with --tokens.extra_fields {name}.",
        place=name,
    )


# Coding programs differ from other agents in two ways. A conversation of theirs only grows, so an
# equal request right after an answer is a retry, which they do not mark. And they ask for titles
# and summaries beside their conversation (see `retries.SideCalls`).

_NAMES = ("claude-cli/", "codex", "opencode/", "qwencode/")


def is_program(scope: Scope) -> bool:
    return header(scope, b"user-agent").lower().startswith(_NAMES)
