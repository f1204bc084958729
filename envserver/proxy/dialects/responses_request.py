"""Converts a request of OpenAI's responses API to the fields of the chat API. Pure.

Values that are not supported, or would make the record inexact, are refused by name.
"""

from __future__ import annotations

from typing import Any

from .fields import effort_fields, engine_fields, schema_format
from .reading import bad, boolean, mapping, string
from .responses_tools import flat_name

_LOGPROBS = "message.output_text.logprobs"


def refuse_impossible(body: dict[str, Any]) -> None:
    """Raises InputError: the request asks for something unsupported."""
    if body.get("truncation") not in (None, "disabled"):
        raise bad("truncation", "must be disabled: it would cut the prompt silently")
    if body.get("n") not in (None, 1):
        raise bad("n", "must be 1: a response is one answer")


def wants_logprobs(body: dict[str, Any]) -> bool:
    """Returns whether the agent asked for logprobs."""
    included = body.get("include") or []
    return _LOGPROBS in included or bool(_top_logprobs(body))


def fields_of(body: dict[str, Any], tools: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the engine's fields other than messages and tools.
    Raises InputError: a field is malformed or not supported.
    """
    fields = engine_fields(body)
    if wants_logprobs(body):
        fields["top_logprobs"] = _top_logprobs(body)
    if tools:
        fields |= _tool_fields(body, tools)
    elif body.get("tool_choice") not in (None, "auto", "none"):
        raise bad("tool_choice", "needs tools")
    form = _response_format(mapping(mapping(body, "text"), "format", "text"))
    if form is not None:
        fields["response_format"] = form
    effort = mapping(body, "reasoning").get("effort")
    return fields | effort_fields(effort, "reasoning.effort")


def _tool_fields(body: dict[str, Any], tools: list[dict[str, Any]]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    choice = body.get("tool_choice")
    if choice is not None:
        fields["tool_choice"] = _tool_choice(choice, tools)
    parallel = boolean(body, "parallel_tool_calls")
    if parallel is not None:
        fields["parallel_tool_calls"] = parallel
    return fields


def _tool_choice(choice: Any, tools: list[dict[str, Any]]) -> Any:
    if choice in ("auto", "none", "required"):
        return choice
    kind = choice.get("type") if isinstance(choice, dict) else choice
    if kind == "allowed_tools":
        if choice.get("mode") not in ("auto", "required"):
            raise bad("tool_choice.mode", "must be auto or required")
        return choice["mode"]
    if kind != "function":
        raise bad("tool_choice", f"{str(kind)[:80]!r} is not supported")
    name = flat_name(choice, "tool_choice")
    if all(tool["function"]["name"] != name for tool in tools):
        raise bad("tool_choice.name", f"{name[:80]!r} is not among the tools")
    return {"type": "function", "function": {"name": name}}


def _response_format(form: dict[str, Any]) -> dict[str, Any] | None:
    kind = form.get("type", "text")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "json_object"}
    if kind != "json_schema":
        raise bad("text.format.type", f"{str(kind)[:80]!r} is not supported")
    if not isinstance(form.get("schema"), dict):
        raise bad("text.format.schema", "must be an object")
    string(form, "name", "text.format")
    schema = {name: form[name] for name in form if name != "type" and form[name] is not None}
    return schema_format(schema, "text.format")


def _top_logprobs(body: dict[str, Any]) -> int:
    wanted: int = body.get("top_logprobs") or 0
    return wanted
