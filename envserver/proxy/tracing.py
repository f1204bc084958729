"""Traces a model call as a span, with its settings and token counts, never its text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ..telemetry.tracing import Span, within
from .attempts import ProxyAttempt
from .engine_answer import EngineAnswer

_REQUEST = {
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "max_tokens": "gen_ai.request.max_tokens",
    "seed": "gen_ai.request.seed",
}


@contextmanager
def model_call(attempt: ProxyAttempt, agent: str | None, body: Mapping[str, Any]) -> Iterator[Span]:
    """Opens a span for a model call; requests to the engine carry its `traceparent`.

    Attribute names follow OpenTelemetry's conventions for generative AI.
    """
    if not attempt.span.traceparent:
        yield attempt.span
        return
    model = str(body.get("model", ""))
    asked = {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": model,
        "gen_ai.conversation.id": attempt.spec.rollout_id,
        **({"gen_ai.agent.name": agent} if agent else {}),
        **{name: body[key] for key, name in _REQUEST.items() if body.get(key) is not None},
    }
    with within(attempt.span.child(f"chat {model}", asked, client=True)) as span:
        yield span


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
            "gen_ai.usage.input_tokens": sum(map(len, prompts)),
            "gen_ai.usage.output_tokens": engine_answer.tokens(),
        }
    )
