"""The choice of agent, and its limits."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any, Literal

from envserver import ConfigError, LimitReached

from .endpoint import CutOff

Kind = Literal["code", "tools", "plain"]
Prompts = Literal["own", "smolagents"]
Ending = Literal[
    "answered", "max_steps", "turns", "tokens", "time", "context", "cut_off", "no_answer"
]
"""How a run ended. turns, tokens, time, context: a limit; cut_off: a turn of the model was too
long; no_answer: the plain agent wrote neither a call nor an answer."""
_LIMITS: tuple[Ending, ...] = ("turns", "tokens", "time", "context")


@dataclass(frozen=True)
class AgentOptions:
    """Options of an agent.

    Args:
        agent: code: smolagents' CodeAgent; tools: its ToolCallingAgent; plain: the baseline loop.
        max_steps: maximum number of answers without plans; there is no extra call at the end.
        planning_interval: number of steps between plans; the first comes before the first step.
        extra_imports: modules imported before the first step and named to the model.
        token_budget: maximum number of sampled tokens in all.
        seconds: limit of the whole run; the rollout's own deadline applies, too.
        step_seconds: limit of one step's code, without the time in tools.
        observation_characters: maximum length of a step's output shown; the middle is left out.
        verbosity: smolagents' own log: -1 nothing, 0 errors, 1 steps, 2 all.
        prompts: own: this package's; smolagents: the installed smolagents' templates.
    """

    agent: Kind = "code"
    max_steps: int = 12
    planning_interval: int | None = None
    extra_imports: tuple[str, ...] = ()
    token_budget: int | None = None
    seconds: float | None = None
    step_seconds: float = 60.0
    observation_characters: int = 10_000
    verbosity: int = -1
    prompts: Prompts = "own"

    def check(self) -> None:
        """Raises ConfigError where a module of `extra_imports` is not installed."""
        for name in self.extra_imports:
            if not _is_installed(name):
                raise ConfigError(f"extra_imports: there is no module {name!r} here.")


@dataclass(frozen=True)
class Solved:
    """The result of a run; `as_output` is what a rollout returns."""

    answer: str | None
    state: Ending
    steps: list[dict[str, Any]]

    def as_output(self) -> dict[str, Any]:
        return {"answer": self.answer, "state": self.state, "steps": self.steps}


def ending_of(error: LimitReached | CutOff) -> Ending:
    """Returns how a run ended that `error` ended."""
    if isinstance(error, CutOff):
        return "cut_off"
    return next((known for known in _LIMITS if known == error.detail.get("limit")), "turns")


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False
