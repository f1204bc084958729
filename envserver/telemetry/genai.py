"""Attributes of spans by OpenTelemetry's conventions for generative AI (semconv 1.41). Pure.

In: what a call, a tool or a score is about. Out: attributes. Their names stand here, because
OpenTelemetry's packages do not keep them stable. Only `inputs`, `outputs` and `tool_texts` return
texts: without anything that looks like a secret, at most MOST_CHARACTERS in each attribute.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from typing import Any, Final

from envserver_records.records import Message, text_of

from .redaction import redacted

Json = dict[str, Any]
Attributes = dict[str, Any]

MOST_CHARACTERS: Final = 32_768
"""Maximum characters of one attribute; of a longer conversation the oldest messages are left out.
"""
_MOST_OF_A_TEXT: Final = 8192
_LONGEST_SECRET: Final = 4096
_MOST_OF_A_NAME: Final = 256
_REQUEST: Final = ("temperature", "top_p", "max_tokens", "seed")
_SYSTEM: Final = ("system", "developer")
_ROLES: Final = ("system", "user", "assistant", "tool")
_REASONS: Final = {
    "tool_calls": "tool_call",
    "length": "length",
    "content_filter": "content_filter",
}


def agent_span(name: str, rollout_id: str) -> Attributes:
    """Returns the attributes of `invoke_agent NAME`; a rollout is one conversation."""
    return {
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.agent.name": name,
        "gen_ai.conversation.id": rollout_id,
    }


def chat_span(
    model: str, rollout_id: str, agent: str | None, provider: str, sampling: Mapping[str, Any]
) -> Attributes:
    """Returns the attributes of `chat MODEL` before its answer.

    Args:
        provider: the engine's server, such as "vllm".
        sampling: the request's fields; those that the conventions name are taken.
    """
    given = {f"gen_ai.request.{key}": sampling.get(key) for key in _REQUEST}
    return {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": provider,
        "gen_ai.request.model": model,
        "gen_ai.conversation.id": rollout_id,
        **({"gen_ai.agent.name": agent} if agent else {}),
        **{key: value for key, value in given.items() if value is not None},
    }


def used_tokens(seen: int, sampled: int) -> Attributes:
    """Returns the token counts of a call."""
    return {"gen_ai.usage.input_tokens": seen, "gen_ai.usage.output_tokens": sampled}


def tool_span(name: str, call_id: str, rollout_id: str) -> Attributes:
    """Returns the attributes of `execute_tool NAME`."""
    return {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": name,
        "gen_ai.tool.type": "function",
        "gen_ai.tool.call.id": call_id,
        "gen_ai.conversation.id": rollout_id,
    }


def evaluation(name: str, value: float) -> Attributes:
    """Returns the attributes of a score."""
    return {"gen_ai.evaluation.name": name, "gen_ai.evaluation.score.value": value}


def tool_of(call: Any) -> tuple[str, str, str]:
    """Returns the name, the id and the arguments of a tool call in OpenAI's format.

    All three may be a model's words; name and id are cut and without secrets.
    """
    call = call if isinstance(call, dict) else {}
    function = call.get("function")
    function = function if isinstance(function, dict) else {}
    arguments = function.get("arguments")
    text = arguments if isinstance(arguments, str) else _json(arguments or {})
    return name_of(function.get("name") or "unnamed"), name_of(call.get("id")), text


def name_of(value: Any) -> str:
    """Returns a name or an id that a model may have made, cut and without secrets."""
    text = "" if value is None else str(value)
    return redacted(text[:_LONGEST_SECRET])[:_MOST_OF_A_NAME]


def inputs(messages: Sequence[Message], tools: Sequence[Json]) -> Attributes:
    """Returns what a call sends: instructions, conversation, tools."""
    leading = list(takewhile(lambda one: one.get("role") in _SYSTEM, messages))
    found = {"gen_ai.input.messages": _bounded(messages[len(leading) :])}
    if leading:
        parts = [part for message in leading for part in _parts(message)]
        found["gen_ai.system_instructions"] = _first_of(parts)
    if tools:
        found["gen_ai.tool.definitions"] = _first_of([_definition(tool) for tool in tools])
    return found


def outputs(answers: Iterable[tuple[Message, str | None]]) -> Attributes:
    """Returns what a call answers: each choice, and why it ended."""
    told = [
        {**_message(message), "finish_reason": _REASONS.get(reason or "", "stop")}
        for message, reason in answers
    ]
    return {"gen_ai.output.messages": _first_of(told)}


def tool_texts(arguments: str, result: str) -> Attributes:
    """Returns what a tool got and what it returned."""
    return {
        "gen_ai.tool.call.arguments": _text(arguments),
        "gen_ai.tool.call.result": _text(result),
    }


def _first_of(listed: list[Json]) -> str:
    """Returns as JSON those that fit, from the first on."""
    kept: list[str] = []
    size = 0
    for one in listed:
        kept.append(_json(one))
        size += len(kept[-1]) + 1
        if size > MOST_CHARACTERS:
            kept.pop()
            break
    return f"[{','.join(kept)}]"


def _bounded(messages: Sequence[Message]) -> str:
    """Returns the last messages that fit, as JSON; the first one says what is left out."""
    kept: list[str] = []
    size = 0
    for message in reversed(messages):
        told = _json(_message(message))
        size += len(told) + 1
        if kept and size > MOST_CHARACTERS:
            words = f"[{len(messages) - len(kept)} earlier messages are left out]"
            kept.append(_json({"role": "system", "parts": [_text_part(words)]}))
            break
        kept.append(told)
    return f"[{','.join(reversed(kept))}]"


def _message(message: Message) -> Json:
    role = str(message.get("role"))
    role = "system" if role in _SYSTEM else role
    return {"role": role if role in _ROLES else "user", "parts": _parts(message)}


def _parts(message: Message) -> list[Json]:
    if message.get("role") == "tool":
        answered = name_of(message.get("tool_call_id"))
        response = _text(text_of(message))
        return [{"type": "tool_call_response", "id": answered, "response": response}]
    parts: list[Json] = []
    thoughts = message.get("reasoning_content")
    if isinstance(thoughts, str) and thoughts:
        parts.append({"type": "reasoning", "content": _text(thoughts)})
    if text := text_of(message):
        parts.append(_text_part(_text(text)))
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        name, call_id, arguments = tool_of(call)
        parts.append(
            {"type": "tool_call", "id": call_id, "name": name, "arguments": _text(arguments)}
        )
    return parts


def _text_part(text: str) -> Json:
    return {"type": "text", "content": text}


def _definition(tool: Json) -> Json:
    function = tool.get("function")
    function = function if isinstance(function, dict) else tool
    known = {key: function[key] for key in ("description", "parameters") if key in function}
    return {"type": "function", "name": str(function.get("name")), **known}


def _text(text: str) -> str:
    """Returns a text without secrets, cut in its middle if it is long."""
    if len(text) <= _MOST_OF_A_TEXT:
        return redacted(text)
    half = _MOST_OF_A_TEXT // 2
    around = half + _LONGEST_SECRET  # a secret that the cut would halve is found whole
    begin, end = redacted(text[:around])[:half], redacted(text[-around:])[-half:]
    return f"{begin} [{len(text) - 2 * half} characters are left out] {end}"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)
