"""Tells the simulated engine how each rollout's task is solved."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from envserver_records.errors import ConfigError
from envserver_records.records import Message, Task

from ..environment import Environment
from ..proxy.attempts import AgentRoute, routing_key
from .agents import demonstrated


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
    """Within the block, the demonstrator (if any) knows the solution of `task`.
    Raises ConfigError: the environment fails to demonstrate it.
    """
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
            f"{type(error).__name__}: {error}.",
            hint="--debug shows where.",
        ) from error
