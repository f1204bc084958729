"""Checks an engine that comes while a server runs: is it the same engine as the others?

A rollout's calls may move from one engine to another, and its training rows are built from all of
them. So a new engine must do what the others do, token by token: the same model, the same way of
being called, the same ids for the same messages, the same kind of logprobs.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from envserver_records.errors import ConfigError

from ..config import Settings
from ..models.openai import OpenAIEngine
from ..models.probe import ProbeResult, probe
from ..models.replicas import Replica
from ..proxy.capabilities import Capabilities, capabilities_of
from ..proxy.endpoint import VERSION_PLACEHOLDER, EngineEndpoint
from .engines import any_model

_COMPARED = {
    "mode": "can be called in mode",
    "max_model_len": "has a context (tokens) of",
    "tools": "takes tools",
    "has_parser": "parses tool calls",
    "reasoning_parser": "separates reasoning",
    "logprobs": "gives logprobs that are",
}
"""Facts that must be equal, in words."""


class EngineChecks:
    """Compares new engines with the one that `endpoint` knows, or with the first that came.

    Args:
        engine: whose replicas they will be.
        need_exact: whether engines must return token ids and logprobs.
    """

    def __init__(
        self,
        engine: OpenAIEngine,
        settings: Settings,
        endpoint: EngineEndpoint,
        *,
        need_exact: bool,
    ) -> None:
        self._engine = engine
        self._openai = settings.openai
        self._tokens = settings.tokens
        self._endpoint = endpoint
        self._need_exact = need_exact
        self._first: Capabilities | None = None

    async def __call__(self, replica: Replica) -> None:
        """Checks one engine, with a dozen tiny requests."""
        model = await self._engine.model_name()
        config = self._openai.model_copy(update={"base_url": replica.url})
        if not replica.gets_key:
            config = config.model_copy(update={"api_key": type(config.api_key)("")})
        async with OpenAIEngine(config, tries=2, addresses=self._engine.addresses) as engine:
            asked = await any_model(engine) if VERSION_PLACEHOLDER in model else model
            found = await probe(engine, wanted=self._openai.mode, model=asked)
        capabilities = await asyncio.to_thread(
            capabilities_of, found, self._tokens, self._openai.default_template_kwargs
        )
        if self._need_exact and found.mode == "opaque":
            raise ConfigError(f"It gives no token ids: {found.reasons.get('chat', '')}")
        known = self._endpoint.capabilities or self._first
        if known is None:
            self._first = capabilities
            return
        different = list(differences(known, capabilities))
        if different:
            raise ConfigError(f"It differs from the other engines: {'; '.join(different)}.")


def differences(known: Capabilities, other: Capabilities) -> list[str]:
    """Returns in words how an engine differs from the known one; empty: it does not."""
    one, two = known.probe_result, other.probe_result
    words = [
        f"it {what} {_shown(getattr(two, name))}, they {_shown(getattr(one, name))}"
        for name, what in _COMPARED.items()
        if getattr(one, name) != getattr(two, name)
    ]
    if _prompts(one) != _prompts(two):
        words.append("it renders the same messages to other token ids")
    if known.format is not None and other.format is not None:
        if known.format.template_digest != other.format.template_digest:
            words.append("its chat template is another one")
        if known.format.tokenizer_digest != other.format.tokenizer_digest:
            words.append("its tokenizer is another one")
    return words


def _prompts(found: ProbeResult) -> list[dict[str, Any]]:
    return [msgspec.to_builtins(echo) for echo in found.echoes]


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "unknown" if value is None else str(value)
