"""Converts a request of Anthropic's messages API to the fields of the chat API. Pure.

Values that are not supported are refused by name. `budget_tokens` for thinking is not enforced,
since tokens that an engine forces are not sampled.
"""

from __future__ import annotations

from typing import Any

from envserver_records.errors import InputError
from envserver_records.records import Message

from .fields import effort_fields, engine_fields, function_tool, own_tools
from .reading import bad, boolean, mapping, string

_NO_THREADS = "thread_unsupported_request"
"""The error code on which Anthropic's client sends the whole conversation instead of a thread."""
_TOOL_FIELDS = ("name", "description", "strict")
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_THINKING = ("enabled", "adaptive", "between_tools")


def refuse_impossible(body: dict[str, Any]) -> None:
    """Raises InputError: the request asks for something unsupported."""
    if body.get("thread"):
        raise InputError(
            "thread is not supported: send the whole conversation.",
            place="thread",
            error_code=_NO_THREADS,
        )
    if body.get("n") not in (None, 1):
        raise bad("n", "must be 1: a message is one answer")


def tools_of(body: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the tools in the chat API's format.
    Raises InputError: a tool is not one that the agent itself describes and runs.
    """
    return [_tool(tool, place) for tool, place in own_tools(body)]


def wants_thinking(body: dict[str, Any]) -> bool:
    """Returns whether the agent asked to see the reasoning.
    Raises InputError: `thinking` is malformed.
    """
    thinking = mapping(body, "thinking")
    kind = thinking.get("type", "disabled")
    if kind not in (*_THINKING, "disabled"):
        raise bad("thinking.type", f"cannot be {str(kind)[:80]!r}")
    return kind in _THINKING and thinking.get("display") != "omitted"


def fields_of(
    body: dict[str, Any], tools: list[dict[str, Any]], messages: list[Message]
) -> dict[str, Any]:
    """Returns the engine's fields other than messages and tools.
    Raises InputError: a field is malformed or not supported.
    """
    fields = engine_fields(body)
    stop = body.get("stop_sequences")
    if stop:
        if not isinstance(stop, list) or not all(isinstance(text, str) for text in stop):
            raise bad("stop_sequences", "must be a list of texts")
        fields["stop"] = stop
    fields |= _tool_fields(body, tools) | _prefill_fields(messages)
    output = mapping(body, "output_config")
    form = mapping(output, "format", "output_config") or mapping(body, "output_format")
    if form:
        fields["response_format"] = _response_format(form)
    kind = mapping(body, "thinking").get("type")
    if kind is not None:
        own = fields.get("chat_template_kwargs") or {}
        fields["chat_template_kwargs"] = {"enable_thinking": kind != "disabled"} | own
    return fields | effort_fields(output.get("effort"), "output_config.effort")


def _tool(tool: dict[str, Any], place: str) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom"):
        raise bad(
            f"{place}.type",
            f"{str(tool['type'])[:80]!r} is not supported: all tools must be the agent's own,"
            " each with its input_schema",
        )
    schema = mapping(tool, "input_schema", place)
    given = {name: tool[name] for name in _TOOL_FIELDS if tool.get(name) is not None}
    given["parameters"] = schema if "type" in schema else {"type": "object"} | schema
    return function_tool(given, place)


def _tool_fields(body: dict[str, Any], tools: list[dict[str, Any]]) -> dict[str, Any]:
    choice = mapping(body, "tool_choice")
    if not choice:
        return {}
    kind = choice.get("type")
    fields: dict[str, Any] = {}
    if kind == "tool":
        name = string(choice, "name", "tool_choice")
        if all(tool["function"]["name"] != name for tool in tools):
            raise bad("tool_choice.name", f"{name[:80]!r} is not among the tools")
        fields["tool_choice"] = {"type": "function", "function": {"name": name}}
    elif isinstance(kind, str) and kind in _CHOICES:
        fields["tool_choice"] = _CHOICES[kind]
    else:
        raise bad("tool_choice.type", f"cannot be {str(kind)[:80]!r}")
    if boolean(choice, "disable_parallel_tool_use", "tool_choice"):
        fields["parallel_tool_calls"] = False
    if not tools and kind == "any":
        raise bad("tool_choice", "needs tools")
    return fields if tools else {}


def _prefill_fields(messages: list[Message]) -> dict[str, Any]:
    """Returns the fields that let the model continue the assistant's message at the end, if any."""
    last = messages[-1]
    if last["role"] != "assistant":
        return {}
    if last.get("tool_calls"):
        raise bad("messages", "end with tool calls that have no results")
    text = last["content"]
    if not text or text != text.rstrip():
        raise bad(
            "messages",
            "end with an assistant message to continue: it must have text and not end with"
            " whitespace",
        )
    return {"continue_final_message": True, "add_generation_prompt": False}


def _response_format(form: dict[str, Any]) -> dict[str, Any]:
    if form.get("type") != "json_schema" or not isinstance(form.get("schema"), dict):
        raise bad("output_config.format", "must be a json_schema with its schema")
    return {
        "type": "json_schema",
        "json_schema": {"name": "output", "schema": form["schema"], "strict": True},
    }
