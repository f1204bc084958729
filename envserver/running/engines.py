"""Makes the engine that the settings name, and the endpoint through which it is called."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from http import HTTPStatus
from typing import Any

import msgspec
import structlog
from envserver_records.errors import ConfigError, EngineError, EngineUnavailable

from ..environment import AgentRole, Environment
from ..models.connections import EngineAddresses
from ..models.engine import Engine
from ..models.probe import probe
from ..proxy.endpoint import (
    VERSION_PLACEHOLDER,
    Capabilities,
    EngineEndpoint,
    capabilities_of,
    no_experts,
)
from ..proxy.gate import Gate
from ..rollouts.agents import Demonstrator, has_own_source
from ..settings.config import EngineConfig, Mode, OpenAIConfig, Settings, TokensConfig
from ..settings.section import AgentConfig

SIMULATED = "sim"

_log = structlog.get_logger("envserver.engine")


@contextlib.asynccontextmanager
async def started(
    model: str | None, openai: OpenAIConfig, config: EngineConfig
) -> AsyncIterator[OpenAIConfig]:
    """Yields `openai`, or the address of an engine that runs for `model` during the block."""
    if model is None or model == SIMULATED:
        yield openai
        return
    from ..models.catalogue import find_model, read_catalogue
    from ..models.manager import running_engine

    entry = find_model(model, read_catalogue(config.models_file), config.models_file)
    variables = openai.default_template_kwargs
    if variables is not None:
        entry = entry.model_copy(update={"default_template_kwargs": variables})
    async with running_engine(entry, config, tell=_say) as engine:
        yield openai.model_copy(
            update={
                "base_url": engine.base_url,
                "model_name": engine.model,
                "server_type": "vllm",
                "default_template_kwargs": entry.default_template_kwargs or None,
            }
        )


def make_engine(settings: Settings, openai: OpenAIConfig) -> tuple[Engine, Demonstrator | None]:
    """Also returns the demonstrator, which is given the solutions (simulated engine only)."""
    if settings.model == SIMULATED:
        from envserver_local.simulated.engine import SimEngine
        from envserver_local.simulated.policy import RolloutSolver

        solver = RolloutSolver()
        return SimEngine(settings.sim, solver), solver

    if not openai.base_urls and openai.model_name == "default":
        raise ConfigError(
            "openai.base_url is none, so there is no engine to get the model's name from.",
            hint="Set --openai.model_name.",
        )
    rules = settings.engines
    from ..models.openai import OpenAIEngine

    engine = OpenAIEngine(
        openai,
        routing=rules.routing,
        max_lag=rules.max_version_lag,
        addresses=addresses_of(settings, openai),
    )
    return engine, None


def addresses_of(settings: Settings, openai: OpenAIConfig) -> EngineAddresses:
    """Where access tokens are required, others than the owner of this machine may register engines:
    not at addresses of this machine."""
    return EngineAddresses(
        settings.engines.allow,
        openai.base_urls,
        this_machine=settings.server.tokens_file is None,
    )


def make_endpoint(
    settings: Settings,
    engine: Engine,
    *,
    model: str = "",
    is_other: bool = False,
    gate: Gate | None = None,
) -> EngineEndpoint:
    """How to call the engine is found out at the first call. The simulated engine and engines that
    return text only are called through their chat API.

    Args:
        model: model name to request, if it is not the engine's default.
        is_other: this is not the rollouts' engine, so settings for that engine do not apply.
        gate: the engine's gate, if it has a source already.
    """
    tokens = settings.tokens.model_copy(update={"tokenizer": None}) if model else settings.tokens
    if is_other:
        tokens = tokens.model_copy(update={"experts": False})
    if engine.kind == SIMULATED or not engine.exact:
        if tokens.experts:
            raise no_experts()
        return EngineEndpoint(engine, tokens=tokens, gate=gate)

    async def find() -> Capabilities:
        name = model or await engine.model_name()
        served = await any_model(engine) if VERSION_PLACEHOLDER in name else name
        mode = "auto" if is_other else settings.openai.mode
        template_kwargs = None if is_other else settings.openai.default_template_kwargs
        capabilities = await probed(engine, served, mode, tokens, template_kwargs)
        probe_result = capabilities.probe_result
        facts = {"server": probe_result.server or "unknown", "mode": probe_result.mode}
        if capabilities.format is not None:
            facts["tokenizer"] = str(capabilities.folder)
        else:
            facts["not_continued"] = capabilities.why_not
        _log.info("engine_found", **facts)
        return capabilities

    return EngineEndpoint(engine, find=find, tokens=tokens, gate=gate)


async def probed(
    engine: Engine,
    model: str,
    mode: Mode,
    tokens: TokensConfig,
    template_kwargs: Mapping[str, Any] | None,
) -> Capabilities:
    found = await probe(engine, wanted=mode, model=model)
    return await asyncio.to_thread(capabilities_of, found, tokens, template_kwargs)


_START_AN_ENGINE = (
    "Start one: `envserver models start MODEL`; or use the simulated engine: --model sim."
)


async def look_at(engine: Engine, *, must_answer: bool) -> bool:
    """Returns whether the engine answers; checked before many rollouts fail.
    An engine that does not list its models (HTTP 404) may still answer calls."""
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


def _say(line: str) -> None:
    _log.info("engine", said=line)


class OwnEndpoint(msgspec.Struct, frozen=True):
    endpoint: EngineEndpoint
    model: str


@contextlib.asynccontextmanager
async def own_endpoints(
    settings: Settings,
    environment: Environment,
    roles: Mapping[str, AgentRole],
    engine: Engine,
    endpoint: EngineEndpoint,
    *,
    must_answer: bool,
) -> AsyncIterator[dict[str, OwnEndpoint]]:
    """Yields the endpoints of the agents that use another model or engine, by agent name.
    Agents at the same engine share its connections."""
    found: dict[str, OwnEndpoint] = {}
    opened: dict[object, Engine] = {}
    async with contextlib.AsyncExitStack() as stack:
        for name, role in roles.items():
            config = environment.config.agents.get(name)
            if config is None or not has_own_source(config):
                continue
            if config.base_url is None:
                model = str(config.model_name)
                made = make_endpoint(settings, engine, gate=endpoint.gate, model=model)
                found[name] = OwnEndpoint(made, model)
                continue
            key = config.api_key.get_secret_value()
            address = (config.base_url, key, config.timeout, config.server_type)
            try:
                own = opened.get(address)
                if own is None:
                    own = await stack.enter_async_context(_opened(config))
                    opened[address] = own
                    await look_at(own, must_answer=must_answer)
                named = config.model_name not in ("default", None)
                model = str(config.model_name) if named else await own.model_name()
            except (EngineError, ConfigError) as error:
                error.message = f"The engine of the agent {name!r}: {error.message}"
                raise
            # Weights that are trained change at the same moments as the policy's.
            gate = endpoint.gate if role.trained else None
            made = make_endpoint(settings, own, gate=gate, model=model, is_other=True)
            found[name] = OwnEndpoint(made, model)
        yield found


def _opened(config: AgentConfig) -> Engine:
    from ..models.openai import OpenAIEngine

    return OpenAIEngine(
        OpenAIConfig(
            base_url=str(config.base_url),
            api_key=config.api_key,
            timeout=config.timeout,
            server_type=config.server_type,
        )
    )
