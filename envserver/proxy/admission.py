"""Reads an agent's request, and refuses what no agent may ask of the engine.

Only fields of the API's table go on (`dialects/tables.py`). The run may pass on more
(`tokens.extra_fields`), and decides how agents may constrain what is sampled
(`tokens.constraints`).
"""

from __future__ import annotations

from typing import Any

from envserver_records.errors import InputError
from envserver_records.records import Message

from ..tokens.images import facts_of_all, urls_of
from ..tokens_config import TokensConfig
from .bounds import InFlight
from .constraints import RAW, check_constraints, not_allowed
from .dialects import DialectAdapter, Memory
from .dialects.media import check_images, check_media
from .dialects.reading import bad
from .dialects.tables import FieldTable
from .model_request import ModelRequest

_DEFAULT = TokensConfig()
_READ = ("messages", "input", "prompt", "system")


def read_request(
    dialect: DialectAdapter,
    body: dict[str, Any],
    memory: Memory,
    tokens: TokensConfig = _DEFAULT,
) -> ModelRequest:
    """Reads a decoded request body.

    Args:
        tokens: what the run allows.

    Raises:
        InputError: a field is missing, malformed, too large or not allowed; `place` names it.
    """
    known: dict[str, Any] = {}
    passed: dict[str, Any] = {}
    for name, value in body.items():
        if value is not None:
            _sort(dialect.table, name, value, known, passed, tokens)
    request = dialect.read(known, memory)
    request.fields |= passed
    request.unchecked = not passed.keys() <= RAW.keys()
    check_media(request.messages, tokens)
    check_constraints(request.fields, request.tools, tokens.constraints)
    for name in _READ:
        known.pop(name, None)  # a retry's answer needs the rest only
    return request


async def admit_images(messages: list[Message], tokens: TokensConfig, in_flight: InFlight) -> None:
    """Checks the images of a request, all of their bytes. Raises InputError: see `check_images`."""
    check_images(await facts_of_all(urls_of(messages), in_flight.reading), tokens)


def _sort(
    table: FieldTable,
    name: str,
    value: Any,
    known: dict[str, Any],
    passed: dict[str, Any],
    tokens: TokensConfig,
) -> None:
    """Checks one field, and puts it into `known` (for the dialect), `passed` (for the engine
    as it is) or neither."""
    check = table.read.get(name) or table.engine.get(name)
    if check is not None:
        check(value, name)
        known[name] = value
    elif name in table.dropped and name not in tokens.extra_fields:
        return
    elif name in table.refused:
        if value:
            raise bad(name, f"is not supported: {table.refused[name]}")
    elif name in RAW:
        if tokens.constraints != "all":
            raise not_allowed(name, "all")
        RAW[name](value, name)
        passed[name] = value
    elif name in tokens.extra_fields:
        passed[name] = value
    else:
        raise _unknown(name[:80])


def _unknown(name: str) -> InputError:
    return InputError(
        f"{name} is not among the fields that an agent may send. Leave it out; if this run's"
        f" agents need it, run with --tokens.extra_fields {name}.",
        place=name,
    )
