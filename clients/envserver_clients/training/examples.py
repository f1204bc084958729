"""Selects what to learn from a batch.

In: the groups of a batch, and the version of the learning policy. Out: examples, and statistics of
the whole batch. What always holds: the weights of all trained tokens are computed from the whole
batch in advance, so the sums over any parts of it add up to the same loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from envserver_records import InputError
from numpy.typing import NDArray

from envserver_clients.records import ClientGroup, Row

from .advantages import Scaling, advantages, shuffled

Denominator = Literal["trajectory", "token", "constant"]
"""The denominator of the sum over tokens.

trajectory: each trajectory weighs the same, however long (GRPO, arXiv 2402.03300, equation 3).
token: each token has the same weight (DAPO, arXiv 2503.14476, equation 8).
constant: trajectories times a constant, so that tokens of long wrong answers count as much
(Dr. GRPO, arXiv 2503.20783, section 3.2).

Trajectories and tokens of the whole batch count, including groups whose rewards are all equal. A
trajectory has the tokens of all its rows. Only trained tokens count."""


@dataclass(frozen=True)
class Example:
    """One row to learn from; arrays have length T.

    Args:
        tokens: int32[T].
        mask: uint8[T], 1 where the token is trained; 0 for the first token, which has no context.
        logprobs: float32[T], those of the sampling policy where mask is 1.
        advantage: its trajectory's.
        weight: weight of each of its trained tokens in the loss.
    """

    tokens: NDArray[np.int32]
    mask: NDArray[np.uint8]
    logprobs: NDArray[np.float32]
    advantage: float
    weight: float


@dataclass(frozen=True)
class ExampleSettings:
    """How rows become examples; see the settings."""

    scaling: Scaling = "std"
    denominator: Denominator = "trajectory"
    constant_tokens: int = 512
    max_staleness: int | None = None
    learn_truncated: bool = False


@dataclass(frozen=True)
class BatchExamples:
    """The examples of a batch, with statistics of the batch.

    Args:
        numbers: rewards, sizes and staleness for the metrics.
        group_ids: ids of all groups, in order.
    """

    examples: list[Example]
    numbers: dict[str, float]
    group_ids: list[str] = field(default_factory=list)


def examples_of(
    groups: Sequence[ClientGroup],
    version: int,
    rules: ExampleSettings,
    *,
    shuffle: np.random.Generator | None = None,
) -> BatchExamples:
    """Returns the examples of a batch.

    Rows with advantage 0 do not change the gradient and are left out; their trajectories and tokens
    count in the denominators. Groups older than `max_staleness` are left out and counted.

    Args:
        version: version of the learning policy.
        shuffle: shuffles the rewards within each group (for control experiments).

    Raises:
        InputError: a trained row has no logprobs.
    """
    fresh = [group for group in groups if not _is_stale(group.rows, version, rules.max_staleness)]
    rows: list[tuple[Row, float]] = []
    rewards: list[float] = []
    equal = 0
    for group in fresh:
        own = _rewards(group.rows)
        rewards += own.values()
        given = list(own.values()) if shuffle is None else shuffled(list(own.values()), shuffle)
        values = dict(zip(own, advantages(given, rules.scaling), strict=True)) if own else {}
        equal += not any(values.values())
        rows += [(row, float(values[row.trajectory])) for row in group.rows]
    examples = _weighed(rows, len(rewards), rules)
    numbers = {
        **_spread("reward", rewards),
        "groups": len(groups),
        "groups_stale": len(groups) - len(fresh),
        "groups_equal": equal,
        "trajectories": len(rewards),
        "rows": len(rows),
        "rows_learned": len(examples),
        "tokens": sum(len(row.tokens) for row, _ in rows),
        "tokens_trained": sum(int(row.mask.sum()) for row, _ in rows),
        "truncated": _share([not row.learn for row, _ in rows]),
        **_staleness([row for row, _ in rows], version),
    }
    return BatchExamples(examples, numbers, [group.group_id for group in groups])


def _is_stale(rows: Sequence[Row], version: int, most: int | None) -> bool:
    """Returns whether a trained token is more than `most` versions behind (-1: unknown, no)."""
    if most is None:
        return False
    known = (row.versions[(row.mask == 1) & (row.versions >= 0)] for row in rows)
    return any(bool((version - versions > most).any()) for versions in known)


def _rewards(rows: Sequence[Row]) -> dict[int, float]:
    """Returns the reward of each trajectory of a group, by its number."""
    return {row.trajectory: row.reward for row in rows}


def _weighed(
    rows: list[tuple[Row, float]], trajectories: int, rules: ExampleSettings
) -> list[Example]:
    sizes: dict[tuple[str, int], int] = {}
    for row, _ in rows:
        key = (row.group_id, row.trajectory)
        sizes[key] = sizes.get(key, 0) + int(row.mask.sum())
    all_tokens = sum(sizes.values())
    examples = []
    for row, advantage in rows:
        own = sizes[row.group_id, row.trajectory]
        if not advantage or not row.mask.any() or not (row.learn or rules.learn_truncated):
            continue
        if row.logprobs is None:
            raise InputError(
                f"Group {row.group_id} has no logprobs, which the importance weights need.",
                hint="Use an engine that returns token logprobs (envserver models probe URL).",
                place=row.group_id,
            )
        match rules.denominator:
            case "trajectory":
                weight = 1 / (trajectories * own)
            case "token":
                weight = 1 / all_tokens
            case "constant":
                weight = 1 / (trajectories * rules.constant_tokens)
        mask = row.mask.copy()
        mask[0] = 0  # the first token has no context to be predicted from
        examples.append(Example(row.tokens, mask, row.logprobs, advantage, weight))
    return examples


def _spread(name: str, values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    return {f"{name}_mean": float(np.mean(values)), f"{name}_std": float(np.std(values))}


def _share(values: Sequence[bool]) -> float:
    return float(np.mean(values)) if values else 0.0


def _staleness(rows: Sequence[Row], version: int) -> dict[str, float]:
    """Returns how many versions behind trained tokens are, where that is known."""
    parts = [version - row.versions[(row.mask == 1) & (row.versions >= 0)] for row in rows]
    behind = np.concatenate(parts) if parts else np.zeros(0)
    if not behind.size:
        return {}
    return {"staleness_mean": float(behind.mean()), "staleness_max": float(behind.max())}
