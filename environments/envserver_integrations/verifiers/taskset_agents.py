"""The agents of a task set's episode ask the endpoint of their rollout.

Rollouts run side by side in one process. Which of them an episode belongs to is a context variable
that `setup`, verifiers' hook before an episode, reads.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from verifiers.v1.clients import ModelContext
from verifiers.v1.configs.agent import AgentConfig
from verifiers.v1.configs.client import EvalClientConfig
from verifiers.v1.envs.single_agent import SingleAgentEnv
from verifiers.v1.types import SamplingConfig

from envserver import Rollout


class _Playing(NamedTuple):
    """The rollout that an episode belongs to, and the variable that holds its key."""

    run: Rollout
    variable: str


_playing: ContextVar[_Playing | None] = ContextVar("playing", default=None)


@contextmanager
def playing(run: Rollout) -> Iterator[Any]:
    """Within the block, episodes belong to `run`; yields the context that verifiers gives them."""
    # verifiers reads a key from the variable that a client names. Programs of its runtime do not
    # inherit variables with API_KEY in their names.
    variable = f"ENVSERVER_API_KEY_{run.api_key[-12:]}"
    os.environ[variable] = run.api_key
    token = _playing.set(_Playing(run, variable))
    _reach_directly(run.base_url)
    try:
        client = _client(run.base_url, variable)
        yield ModelContext(model=run.model, client=client, sampling=SamplingConfig())
    finally:
        _playing.reset(token)
        os.environ.pop(variable, None)


def roles_of(config: Any) -> dict[str, Any]:
    """Returns the agents that an EnvConfig class declares, by name."""
    return {
        name: field.default
        for name, field in config.model_fields.items()
        if isinstance(field.default, AgentConfig)
    }


def played_by_us(kind: Any) -> Any:
    """Returns its class with one change: each agent asks the endpoint of its rollout.

    `setup` is the hook that sees an episode's agents before they play.
    """

    async def setup(self: Any, agents: Any) -> None:
        await kind.setup(self, agents)
        playing = _playing.get()
        if playing is None:
            return
        for role in roles_of(type(self.config)):
            agent = getattr(agents, role)
            run = playing.run
            url = run.base_url if issubclass(kind, SingleAgentEnv) else run.base_url_of(role)
            client = _client(url, playing.variable)
            agent.ctx = replace(agent.ctx, model=run.model, client=client)
            # A server for each rollout: a shared one keeps a client for each that it ever served.
            agent.interception = None

    return type(kind.__name__, (kind,), {"setup": setup, "__module__": kind.__module__})


def _client(url: str, variable: str) -> Any:
    return EvalClientConfig(base_url=url, api_key_var=variable)


def _reach_directly(url: str) -> None:
    """Keeps verifiers' clients from asking for `url` through a proxy."""
    host = urlsplit(url).hostname or ""
    kept = [each for each in os.environ.get("NO_PROXY", "").split(",") if each]
    if host not in kept:
        os.environ["NO_PROXY"] = os.environ["no_proxy"] = ",".join([*kept, host, "127.0.0.1"])
