"""Compares engines that register or are discovered with those of `openai.base_url`.
A rollout's calls may move between engines, and its rows are built from all of them: a new engine
must have the same model, modes, ids for the same messages, and kind of logprobs.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from envserver_records.errors import ConfigError

from ..models.engine import Engine
from ..models.fleet import Fleet, discovering
from ..models.openai import OpenAIEngine
from ..models.probe import MESSAGES, ProbeAnswer, ProbeClient, ask_chat, same_scores
from ..models.replicas import Replica
from ..proxy.endpoint import (
    VERSION_PLACEHOLDER,
    Capabilities,
    EngineEndpoint,
)
from ..settings.config import Settings
from .engines import any_model, probed

_COMPARED = {
    "mode": "can be called in mode",
    "max_model_len": "has a context (tokens) of",
    "tools": "takes tools",
    "has_parser": "parses tool calls",
    "reasoning_parser": "separates reasoning",
    "logprobs": "returns logprobs that are",
}


@dataclass(eq=False, repr=False)
class EngineChecks:
    """Compares new engines with the one that `endpoint` knows, or with the first that came.
    `need_exact`: engines must return token ids and logprobs. Then they are trained, and their
    weights may change."""

    engine: OpenAIEngine
    settings: Settings
    endpoint: EngineEndpoint
    need_exact: bool
    _first: Capabilities | None = None

    @property
    def _known(self) -> Capabilities | None:
        return self.endpoint.capabilities or self._first

    async def __call__(self, replica: Replica) -> None:
        openai, tokens = self.settings.openai, self.settings.tokens
        async with self._opened(replica) as (engine, model):
            capabilities = await probed(
                engine, model, openai.mode, tokens, openai.default_template_kwargs
            )
        found = capabilities.probe_result
        if self.need_exact and found.mode == "opaque":
            raise ConfigError(f"It returns no token ids: {found.reasons.get('chat', '')}")
        known = self._known
        if known is None:
            self._first = capabilities
            return
        _check([*differences(known, capabilities), *self._changes(known, found.chat)])

    async def confirm(self, replica: Replica) -> None:
        known = self._known
        if known is None or known.probe_result.mode == "opaque":
            return
        async with self._opened(replica) as (engine, model):
            chat = await ask_chat(ProbeClient(engine, model), exact=True)
        _check(self._changes(known, chat.answer))

    @asynccontextmanager
    async def _opened(self, replica: Replica) -> AsyncIterator[tuple[OpenAIEngine, str]]:
        model = await self.engine.model_name()
        config = self.settings.openai.model_copy(update={"base_url": replica.url})
        if not replica.gets_key:
            config = config.model_copy(update={"api_key": type(config.api_key)("")})
        async with OpenAIEngine(config, tries=2, addresses=self.engine.addresses) as engine:
            yield engine, await any_model(engine) if VERSION_PLACEHOLDER in model else model

    def _changes(self, known: Capabilities, new: ProbeAnswer | None) -> Iterator[str]:
        old = known.probe_result.chat
        if old is None or new is None or known.probe_result.mode == "opaque":
            return
        if VERSION_PLACEHOLDER not in self.settings.openai.model_name and old.model != new.model:
            yield f"it answers as the model {new.model}, they as {old.model}"
        if old.prompt_token_ids != new.prompt_token_ids and (
            # A template may have today's date in it.
            known.format is None
            or known.format.prompt_ids(MESSAGES, None, {}) != new.prompt_token_ids
        ):
            yield "it renders the same messages to other token ids"
        if not self.need_exact and not same_scores(old.choices[0], new.choices[0]):
            yield "it samples other tokens, or with other logprobs: its weights differ"


def differences(known: Capabilities, other: Capabilities) -> list[str]:
    ours, theirs = known.probe_result, other.probe_result
    words = [
        f"it {what} {_shown(getattr(theirs, name))}, they {_shown(getattr(ours, name))}"
        for name, what in _COMPARED.items()
        if getattr(ours, name) != getattr(theirs, name)
    ]
    if ours.echoes[1:] != theirs.echoes[1:]:
        words.append("it renders the same tools to other token ids")
    if known.format is not None and other.format is not None:
        if known.format.template_digest != other.format.template_digest:
            words.append("its chat template differs")
        if known.format.tokenizer_digest != other.format.tokenizer_digest:
            words.append("its tokenizer differs")
    return words


def _check(different: Iterable[str]) -> None:
    if words := "; ".join(different):
        raise ConfigError(f"It differs from the other engines: {words}.")


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "unknown" if value is None else str(value)


@contextlib.asynccontextmanager
async def fleet_of(
    settings: Settings,
    engine: Engine,
    endpoint: EngineEndpoint,
    *,
    need_exact: bool,
) -> AsyncIterator[Fleet]:
    assert isinstance(engine, OpenAIEngine)
    engine.routes.version = lambda: endpoint.policy_version
    endpoint.begun, endpoint.ended = engine.routes.begun, engine.routes.ended
    checks = EngineChecks(engine, settings, endpoint, need_exact)
    async with (
        Fleet(engine, checks, checks.confirm) as fleet,
        discovering(fleet, settings.engines),
    ):
        endpoint.confirm = fleet.confirm_home
        yield fleet
