"""Traces model calls, and the tools that run between them, as spans; by the conventions of `genai`.

Texts of calls and tools are in spans only where the tracer wants them (`Span.texts`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from itertools import takewhile
from typing import Any

from envserver_records.records import text_of

from ..telemetry.genai import (
    chat_span,
    inputs,
    name_of,
    outputs,
    tool_of,
    tool_span,
    tool_texts,
    used_tokens,
)
from ..telemetry.tracing import Span, within
from .attempts import ProxyAttempt
from .engine_answer import EngineAnswer
from .model_request import ModelRequest


def model_call(
    attempt: ProxyAttempt,
    agent: str | None,
    body: Mapping[str, Any],
    request: ModelRequest,
    server: str,
) -> AbstractContextManager[Span]:
    """Opens a span for a model call; requests to the engine carry its `traceparent`.

    Args:
        body: the request as the engine gets it.
        request: the same as the agent sent it.
        server: kind of the engine's server.
    """
    if not attempt.span.traceparent:
        return nullcontext(attempt.span)
    model = str(body.get("model", ""))
    asked = chat_span(model, attempt.spec.rollout_id, agent, server, body)
    if attempt.span.texts:
        asked |= inputs(request.messages, request.tools)
    return within(attempt.span.child(f"chat {model}", asked, client=True))


def note_answer(span: Span, engine_answer: EngineAnswer) -> None:
    """Adds the answer's token counts to the span."""
    if not span.traceparent:
        return
    choices = engine_answer.choices
    prompts = [one.prompt_ids for one in choices if one.prompt_ids] or [
        engine_answer.prompt_ids or []
    ]
    span.note(
        {
            "gen_ai.response.model": engine_answer.model,
            "gen_ai.response.finish_reasons": [one.finish_reason or "" for one in choices],
            **used_tokens(sum(map(len, prompts)), engine_answer.tokens()),
        }
    )
    if span.texts:
        span.note(outputs((one.message, one.finish_reason) for one in choices))


def note_tools(attempt: ProxyAttempt, agent: str | None, request: ModelRequest) -> None:
    """Adds a span for each tool whose result comes with `request`.

    It lasts from the answer that asked for the tool until now; the tools of one answer are not told
    apart. Results that a request brings again have no second span.
    """
    if not attempt.span.traceparent:
        return
    last = next((call for call in reversed(attempt.calls) if call.agent == agent), None)
    calls = last.message.get("tool_calls") if last is not None else None
    if last is None or not calls:
        return
    asked = {call_id: (name, arguments) for name, call_id, arguments in map(tool_of, calls)}
    offered = {tool_of(tool)[0] for tool in request.tools}  # others are words of the model
    began, now = last.started_at + last.seconds, time.time()
    new = takewhile(lambda one: one.get("role") != "assistant", reversed(request.messages))
    for message in reversed(list(new)):
        call_id = name_of(message.get("tool_call_id"))
        if message.get("role") != "tool" or call_id not in asked:
            continue
        name, arguments = asked[call_id]
        name = name if name in offered else "unknown"
        about = tool_span(name, call_id, attempt.spec.rollout_id)
        if attempt.span.texts:
            about |= tool_texts(arguments, text_of(message))
        attempt.span.past(f"execute_tool {name}", about, began, now)
