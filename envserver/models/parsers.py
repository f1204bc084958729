"""Parses tool calls in text that a model wrote.

Each format is a function of text and tools; it returns None if a call is malformed, so that all of
the text is plain. A model's format is found by rendering a call with its chat template: the format
that reads the call back is the right one.
"""

from __future__ import annotations

import ast
import json
import re
import uuid
from collections.abc import Callable
from typing import Any

import msgspec
from envserver_records.records import Message

Tools = list[dict[str, Any]]


class ParsedCall(msgspec.Struct, frozen=True):
    """`arguments` is JSON."""

    name: str
    arguments: str

    def message(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": function}


class ParsedCalls(msgspec.Struct, frozen=True):
    """At least one call, and the text before them."""

    calls: list[ParsedCall]
    content: str = ""


Parse = Callable[[str, Tools], ParsedCalls | None]

_TAG = "<tool_call>"
_TAGGED = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


def parse_hermes(text: str, tools: Tools) -> ParsedCalls | None:
    """Hermes, Qwen 2.5, Qwen 3: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""
    if _TAG not in text:
        return None
    calls = [_hermes_call(match.group(1).strip()) for match in _TAGGED.finditer(text)]
    return _all_calls(calls, text[: text.index(_TAG)])


def _hermes_call(text: str) -> ParsedCall | None:
    value, end = _json_at(text, 0)
    if end != len(text) or not isinstance(value, dict) or "arguments" not in value:
        return None
    return _valid_call(value.get("name"), value["arguments"])


_FUNCTION = re.compile(r"<function=([^<>]*)>(.*?)(?:</function>|\Z)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^<>]*)>(.*?)(?:</parameter>|(?=<parameter=)|\Z)", re.DOTALL)
_KEY_AND_VALUE = re.compile(
    r"<arg_key>([^<>]*)</arg_key>\s*<arg_value>(.*?)(?:</arg_value>|\Z)", re.DOTALL
)
"""Names hold no angle brackets, so matching takes linear time."""
_NULLS = ("null", "none")


def parse_functions(text: str, tools: Tools) -> ParsedCalls | None:
    """Qwen 3 Coder: `<tool_call><function=NAME><parameter=KEY>VALUE</parameter>...`."""
    first = _FUNCTION.search(text)
    if first is None:
        return None
    opened = text.rfind(_TAG, 0, first.start())
    calls = [
        _tagged_call(match.group(1), _PARAMETER.findall(match.group(2)), tools)
        for match in _FUNCTION.finditer(text)
    ]
    return _all_calls(calls, text[: first.start() if opened < 0 else opened])


def parse_keys(text: str, tools: Tools) -> ParsedCalls | None:
    """GLM 4.5: `<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>`."""
    if _TAG not in text:
        return None
    calls = []
    for match in _TAGGED.finditer(text):
        name, mark, arguments = match.group(1).partition("<arg_key>")
        calls.append(_tagged_call(name, _KEY_AND_VALUE.findall(mark + arguments), tools))
    return _all_calls(calls, text[: text.index(_TAG)])


def _tagged_call(name: str, pairs: list[tuple[str, str]], tools: Tools) -> ParsedCall | None:
    name = name.strip()
    schemas = _parameters_of(tools, name)
    texts = {key.strip(): text for key, text in pairs}
    return _valid_call(
        name, {key: _tagged_value(text, schemas.get(key)) for key, text in texts.items()}
    )


def _parameters_of(tools: Tools, name: str) -> dict[str, Any]:
    for tool in tools:
        function = tool.get("function")
        if isinstance(function, dict) and function.get("name") == name:
            schema = function.get("parameters")
            properties = schema.get("properties") if isinstance(schema, dict) else None
            return properties if isinstance(properties, dict) else {}
    return {}


def _tagged_value(text: str, schema: Any) -> Any:
    """`text` without one line break at each end, converted to the type in `schema`."""
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


_MISTRAL = "[TOOL_CALLS]"


def parse_mistral(text: str, tools: Tools) -> ParsedCalls | None:
    """Mistral: `[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]`, or since 2025
    `[TOOL_CALLS]NAME[ARGS]{...}` for each call, where `[ARGS]` may be missing."""
    content, *parts = text.split(_MISTRAL)
    if not parts:
        return None
    calls: list[ParsedCall | None] = []
    for part in parts:
        calls += _mistral_list(part) if part.lstrip().startswith("[") else [_mistral_call(part)]
    return _all_calls(calls, content)


def _mistral_list(part: str) -> list[ParsedCall | None]:
    values, end = _json_at(part.lstrip(), 0)
    if not end:
        return [None]
    return [
        _valid_call(value.get("name"), value.get("arguments")) if isinstance(value, dict) else None
        for value in values
    ]


def _mistral_call(part: str) -> ParsedCall | None:
    start = part.find("{")
    if start < 0:
        return None
    name = part[:start].removesuffix("[ARGS]").partition("[CALL_ID]")[0].strip()
    arguments, end = _json_at(part, start)
    return _valid_call(name, arguments) if end else None


_MOST_PYTHON_CHARACTERS = 200_000


def parse_pythonic(text: str, tools: Tools) -> ParsedCalls | None:
    """Llama 3.2 and 4, OLMo, ToolACE: `[name(key="value"), other(key=1)]`, with nothing else."""
    text = text.strip().removeprefix("<|python_start|>").removesuffix("<|python_end|>").strip()
    if not (text.startswith("[") and text.endswith("]") and len(text) <= _MOST_PYTHON_CHARACTERS):
        return None
    try:
        tree = ast.parse(text, mode="eval").body
        if not isinstance(tree, ast.List):
            return None
        return _all_calls([_pythonic_call(node) for node in tree.elts])
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        return None


def _pythonic_call(node: ast.expr) -> ParsedCall | None:
    if not isinstance(node, ast.Call) or node.args:
        return None
    arguments = {pair.arg: ast.literal_eval(pair.value) for pair in node.keywords if pair.arg}
    return _valid_call(ast.unparse(node.func), arguments)


def parse_llama(text: str, tools: Tools) -> ParsedCalls | None:
    """Llama 3: `{"name": ..., "parameters": {...}}`, with or without `<|python_tag|>` before it.

    The text around the calls is dropped, as Llama's own parsers do.
    """
    calls: list[ParsedCall | None] = []
    at = text.find("{")
    while at >= 0:
        value, end = _json_at(text, at)
        if not end:
            return None
        calls.append(_llama_call(value))
        at = text.find("{", end)
    return _all_calls(calls)


def _llama_call(value: dict[str, object]) -> ParsedCall | None:
    for name in ("arguments", "parameters"):
        if name in value:
            return _valid_call(value.get("name"), value[name])
    return None


def _valid_call(name: Any, arguments: Any) -> ParsedCall | None:
    if not isinstance(name, str) or not name:
        return None
    return ParsedCall(name, json.dumps(arguments, ensure_ascii=False))


def _all_calls(calls: list[ParsedCall | None], content: str = "") -> ParsedCalls | None:
    """None if there are none or one of them is invalid."""
    valid = [call for call in calls if call is not None]
    return ParsedCalls(valid, content) if valid and len(valid) == len(calls) else None


def _json_at(text: str, start: int) -> tuple[Any, int]:
    """The JSON value that begins at `start`, and its end; (None, 0) if there is none."""
    try:
        return json.JSONDecoder().raw_decode(text, start)
    except (ValueError, RecursionError):
        return None, 0


FORMATS: dict[str, Parse] = {
    "hermes": parse_hermes,
    "functions": parse_functions,
    "keys": parse_keys,
    "mistral": parse_mistral,
    "pythonic": parse_pythonic,
    "llama": parse_llama,
}
"""All formats, stricter ones first."""

Write = Callable[[list[Message], Tools], str | None]
"""Renders a conversation with tools by a model's template; None if it does not accept it."""

_NAME, _KEY, _VALUE = "zqtool", "zqkey", "zqvalue"
_QUESTION = {"role": "user", "content": "zqask"}
_ANSWER = "zqsaid"
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
    """The name in FORMATS of the format in which `write` writes calls, or None."""
    answer = write([_QUESTION, {"role": "assistant", "content": _ANSWER}], [_TOOL])
    calling = write(
        [_QUESTION, {"role": "assistant", "content": None, "tool_calls": [_CALL]}], [_TOOL]
    )
    if answer is None or calling is None:
        return None
    before, separator, behind = answer.rpartition(_ANSWER)
    if not separator or not calling.startswith(before):
        return None
    text = calling[len(before) :].removesuffix(behind)
    return next((name for name, parse in FORMATS.items() if _reads(parse, text)), None)


def _reads(parse: Parse, text: str) -> bool:
    parsed = parse(text, [_TOOL])
    if parsed is None or len(parsed.calls) != 1 or parsed.content.strip():
        return False
    call = parsed.calls[0]
    return call.name == _NAME and json.loads(call.arguments) == {_KEY: _VALUE}
