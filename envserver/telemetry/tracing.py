"""Trace spans of rollouts, which do nothing without a collector, and their attributes.

A rollout is one trace: its task, each attempt of its agent, each model call, its scoring, and the
storing of its group. The current Span of a task is found through a context variable; a part that
runs in another task is given its parent.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from itertools import takewhile
from typing import Any, Final

from envserver_records.records import Message, text_of

from .redaction import redacted

Attributes = Mapping[str, Any]


class Span:
    """A span that does nothing; those of a collector are subclasses."""

    traceparent = ""
    """The W3C header that identifies the span to other servers; "" if nothing is traced."""
    texts = False

    def child(
        self, name: str, attributes: Attributes, *, client: bool = False
    ) -> AbstractContextManager[Span]:
        """Opens a child span for a block; an error that leaves the block marks it as failed.
        `attributes` must hold no secrets; prompts and answers only with `texts`. `client`: it
        covers a request to another server."""
        return _NOTHING

    def note(self, attributes: Attributes) -> None:
        pass

    def past(self, name: str, attributes: Attributes, started_at: float, ended_at: float) -> None:
        """Adds a finished child; times are seconds since the epoch."""


class Tracer:
    """A tracer that does nothing."""

    def trace(self, name: str, attributes: Attributes) -> AbstractContextManager[Span]:
        return _NOTHING


Root = tuple[Attributes, Span]
"""A root span, and the attributes that it began with."""
NO_SPAN: Final = Span()
NO_TRACER: Final = Tracer()
_NOTHING: Final = nullcontext(NO_SPAN)

_current: ContextVar[Span] = ContextVar("envserver_span", default=NO_SPAN)
_roots: ContextVar[list[Root] | None] = ContextVar("envserver_roots", default=None)


def current() -> Span:
    return _current.get()


@contextmanager
def within(opened: AbstractContextManager[Span]) -> Iterator[Span]:
    """Makes a span the current one for this task and the tasks that it starts."""
    with opened as span:
        token = _current.set(span)
        try:
            yield span
        finally:
            _current.reset(token)


@contextmanager
def root(tracer: Tracer, name: str, attributes: Attributes) -> Iterator[Span]:
    with within(tracer.trace(name, attributes)) as span:
        known = _roots.get()
        if span.traceparent and known is not None:
            known.append((attributes, span))
        yield span


@contextmanager
def gathered() -> Iterator[list[Root]]:
    """Collects the root spans begun in the block by this task and the tasks that it starts."""
    roots: list[Root] = []
    token = _roots.set(roots)
    try:
        yield roots
    finally:
        _roots.reset(token)


Json = dict[str, Any]

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


def agent_span(name: str, rollout_id: str) -> Json:
    """A rollout is one conversation."""
    return {
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.agent.name": name,
        "gen_ai.conversation.id": rollout_id,
    }


def chat_span(
    model: str, rollout_id: str, agent: str | None, provider: str, sampling: Mapping[str, Any]
) -> Json:
    """`sampling`: the request's fields; those that the conventions name are taken."""
    given = {f"gen_ai.request.{key}": sampling.get(key) for key in _REQUEST}
    return {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": provider,
        "gen_ai.request.model": model,
        "gen_ai.conversation.id": rollout_id,
        **({"gen_ai.agent.name": agent} if agent else {}),
        **{key: value for key, value in given.items() if value is not None},
    }


def used_tokens(seen: int, sampled: int) -> Json:
    return {"gen_ai.usage.input_tokens": seen, "gen_ai.usage.output_tokens": sampled}


def tool_span(name: str, call_id: str, rollout_id: str) -> Json:
    return {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": name,
        "gen_ai.tool.type": "function",
        "gen_ai.tool.call.id": call_id,
        "gen_ai.conversation.id": rollout_id,
    }


def evaluation(name: str, value: float) -> Json:
    return {"gen_ai.evaluation.name": name, "gen_ai.evaluation.score.value": value}


def tool_of(call: Any) -> tuple[str, str, str]:
    """Returns the name, the id and the arguments of a tool call in OpenAI's format.
    All three may be a model's words; name and id are cut and without secrets."""
    call = call if isinstance(call, dict) else {}
    function = call.get("function")
    function = function if isinstance(function, dict) else {}
    arguments = function.get("arguments")
    text = arguments if isinstance(arguments, str) else _json(arguments or {})
    return name_of(function.get("name") or "unnamed"), name_of(call.get("id")), text


def name_of(value: Any) -> str:
    """Of what a model may have made: cut and without secrets."""
    text = "" if value is None else str(value)
    return redacted(text[:_LONGEST_SECRET])[:_MOST_OF_A_NAME]


def inputs(messages: Sequence[Message], tools: Sequence[Json]) -> Json:
    leading = list(takewhile(lambda message: message.get("role") in _SYSTEM, messages))
    found = {"gen_ai.input.messages": _bounded(messages[len(leading) :])}
    if leading:
        parts = [part for message in leading for part in _parts(message)]
        found["gen_ai.system_instructions"] = _first_of(parts)
    if tools:
        found["gen_ai.tool.definitions"] = _first_of([_definition(tool) for tool in tools])
    return found


def outputs(answers: Iterable[tuple[Message, str | None]]) -> Json:
    messages = [
        {**_message(message), "finish_reason": _REASONS.get(reason or "", "stop")}
        for message, reason in answers
    ]
    return {"gen_ai.output.messages": _first_of(messages)}


def tool_texts(arguments: str, result: str) -> Json:
    return {
        "gen_ai.tool.call.arguments": _text(arguments),
        "gen_ai.tool.call.result": _text(result),
    }


def _first_of(listed: list[Json]) -> str:
    kept: list[str] = []
    size = 0
    for text in map(_json, listed):
        size += len(text) + 1
        if size > MOST_CHARACTERS:
            break
        kept.append(text)
    return f"[{','.join(kept)}]"


def _bounded(messages: Sequence[Message]) -> str:
    """The last messages that fit, as JSON; the first one says what is left out."""
    kept: list[str] = []
    size = 0
    for message in reversed(messages):
        encoded = _json(_message(message))
        size += len(encoded) + 1
        if kept and size > MOST_CHARACTERS:
            words = f"[{len(messages) - len(kept)} earlier messages are left out]"
            kept.append(_json({"role": "system", "parts": [_text_part(words)]}))
            break
        kept.append(encoded)
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
    """Without secrets, cut in its middle if it is long."""
    if len(text) <= _MOST_OF_A_TEXT:
        return redacted(text)
    half = _MOST_OF_A_TEXT // 2
    around = half + _LONGEST_SECRET  # a secret that the cut would halve is found whole
    begin, end = redacted(text[:around])[:half], redacted(text[-around:])[-half:]
    return f"{begin} [{len(text) - 2 * half} characters are left out] {end}"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)
