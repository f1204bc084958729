"""pass^k of many tasks: how likely k attempts at a task all succeed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from envserver import pass_hat_k

from .checks import is_success


def pass_hat_ks(rewards: Mapping[str, Sequence[float]]) -> dict[int, float]:
    """pass^k for every k that all tasks allow, the mean over the tasks.

    Args:
        rewards: of each task's attempts, in [0, 1]; a success is 1.

    Raises:
        ValueError: there are no tasks, or one has no attempt.
    """
    fewest = min((len(attempts) for attempts in rewards.values()), default=0)
    if not fewest:
        raise ValueError("Each task needs at least one attempt.")
    return {
        k: sum(
            pass_hat_k(len(attempts), sum(map(is_success, attempts)), k)
            for attempts in rewards.values()
        )
        / len(rewards)
        for k in range(1, fewest + 1)
    }
