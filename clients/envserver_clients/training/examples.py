"""What is learned from a batch.

In: the groups of a batch, and the version of the policy that learns. Out: examples, and numbers
about all of the batch. What holds: the weights of all trained tokens of a batch are fixed before
anything is computed, from the whole batch; so sums over any parts of it add up to the same loss.
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
"""What the sum over tokens is divided by.

trajectory: each trajectory weighs the same, however long (GRPO, arXiv 2402.03300, equation 3).
token: each token weighs the same (DAPO, arXiv 2503.14476, equation 8).
constant: trajectories times a constant, so that a long wrong answer is not punished less per token
(Dr. GRPO, arXiv 2503.20783, section 3.2).

Trajectories and tokens of the whole batch count, also of groups whose rewards are all equal. Tokens
of a trajectory are those of all its rows. Only trained tokens count."""


@dataclass(frozen=True)
class Example:
    """One row that is learned from; arrays have length T.

    Args:
        tokens: int32[T].
        mask: uint8[T], 1 where the token is trained; never at 0, which nothing precedes.
        logprobs: float32[T], of the policy that sampled, where mask is 1.
        advantage: of its trajectory.
        weight: of each of its trained tokens in the loss.
    """

    tokens: NDArray[np.int32]
    mask: NDArray[np.uint8]
    logprobs: NDArray[np.float32]
    advantage: float
    weight: float


@dataclass(frozen=True)
class Rules:
    """How rows become examples; see `Settings`."""

    scaling: Scaling = "std"
    denominator: Denominator = "trajectory"
    constant_tokens: int = 512
    max_staleness: int | None = None
    learn_truncated: bool = False


@dataclass(frozen=True)
class Learned:
    """The examples of a batch, and what there is to say about the batch.

    Args:
        numbers: rewards, sizes, staleness: what goes into the metrics.
        group_ids: of all groups, in their order.
    """

    examples: list[Example]
    numbers: dict[str, float]
    group_ids: list[str] = field(default_factory=list)


def examples_of(
    groups: Sequence[ClientGroup],
    version: int,
    rules: Rules,
    *,
    shuffle: np.random.Generator | None = None,
) -> Learned:
    """The examples of a batch.

    Rows of advantage 0 add nothing to the gradient and are left out; their trajectories and tokens
    count in the denominators. Groups older than `max_staleness` are left out altogether, counted.

    Args:
        version: of the policy that learns.
        shuffle: deals out the rewards within each group by chance (a control).

    Raises:
        InputError: a trained row came without logprobs.
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
    return Learned(examples, numbers, [group.group_id for group in groups])


def _is_stale(rows: Sequence[Row], version: int, most: int | None) -> bool:
    """Whether any trained token is more than `most` versions behind (-1: unknown, is never)."""
    if most is None:
        return False
    known = (row.versions[(row.mask == 1) & (row.versions >= 0)] for row in rows)
    return any(bool((version - versions > most).any()) for versions in known)


def _rewards(rows: Sequence[Row]) -> dict[int, float]:
    """The reward of each trajectory of a group; one that gave several rows counts once."""
    return {row.trajectory: row.reward for row in rows}


def _weighed(rows: list[tuple[Row, float]], trajectories: int, rules: Rules) -> list[Example]:
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
                f"Group {row.group_id} has no logprobs: nothing says how likely its tokens were.",
                hint="Use an engine that gives token logprobs (envserver models probe URL).",
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
        mask[0] = 0  # nothing was before it that could have made it more or less likely
        examples.append(Example(row.tokens, mask, row.logprobs, advantage, weight))
    return examples


def _spread(name: str, values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    return {f"{name}_mean": float(np.mean(values)), f"{name}_std": float(np.std(values))}


def _share(values: Sequence[bool]) -> float:
    return float(np.mean(values)) if values else 0.0


def _staleness(rows: Sequence[Row], version: int) -> dict[str, float]:
    """How many versions behind trained tokens are, where that is known."""
    parts = [version - row.versions[(row.mask == 1) & (row.versions >= 0)] for row in rows]
    behind = np.concatenate(parts) if parts else np.zeros(0)
    if not behind.size:
        return {}
    return {"staleness_mean": float(behind.mean()), "staleness_max": float(behind.max())}
