"""Makes the engine that the settings name, and its endpoint; compares engines that come later."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any

import structlog
from envserver_records.errors import ConfigError, EngineError, EngineUnavailable

from ..config import EngineConfig, OpenAIConfig, Settings
from ..models.addresses import EngineAddresses
from ..models.engine import Engine
from ..models.fleet import Fleet, discovering
from ..models.openai import OpenAIEngine
from ..models.probe import MESSAGES, ask_chat, probe
from ..models.probe_client import ProbeAnswer, ProbeClient, same_scores
from ..models.replicas import Replica
from ..proxy.endpoint import (
    VERSION_PLACEHOLDER,
    Capabilities,
    EngineEndpoint,
    capabilities_of,
    no_experts,
)
from ..proxy.gate import Gate
from ..rollouts.demonstrating import Demonstrator

SIMULATED = "sim"

_log = structlog.get_logger("envserver.engine")


@contextlib.asynccontextmanager
async def started(
    model: str | None, openai: OpenAIConfig, config: EngineConfig
) -> AsyncIterator[OpenAIConfig]:
    """Yields the address of the engine: `openai`, or that of an engine started for `model`.

    An engine is started only if `model` names one to be started; it is stopped on exit.
    """
    if model is None or model == SIMULATED:
        yield openai
        return
    from ..models.catalogue import find_model, read_catalogue
    from ..models.manager import engine_spec, running_engine

    entry = find_model(model, read_catalogue(config.models_file), config.models_file)
    variables = openai.default_template_kwargs
    if variables is not None:
        entry = entry.model_copy(update={"default_template_kwargs": variables})
    async with running_engine(engine_spec(entry, config), tell=_tell) as engine:
        yield openai.model_copy(
            update={
                "base_url": engine.base_url,
                "model_name": engine.model,
                "server_type": "vllm",
                "default_template_kwargs": entry.default_template_kwargs or None,
            }
        )


def make_engine(settings: Settings, openai: OpenAIConfig) -> tuple[Engine, Demonstrator | None]:
    """Makes the engine that `settings` name, at the address in `openai`.

    Also returns the demonstrator, which is given the solutions (simulated engine only).
    Raises ConfigError: no engine is named, nor its model.
    """
    if settings.model == SIMULATED:
        from ..models.sim import RolloutSolver, SimEngine

        solver = RolloutSolver()
        return SimEngine(settings.sim, solver), solver
    from ..models.openai import OpenAIEngine

    _check_named(openai)
    rules = settings.engines
    engine = OpenAIEngine(
        openai,
        routing=rules.routing,
        max_lag=rules.max_version_lag,
        addresses=addresses_of(settings, openai),
    )
    return engine, None


def addresses_of(settings: Settings, openai: OpenAIConfig) -> EngineAddresses:
    """Returns where engines may be registered. Where access tokens are asked for, others than the
    owner of this machine may register them: not at addresses of this machine."""
    return EngineAddresses(
        settings.engines.allow,
        openai.base_urls,
        this_machine=settings.server.tokens_file is None,
    )


def _check_named(openai: OpenAIConfig) -> None:
    if not openai.base_urls and openai.model_name == "default":
        raise ConfigError(
            "openai.base_url is none, so no engine can be asked for its model's name.",
            hint="Set --openai.model_name.",
        )


def make_endpoint(
    settings: Settings,
    engine: Engine,
    *,
    model: str = "",
    is_elsewhere: bool = False,
    gate: Gate | None = None,
) -> EngineEndpoint:
    """Makes the endpoint of `engine`; how to call the engine is found out at the first call.

    The simulated engine and engines that return text only are called through their chat API.

    Args:
        model: model name to request, if it is not the engine's default.
        is_elsewhere: this is not the rollouts' engine, so settings for that engine do not apply.
        gate: the engine's gate, if it has a source already.
    """
    tokens = settings.tokens.model_copy(update={"tokenizer": None}) if model else settings.tokens
    if is_elsewhere:
        tokens = tokens.model_copy(update={"experts": False})
    if engine.kind == SIMULATED or not engine.exact:
        if tokens.experts:
            raise no_experts()
        return EngineEndpoint(engine, tokens=tokens, gate=gate)

    async def find() -> Capabilities:
        name = model or await engine.model_name()
        asked = await any_model(engine) if VERSION_PLACEHOLDER in name else name
        mode = "auto" if is_elsewhere else settings.openai.mode
        probe_result = await probe(engine, wanted=mode, model=asked)
        told = None if is_elsewhere else settings.openai.default_template_kwargs
        capabilities = await asyncio.to_thread(capabilities_of, probe_result, tokens, told)
        _say(capabilities)
        return capabilities

    return EngineEndpoint(engine, find=find, tokens=tokens, gate=gate)


_START_AN_ENGINE = (
    "Start one: `envserver models start MODEL`; or use the simulated engine: --model sim."
)


async def look_at(engine: Engine, *, must_answer: bool) -> bool:
    """Checks that an engine answers at its address, before many rollouts fail.

    An engine that does not list its models (HTTP 404) may still answer calls.

    Returns:
        Whether it answers.
    """
    replicas = await engine.health()
    for replica in replicas:
        if not replica.healthy:
            _log.warning("engine_does_not_answer", base_url=replica.base_url, reason=replica.reason)
    answers = any(replica.healthy for replica in replicas)
    if must_answer and not answers:
        try:
            await engine.get("/v1/models")
        except EngineError as error:
            if error.detail.get("status") != HTTPStatus.NOT_FOUND:
                if isinstance(error, EngineUnavailable):
                    error.hint = error.hint or _START_AN_ENGINE
                raise
    return answers or must_answer


async def any_model(engine: Engine) -> str:
    """Returns one of the served models: all models of an engine are called in the same way."""
    listed = await engine.get("/v1/models")
    names = [card.get("id") for card in listed.get("data") or () if isinstance(card, dict)]
    if not names or not isinstance(names[0], str):
        raise EngineError("The engine lists no model.")
    return names[0]


def _tell(line: str) -> None:
    _log.info("engine", said=line)


def _say(capabilities: Capabilities) -> None:
    probe_result = capabilities.probe_result
    facts = {"server": probe_result.server or "unknown", "mode": probe_result.mode}
    if capabilities.format is not None:
        _log.info("engine_found", **facts, tokenizer=str(capabilities.folder))
    else:
        _log.info("engine_found", **facts, not_continued=capabilities.why_not)


# A rollout's calls may move from one engine to another, and its training rows are built from all of
# them. So a new engine must do what the others do, token by token: the same model, the same way of
# being called, the same ids for the same messages, the same kind of logprobs.

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
        need_exact: whether engines must return token ids and logprobs. Then they are trained, and
            their weights may change.
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
        async with self._opened(replica) as (engine, model):
            found = await probe(engine, wanted=self._openai.mode, model=model)
        capabilities = await asyncio.to_thread(
            capabilities_of, found, self._tokens, self._openai.default_template_kwargs
        )
        if self._need_exact and found.mode == "opaque":
            raise ConfigError(f"It gives no token ids: {found.reasons.get('chat', '')}")
        known = self._endpoint.capabilities or self._first
        if known is None:
            self._first = capabilities
            return
        _check([*differences(known, capabilities), *self._changes(known, found.chat)])

    async def confirm(self, replica: Replica) -> None:
        """Checks by one request that an engine still is what it was."""
        known = self._endpoint.capabilities or self._first
        if known is None or known.probe_result.mode == "opaque":
            return
        async with self._opened(replica) as (engine, model):
            chat = await ask_chat(ProbeClient(engine, model), exact=True)
        _check(self._changes(known, chat.answer))

    @asynccontextmanager
    async def _opened(self, replica: Replica) -> AsyncIterator[tuple[OpenAIEngine, str]]:
        """Opens connections to `replica` alone, and says which model to ask for."""
        model = await self._engine.model_name()
        config = self._openai.model_copy(update={"base_url": replica.url})
        if not replica.gets_key:
            config = config.model_copy(update={"api_key": type(config.api_key)("")})
        async with OpenAIEngine(config, tries=2, addresses=self._engine.addresses) as engine:
            yield engine, await any_model(engine) if VERSION_PLACEHOLDER in model else model

    def _changes(self, known: Capabilities, new: ProbeAnswer | None) -> Iterator[str]:
        """Yields how an answer differs from that of the known engine to the same messages."""
        old = known.probe_result.chat
        if old is None or new is None or known.probe_result.mode == "opaque":
            return
        if VERSION_PLACEHOLDER not in self._openai.model_name and old.model != new.model:
            yield f"it answers as the model {new.model}, they as {old.model}"
        if old.prompt_token_ids != new.prompt_token_ids and (
            # A template may have today's date in it.
            known.format is None
            or known.format.prompt_ids(MESSAGES, None, {}) != new.prompt_token_ids
        ):
            yield "it renders the same messages to other token ids"
        if not self._need_exact and not same_scores(old.choices[0], new.choices[0]):
            yield "it samples other tokens, or with other logprobs: its weights are others"


def differences(known: Capabilities, other: Capabilities) -> list[str]:
    """Returns in words how an engine differs from the known one; empty: it does not."""
    one, two = known.probe_result, other.probe_result
    words = [
        f"it {what} {_shown(getattr(two, name))}, they {_shown(getattr(one, name))}"
        for name, what in _COMPARED.items()
        if getattr(one, name) != getattr(two, name)
    ]
    if one.echoes[1:] != two.echoes[1:]:
        words.append("it renders the same tools to other token ids")
    if known.format is not None and other.format is not None:
        if known.format.template_digest != other.format.template_digest:
            words.append("its chat template is another one")
        if known.format.tokenizer_digest != other.format.tokenizer_digest:
            words.append("its tokenizer is another one")
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
    """Opens the fleet of `engine`, and discovers engines as `settings` say."""
    assert isinstance(engine, OpenAIEngine)
    engine.routes.version = lambda: endpoint.policy_version
    endpoint.begun, endpoint.ended = engine.routes.begun, engine.routes.ended
    checks = EngineChecks(engine, settings, endpoint, need_exact=need_exact)
    async with (
        Fleet(engine, checks, checks.confirm) as fleet,
        discovering(fleet, settings.engines),
    ):
        endpoint.confirm = fleet.confirm_home
        yield fleet
