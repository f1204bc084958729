"""Turns a ModelRequest into the body that the engine is sent. Pure.

The run alone decides the distribution that tokens are sampled from: its temperature and top_p are
sent whatever the agent asks for, and every other sampler setting is sent switched off, so no
model's default changes it. What the agent's protocol needs (stop, tools, seed, formats) is kept,
except for `parallel_tool_calls` of free calls: vLLM would mask what is sampled.
"""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec
from envserver_records.cleaning import clean
from envserver_records.records import Message

from .constraints import RAW, constraints_of
from .model_request import ModelRequest

_SAMPLERS_OFF: dict[str, Any] = {
    "top_k": -1,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
}
_SAMPLING = (
    "temperature",
    "top_p",
    *_SAMPLERS_OFF,
    *RAW,
    "max_tokens",
    "max_completion_tokens",
    "n",
    "stop",
    "stop_token_ids",
    "seed",
    "tool_choice",
    "response_format",
    "reasoning_effort",
    "chat_template_kwargs",
)
_LEAST_BIAS = -100.0
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class EngineBody(msgspec.Struct, kw_only=True):
    """The body of a chat (or text completion) request to the engine.

    Args:
        body: completed by `with_max_tokens`.
        tokens_field: see ModelRequest.
        flags: flags of all resulting calls.
    """

    body: dict[str, Any]
    tokens_field: str
    flags: list[str]

    def with_max_tokens(self, max_tokens: int | None) -> None:
        """Sets the granted limit per choice."""
        if max_tokens is None:
            return
        self.body[self.tokens_field] = max_tokens
        least = self.body.get("min_tokens")
        if isinstance(least, int) and least > max_tokens:
            self.body["min_tokens"] = max_tokens

    def sampling(self) -> dict[str, Any]:
        """Returns the sampling fields of the body."""
        return {name: self.body[name] for name in _SAMPLING if name in self.body}


def engine_body(
    request: ModelRequest,
    *,
    model: str,
    sampling: dict[str, Any],
    exact: bool,
    banned: tuple[int, ...] = (),
) -> EngineBody:
    """Builds the engine's body for `request`.

    Args:
        model: the name to request.
        sampling: the run's `temperature` and `top_p`.
        exact: whether the engine returns token ids and logprobs on demand.
        banned: tokens that must not be sampled: placeholders with no image behind them.
    """
    body = {**request.fields, "model": model}
    if exact:
        body.update(_SAMPLERS_OFF)
        body["return_token_ids"] = True
    for name in ("temperature", "top_p"):
        if name in sampling:
            body[name] = sampling[name]
    if request.prompt is None:
        body["messages"] = [_renderable(message) for message in request.messages]
        if request.tools:
            body["tools"] = request.tools
        if exact or request.wants_logprobs:
            body["logprobs"] = True
        if exact and "include_reasoning" in body:
            body["include_reasoning"] = True
    else:
        body["prompt"] = request.prompt
        if exact:
            body.setdefault("logprobs", 0)
    flags = _flags(request, body)
    if exact and "structured_output_masked" not in flags:
        body.pop("parallel_tool_calls", None)
    if banned:
        body["logit_bias"] = {**(body.get("logit_bias") or {}), **_never(banned)}
    return EngineBody(body=body, tokens_field=request.tokens_field, flags=flags)


def _never(banned: tuple[int, ...]) -> dict[str, float]:
    return {str(token): _LEAST_BIAS for token in banned}


def _flags(request: ModelRequest, body: dict[str, Any]) -> list[str]:
    flags = []
    if body.get("top_p", 1.0) != 1.0:
        flags.append("top_p_active")
    if constraints_of(body, body.get("tools") or []):
        flags.append("structured_output_masked")
    if request.strict_dropped:
        flags.append("strict_dropped")
    if request.unchecked:
        flags.append("unchecked_fields")
    if request.ignored:
        flags.append("fields_ignored")
    return flags


def _renderable(message: Message) -> Message:
    """Returns `message` without half surrogate pairs in the arguments of its calls.

    A model can write `"\\udabc"` in them, which is JSON; an engine that decodes the arguments for
    the chat template cannot encode what it gets, and refuses the whole conversation.
    """
    calls = message.get("tool_calls")
    return {**message, "tool_calls": [*map(_renderable_call, calls)]} if calls else message


def _renderable_call(call: dict[str, Any]) -> dict[str, Any]:
    arguments = (call.get("function") or {}).get("arguments")
    if not isinstance(arguments, str) or not _SURROGATE.search(arguments):
        return call
    try:
        value, changes = clean(json.loads(arguments))
    except (ValueError, RecursionError):
        return call  # no engine can decode it either
    if not changes:
        return call
    return {**call, "function": {**call["function"], "arguments": json.dumps(value)}}
