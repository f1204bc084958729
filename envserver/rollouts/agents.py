"""The routes of an environment's agents at the proxy, and demonstrated solutions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from envserver_records.errors import ConfigError
from envserver_records.records import Message, Task

from ..environment import AgentRole, Environment
from ..proxy.attempts import AgentRoute, routing_key
from ..proxy.endpoint import VERSION_PLACEHOLDER
from ..settings.config import SamplingConfig
from ..settings.section import AgentConfig
from ..tools.calling import place_of
from .rewards import roles_of

_ENGINES_OWN = ("default", None)


def demonstrated(
    environment: Environment, task: Task, roles: Mapping[str, bool]
) -> dict[str | None, list[Message]]:
    given = environment.demonstration(task)
    if not given:
        return {}
    if isinstance(given, Mapping):
        own: dict[str | None, list[Message]] = dict(given.items())
        return own
    turns = [*given]
    if not all(isinstance(message, Mapping) for message in turns):
        raise TypeError(f"it must return a list of messages, not {given!r:.50}")
    if not roles:
        return {None: turns}
    return {name: turns for name, trained in roles.items() if trained}


def has_own_source(config: AgentConfig | None) -> bool:
    """Returns whether an agent with these settings has its own engine or another model."""
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
    """Returns the route of each agent. `model`, `sampling`: for what its settings leave open;
    `own_models`: name of the model of each agent that has its own source."""
    routes = {}
    for name, role in roles.items():
        config = environment.config.agents.get(name) or AgentConfig()
        fields = ("temperature", "top_p", "max_tokens")
        own = {field: value for field in fields if (value := getattr(config, field)) is not None}
        chosen, is_own = own_models.get(name, model), name in own_models
        # A policy that is asked for by its version is the policy, under whatever name.
        of_policy = not is_own or (config.base_url is None and VERSION_PLACEHOLDER in chosen)
        routes[name] = AgentRoute(
            model=chosen,
            sampling={**sampling, **own},
            trained=role.trained,
            endpoint=name if is_own else "",
            follows_policy=role.trained or of_policy,
        )
    return routes


def temperatures(environment: Environment, sampling: SamplingConfig) -> dict[str, float]:
    return _of_trained(environment, sampling, "temperature")


def _of_trained(environment: Environment, sampling: SamplingConfig, field: str) -> dict[str, float]:
    """Returns a field of the sampling of each trained agent, by the setting that says it."""
    settings = environment.config.agents
    roles: dict[str, AgentRole] = {**roles_of(environment)} or {"": AgentRole()}
    found = {}
    for name in (name for name, role in roles.items() if role.trained):
        own = getattr(settings.get(name) or AgentConfig(), field)
        if own is None:
            found[f"sampling.{field}"] = getattr(sampling, field)
        else:
            found[f"env.agents.{name}.{field}"] = own
    return found


def check_sampling(environment: Environment, sampling: SamplingConfig) -> None:
    """Checks that trainers can learn from trained agents: they must be able to compute the
    distribution that tokens are sampled from."""
    for setting, top_p in _of_trained(environment, sampling, "top_p").items():
        if top_p != 1:
            raise ConfigError(
                f"--{setting} {top_p:g}: no trainer can learn correctly from tokens sampled with "
                "top_p, because it does not know what was cut off.",
                hint="Leave it at 1; the temperature is free. `envserver process` writes groups "
                "to a file with any sampling.",
            )
    for setting, temperature in temperatures(environment, sampling).items():
        if temperature == 0:
            raise ConfigError(
                f"--{setting} 0: a trainer learns nothing if the same tokens are always sampled.",
                hint="Set it to 1. `envserver process` writes groups to a file with any sampling.",
            )


class Demonstrator(Protocol):
    """Gets the solution of each rollout's task; the simulated engine plays it."""

    def assign(self, rollout_id: str, turns: list[Message], *, exact: bool) -> None:
        """Sets the turns that solve the task of `rollout_id`. `exact`: play them word for word."""

    def forget(self, rollout_id: str) -> None:
        """Drops the solution: the rollout is over."""


@contextmanager
def demonstrating(
    demonstrator: Demonstrator | None,
    environment: Environment,
    agents: dict[str, AgentRoute],
    task: Task,
    rollout_id: str,
) -> Iterator[None]:
    if demonstrator is None:
        yield
        return
    solution = _solution(environment, agents, task)
    solutions = {routing_key(rollout_id, agent): turns for agent, turns in solution.items()}
    try:
        for key, turns in solutions.items():
            demonstrator.assign(key, turns, exact=environment.exact_demonstrations)
        yield
    finally:
        for key in solutions:
            demonstrator.forget(key)


def _solution(
    environment: Environment, agents: dict[str, AgentRoute], task: Task
) -> dict[str | None, list[Message]]:
    trained = {name: route.trained for name, route in agents.items()}
    try:
        return demonstrated(environment, task, trained)
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"Environment {environment.name!r} cannot demonstrate its task {task.id!r}: "
            f"{type(error).__name__}: {error} {place_of(error, environment.demonstration)}"
        ) from error
