"""Computes how many more groups of an environment may start, from what waits for trainers.

Pure. Two bounds, the lower one counts: what waits is bounded (a slow trainer makes neither memory
nor the store grow), and where groups may only be so many versions old, so is what waits and is made
together: a group that is begun is delivered behind all of these, a batch for each version.

What holds: each group that a broadcast run is owed waits in its queue, so the slowest of them
decides; of the shared runs, one that wants more is enough, and one that takes only some
environments counts only theirs. An environment of which nothing waits and nothing is made may
always begin one, so that others that fill the queue never keep it from the trainers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

SHARED = "shared"
"""The queue of all runs that share their groups."""


class Taker(msgspec.Struct, frozen=True, kw_only=True):
    """An open run.

    Args:
        queue: the queue that it draws from: `SHARED`, or its own.
        environments: environments whose groups it takes; empty: all.
        batch: number of groups that it takes between two versions.
        is_hungry: it wants more groups before it publishes; those it has do not count.
    """

    name: str
    queue: str
    batch: int
    environments: frozenset[str] = frozenset()
    is_hungry: bool = False

    def takes(self, env: str) -> bool:
        return not self.environments or env in self.environments


class Depth(msgspec.Struct, frozen=True):
    """Groups of one environment in one queue."""

    queued: int = 0
    leased: int = 0


Depths = Mapping[str, Mapping[str, Depth]]
"""Depths by queue and environment."""


class Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds on waiting groups.

    Args:
        most_groups: maximum groups waiting in a queue.
        most_batches: maximum batches waiting, if that is less (but at least two).
        max_staleness: versions that a group may be behind at delivery; None: no limit.
    """

    most_groups: int
    most_batches: int
    max_staleness: int | None = None


def free_capacity(
    env: str,
    takers: Iterable[Taker],
    depths: Depths,
    open_groups: Mapping[str, int],
    bounds: Bounds,
) -> int:
    """Returns how many groups of `env` may start now; zero or less: none.

    Args:
        open_groups: number of groups in progress, by environment.
    """
    runs = list(takers)
    queues = {taker.queue for taker in runs if taker.takes(env)}
    if not queues:
        return _capacity_without_takers(runs, depths, bounds)
    return min(
        _capacity_of_queue(
            env,
            [taker for taker in runs if taker.queue == queue],
            depths.get(queue, {}),
            open_groups,
            bounds,
        )
        for queue in queues
    )


def _capacity_without_takers(takers: list[Taker], depths: Depths, bounds: Bounds) -> int:
    """Capacity of an environment without runs: all such groups share one bound."""
    untaken = {
        env: depth
        for env, depth in depths.get(SHARED, {}).items()
        if not any(taker.takes(env) for taker in takers)
    }
    return bounds.most_groups - sum(depth.queued for depth in untaken.values())


def _capacity_of_queue(
    env: str,
    takers: list[Taker],
    queue: Mapping[str, Depth],
    open_groups: Mapping[str, int],
    bounds: Bounds,
) -> int:
    """Capacity in the queue of `takers`; in a shared queue the largest of theirs."""
    own = queue.get(env, Depth())
    has_none = not (own.queued or own.leased or open_groups.get(env))
    found = [
        _capacity_of_taker(taker, takers, queue, open_groups, bounds)
        for taker in takers
        if taker.takes(env)
    ]
    return max(*found, 1 if has_none else min(found))


def _capacity_of_taker(
    taker: Taker,
    sharing: list[Taker],
    queue: Mapping[str, Depth],
    open_groups: Mapping[str, int],
    bounds: Bounds,
) -> int:
    """Capacity for one run; runs that take a subset of its environments help to empty its queue."""
    helpers = [one for one in sharing if _is_within(one, taker)]
    batch = sum(one.batch for one in helpers)
    seen = [depth for env, depth in queue.items() if taker.takes(env)]
    queued = sum(depth.queued for depth in seen)
    free = most_waiting(batch, bounds) - queued
    if bounds.max_staleness is None:
        return free
    # What is leased is a batch that is trained now: a version later it is gone. Who asks for more
    # before that takes more for one version than it said.
    leased = sum(depth.leased for depth in seen)
    ahead = 0 if any(one.is_hungry for one in helpers) else min(leased, batch)
    made = sum(count for env, count in open_groups.items() if taker.takes(env))
    return min(free, (bounds.max_staleness + 1) * batch - ahead - queued - made)


def _is_within(one: Taker, other: Taker) -> bool:
    """Returns whether `one` takes nothing that `other` does not."""
    return not other.environments or (
        bool(one.environments) and one.environments <= other.environments
    )


def most_waiting(batch: int, bounds: Bounds) -> int:
    """Returns how many groups may wait for a trainer.

    At least two batches, so that one can be made while the other is fetched.
    """
    return max(2 * batch, min(bounds.most_groups, bounds.most_batches * batch))


class RunActivity(msgspec.Struct, frozen=True, kw_only=True):
    """A run and the seconds since it last leased, held or returned a group, or found none."""

    name: str
    is_broadcast: bool
    silent_seconds: float


def silent_runs(runs: Iterable[RunActivity], seconds: float | None) -> list[str]:
    """Returns the broadcast runs to close: silent for `seconds` while another run is not."""
    if seconds is None:
        return []
    silent, live = [], 0
    for run in runs:
        if run.silent_seconds < seconds:
            live += 1
        elif run.is_broadcast:
            silent.append(run.name)
    return silent if live else []
