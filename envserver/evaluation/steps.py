"""Measures the steps of attempts: errors, repetitions, and steps beyond the shortest success. Pure.

A step is an action that the agent logged (`run.log_action`), without `finalize` and what the other
side of a conversation said. What holds: a step is a repetition if the same tool had the same input
and output in this attempt before; it is useless if it failed, is a repetition, or had no output.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec

from ..actions import CUT
from .estimators import Estimate, estimate

NOT_STEPS: Final = frozenset(("finalize", "user", CUT))
_NOTHING: Final = frozenset((b"", b"null", b'""', b"{}", b"[]"))


class Action(msgspec.Struct, frozen=True):
    """A logged action, as far as its step is measured."""

    tool: str = ""
    input: msgspec.Raw = msgspec.Raw(b"")
    output: msgspec.Raw = msgspec.Raw(b"")
    error: str = ""


class Steps(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of an attempt's steps; `useless` counts each of the others once."""

    steps: int
    errors: int
    repeated: int
    useless: int


def steps_of(actions: Iterable[Action]) -> Steps:
    """Counts the steps of one attempt."""
    seen: set[tuple[str, bytes, bytes]] = set()
    steps = errors = repeated = useless = 0
    for action in actions:
        if action.tool in NOT_STEPS:
            continue
        gave = bytes(action.output)
        step = (action.tool, bytes(action.input), gave)
        again = step in seen
        seen.add(step)
        steps += 1
        errors += bool(action.error)
        repeated += again
        useless += bool(action.error) or again or gave in _NOTHING
    return Steps(steps=steps, errors=errors, repeated=repeated, useless=useless)


class Stepped(msgspec.Struct, frozen=True):
    """The steps of a scored attempt, and whether it passed."""

    steps: Steps
    passed: bool


def shortest(runs: Iterable[Mapping[str, Sequence[Stepped]]]) -> dict[str, int]:
    """Returns for each task the fewest steps with which an attempt of any run passed."""
    found: dict[str, int] = {}
    for run in runs:
        for task_id, attempts in run.items():
            passed = [one.steps.steps for one in attempts if one.passed]
            if passed:
                found[task_id] = min(*passed, found.get(task_id, passed[0]))
    return found


def step_measures(
    run: Mapping[str, Sequence[Stepped]], best: Mapping[str, int], *, seed: int
) -> dict[str, Estimate]:
    """Returns the measures by name, each a mean over tasks of the mean over their attempts.

    Args:
        best: fewest steps of a success, by task.
    """
    values: dict[str, list[float]] = {}
    for task_id, attempts in run.items():
        passed = [one.steps.steps for one in attempts if one.passed]
        tried = [one.steps for one in attempts if one.steps.steps]
        found: dict[str, Sequence[float]] = {
            "steps": [one.steps.steps for one in attempts],
            "steps of a success": passed,
            "steps beyond the shortest success": [n - best.get(task_id, n) for n in passed],
            "share with an error": [one.errors / one.steps for one in tried],
            "share repeated": [one.repeated / one.steps for one in tried],
            "share useless": [one.useless / one.steps for one in tried],
        }
        for name, numbers in found.items():
            if numbers:
                values.setdefault(name, []).append(sum(numbers) / len(numbers))
    return {name: estimate(numbers, seed=seed) for name, numbers in values.items()}
