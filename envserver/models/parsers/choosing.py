"""Finds the format of a model's tool calls: the one that reads back what its template writes."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from envserver_records.records import Message

from . import hermes, llama, mistral, pythonic, xml
from .calls import ParsedCalls, Tools

Parse = Callable[[str, Tools], ParsedCalls | None]
Write = Callable[[list[Message], Tools], str | None]
"""Renders a conversation with tools by a model's template; None if it does not accept it."""

FORMATS: dict[str, Parse] = {
    "hermes": hermes.parse,
    "functions": xml.parse_functions,
    "keys": xml.parse_keys,
    "mistral": mistral.parse,
    "pythonic": pythonic.parse,
    "llama": llama.parse,
}
"""All formats, stricter ones first."""

_NAME, _KEY, _VALUE = "zqtool", "zqkey", "zqvalue"
_ASKED = {"role": "user", "content": "zqask"}
_SAID = "zqsaid"
_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "zqdescription",
        "parameters": {
            "type": "object",
            "properties": {_KEY: {"type": "string", "description": "zqword"}},
            "required": [_KEY],
        },
    },
}
_CALL = {
    "id": "zqcall001",
    "type": "function",
    "function": {"name": _NAME, "arguments": json.dumps({_KEY: _VALUE})},
}


def detect_format(write: Write) -> str | None:
    """Returns the name of the format in FORMATS in which `write` writes calls, None if there is
    none."""
    said = write([_ASKED, {"role": "assistant", "content": _SAID}], [_TOOL])
    calling = write(
        [_ASKED, {"role": "assistant", "content": None, "tool_calls": [_CALL]}], [_TOOL]
    )
    if said is None or calling is None:
        return None
    before, found, behind = said.rpartition(_SAID)
    if not found or not calling.startswith(before):
        return None
    text = calling[len(before) :].removesuffix(behind)
    return next((name for name, parse in FORMATS.items() if _reads(parse, text)), None)


def _reads(parse: Parse, text: str) -> bool:
    found = parse(text, [_TOOL])
    if found is None or len(found.calls) != 1 or found.content.strip():
        return False
    call = found.calls[0]
    return call.name == _NAME and json.loads(call.arguments) == {_KEY: _VALUE}
