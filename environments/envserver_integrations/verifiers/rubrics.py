"""Rubrics of classic environments: scores by reward function, and no error taken for a 0.

verifiers counts a reward function that raises as 0. Here it is a failure of scoring: the rollout is
scored again, then dropped.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

from envserver import Score

from .common import numbers

_raised: ContextVar[list[Exception] | None] = ContextVar("raised", default=None)


def watch(rubric: Any) -> None:
    """Makes the reward functions of a rubric, and of those in it, remember what they raise."""
    for each in _rubrics(rubric):
        each.funcs = [_watched(function) for function in each.funcs]


async def score_one(rubric: Any, state: Any) -> Score:
    """Scores one state."""
    await _checked(rubric.score_rollout(state))
    return score_of(rubric, state)


async def score_all(rubric: Any, states: Sequence[Any]) -> list[Score]:
    """Scores the states of one group; raises like `score_one`."""
    await _checked(rubric.score_group(list(states)))
    return [score_of(rubric, state) for state in states]


def score_of(rubric: Any, state: Any) -> Score:
    """Returns the score in a state: functions with a weight as components, others as metrics."""
    found = numbers(state["metrics"])
    names, weights = rubric._get_reward_func_names(), rubric._get_reward_weights()
    paid = {name for name, weight in zip(names, weights, strict=False) if weight != 0}
    return Score(
        reward=float(state["reward"]),
        components={name: value for name, value in found.items() if name in paid},
        metrics={name: value for name, value in found.items() if name not in paid},
    )


async def _checked(scoring: Any) -> None:
    raised: list[Exception] = []
    token = _raised.set(raised)
    try:
        await scoring
    finally:
        _raised.reset(token)
    if raised:
        raise raised[0]


def _watched(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    async def watched(*args: Any, **kwargs: Any) -> Any:
        try:
            value = function(*args, **kwargs)
            value = await value if inspect.isawaitable(value) else value
            return value if isinstance(value, list) else float(value)
        except Exception as error:
            if (raised := _raised.get()) is not None:
                raised.append(error)
            raise

    if not hasattr(watched, "__name__"):
        watched.__name__ = type(function).__name__
    return watched


def _rubrics(rubric: Any) -> Iterator[Any]:
    yield rubric
    for each in getattr(rubric, "rubrics", ()):
        yield from _rubrics(each)
    for environment in getattr(rubric, "env_map", {}).values():
        yield from _rubrics(environment.rubric)
