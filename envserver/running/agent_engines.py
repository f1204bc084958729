"""Engines and models of single agents that do not use the rollouts' own."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator, Mapping

import msgspec
from envserver_records.errors import ConfigError, EngineError

from ..environment import AgentRole, Environment
from ..models.engine import Engine
from ..proxy.endpoint import EngineEndpoint
from ..rollouts.agents import has_own_source
from ..settings.config import OpenAIConfig, Settings
from ..settings.environment import AgentConfig
from .engines import look_at, make_endpoint


class OwnEndpoint(msgspec.Struct, frozen=True):
    """The model and engine of one agent.

    Args:
        is_elsewhere: whether the engine differs from that of the rollouts.
    """

    endpoint: EngineEndpoint
    model: str
    is_elsewhere: bool


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
    """Returns the endpoints of the agents that use another model or engine, by agent name.

    The engines are open inside the block; agents at the same engine share its connections.

    Args:
        engine, source: those of the rollouts.
        must_answer: see `look_at`.
    """
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
                found[name] = OwnEndpoint(made, model, False)
                continue
            with _naming(name):
                own = opened.get(_address(config))
                if own is None:
                    own = await stack.enter_async_context(_opened(config))
                    opened[_address(config)] = own
                    await look_at(own, must_answer=must_answer)
                model = await _model(own, config)
            # Weights that are trained change at the same moments as the policy's.
            gate = endpoint.gate if role.trained else None
            made = make_endpoint(settings, own, gate=gate, model=model, is_elsewhere=True)
            found[name] = OwnEndpoint(made, model, True)
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


def _address(config: AgentConfig) -> object:
    key = config.api_key.get_secret_value()
    return (config.base_url, key, config.timeout, config.server_type)


async def _model(engine: Engine, config: AgentConfig) -> str:
    if config.model_name not in ("default", None):
        return str(config.model_name)
    return await engine.model_name()


@contextlib.contextmanager
def _naming(agent: str) -> Iterator[None]:
    """Adds the agent's name to engine failures raised inside the block."""
    try:
        yield
    except (EngineError, ConfigError) as error:
        error.message = f"The engine of the agent {agent!r}: {error.message}"
        raise
