"""The seats at the proxy of the agents of an environment's rollouts.

In: an environment with its settings, and its roles (`roles`). Out: the route of each. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from envserver_records.records import Message, Task

from ..config import AgentConfig
from ..environment import AgentRole, Environment
from ..proxy.attempts import AgentRoute
from ..proxy.endpoint import VERSION_PLACEHOLDER

_ENGINES_OWN = ("default", None)


def demonstrated(
    environment: Environment, task: Task, roles: Mapping[str, bool]
) -> dict[str | None, list[Message]]:
    """Returns the messages of each agent that solve `task`; empty if unknown.

    Args:
        roles: whether each declared agent is trained.
    """
    turns = environment.demonstration(task)
    if not turns:
        return {}
    if isinstance(turns, Mapping):
        own: dict[str | None, list[Message]] = dict(turns.items())
        return own
    if not roles:
        return {None: turns}
    return {name: turns for name, trained in roles.items() if trained}


def has_own_source(config: AgentConfig | None) -> bool:
    """Returns whether an agent with these settings is asked elsewhere, or for another model."""
    return config is not None and (
        config.base_url is not None or config.model_name not in _ENGINES_OWN
    )


def seats_of(
    environment: Environment,
    roles: Mapping[str, AgentRole],
    *,
    model: str,
    sampling: Mapping[str, Any],
    own_models: Mapping[str, str],
) -> dict[str, AgentRoute]:
    """Returns the route of each agent.

    Args:
        model, sampling: of the rollouts, for what an agent's settings leave open.
        own_models: name of the model of each agent that has its own source.
    """
    settings = environment.config.agents
    return {
        name: _route(name, role, settings.get(name) or AgentConfig(), model, sampling, own_models)
        for name, role in roles.items()
    }


def _route(
    name: str,
    role: AgentRole,
    config: AgentConfig,
    model: str,
    sampling: Mapping[str, Any],
    own_models: Mapping[str, str],
) -> AgentRoute:
    asked = {field: getattr(config, field) for field in ("temperature", "top_p", "max_tokens")}
    own = {field: value for field, value in asked.items() if value is not None}
    chosen = own_models.get(name, model)
    is_own = name in own_models
    # A policy that is asked for by its version is the policy, under whatever name.
    of_policy = not is_own or (config.base_url is None and VERSION_PLACEHOLDER in chosen)
    return AgentRoute(
        model=chosen,
        sampling={**sampling, **own},
        trained=role.trained,
        endpoint=name if is_own else "",
        follows_policy=role.trained or of_policy,
    )
