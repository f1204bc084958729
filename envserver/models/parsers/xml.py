"""Calls whose arguments are written as tags, not as JSON.

Qwen 3 Coder: `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`.
GLM 4.5: `<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>`.
A value is read as the type that the tool's schema gives to its parameter. Reading takes linear
time: names hold no angles.
"""

from __future__ import annotations

import json
import re
from typing import Any

from .calls import ParsedCall, ParsedCalls, Tools, found, parameters_of, parsed_call

_OPEN = "<tool_call>"
_FUNCTION = re.compile(r"<function=([^<>]*)>(.*?)(?:</function>|\Z)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^<>]*)>(.*?)(?:</parameter>|(?=<parameter=)|\Z)", re.DOTALL)
_GLM_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_GLM_ARGUMENT = re.compile(
    r"<arg_key>([^<>]*)</arg_key>\s*<arg_value>(.*?)(?:</arg_value>|\Z)", re.DOTALL
)
_NULLS = ("null", "none")


def parse_functions(text: str, tools: Tools) -> ParsedCalls | None:
    """Returns the calls of Qwen 3 Coder in `text`."""
    first = _FUNCTION.search(text)
    if first is None:
        return None
    opened = text.rfind(_OPEN, 0, first.start())
    calls = [
        _parsed_call(match.group(1), _PARAMETER.findall(match.group(2)), tools)
        for match in _FUNCTION.finditer(text)
    ]
    return found(calls, text[: first.start() if opened < 0 else opened])


def parse_keys(text: str, tools: Tools) -> ParsedCalls | None:
    """Returns the calls of GLM in `text`."""
    if _OPEN not in text:
        return None
    calls = []
    for match in _GLM_CALL.finditer(text):
        name, mark, arguments = match.group(1).partition("<arg_key>")
        calls.append(_parsed_call(name, _GLM_ARGUMENT.findall(mark + arguments), tools))
    return found(calls, text[: text.index(_OPEN)])


def _parsed_call(name: str, pairs: list[tuple[str, str]], tools: Tools) -> ParsedCall | None:
    name = name.strip()
    schemas = parameters_of(tools, name)
    texts = {key.strip(): text for key, text in pairs}
    return parsed_call(name, {key: _value(text, schemas.get(key)) for key, text in texts.items()})


def _value(text: str, schema: Any) -> Any:
    """Returns `text` without one line break at each end, converted to the type in `schema`."""
    text = text.removeprefix("\n").removesuffix("\n")
    kinds = schema.get("type") if isinstance(schema, dict) else None
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if "null" in kinds and text.strip().lower() in _NULLS:
        return None
    if "string" in kinds or kinds == [None]:
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
