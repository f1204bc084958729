"""Chooses which of several environments in one run starts a group next.

`targets` and `Shares` are pure: weights and minimum shares in, a name out. `Turns` gives each
environment's scheduler its turn when it asks and there is room. What always holds: the environment
furthest behind its share comes first; one that does not ask for a while (its tasks have ended, it
pauses after failures, its data set is loading) is not waited for; rollouts in flight are bounded.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Iterable, Mapping
from typing import Final, Literal

import msgspec
import numpy as np
from envserver_records.errors import ConfigError
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Ending = Literal["delivered", "filtered", "failed"]
"""The outcome of a started group."""
CATCH_UP_GROUPS = 16
"""Maximum number of groups an idle environment may catch up."""
PATIENCE_SECONDS = 0.5
"""Seconds to wait for the environment whose turn it is."""
_LEAST_PART: Final = 1e-6
"""Share below which smaller ones count as this one: clocks of 1 / share stay numbers."""
_FILTERED_COSTS = 0.25
"""Cost of a turn. Without it, an environment whose groups are all filtered would block others."""


class Share(msgspec.Struct, frozen=True):
    """The share of one environment in all groups.

    Args:
        weight: relative to the weights of the others; positive.
        minimum: minimum share in [0, 1], whatever the weights.
    """

    name: str
    weight: float = 1.0
    minimum: float = 0.0


def targets(shares: Iterable[Share]) -> dict[str, float]:
    """Returns the target share of each: its minimum, or more by weight of what the minima leave.

    Shares sum to 1 and are at least 1e-9.
    """
    given = list(shares)
    by_name = {share.name: share for share in given}
    if len(by_name) < len(given):
        raise ConfigError("An environment is named twice in the mix.")
    for share in by_name.values():
        if not (0 < share.weight < float("inf") and 0 <= share.minimum <= 1):
            raise ConfigError(
                f"{share.name}: a weight must be positive, a minimum share from 0 to 1."
            )
    if sum(share.minimum for share in by_name.values()) > 1 + 1e-9:
        raise ConfigError("The minimum shares are more than 1 together.")
    fixed: dict[str, float] = {}
    while True:
        free = [share for share in by_name.values() if share.name not in fixed]
        left = max(0.0, 1.0 - sum(fixed.values()))
        weight = sum(share.weight for share in free)
        low = [share for share in free if left * share.weight / weight < share.minimum]
        if not low:
            break
        fixed |= {share.name: share.minimum for share in low}
    found = fixed | {share.name: left * share.weight / weight for share in free}
    least = max(_LEAST_PART, min(part for part in found.values() if part > 0))
    # If the minima take everything, an environment without one still gets a tiny share.
    return {name: max(found[name], least * 1e-3) for name in by_name}


class Shares:
    """Weighted fair queueing with one virtual clock per environment (1 / target per group).

    Args:
        begun: number of groups started before.
    """

    def __init__(
        self, targets: Mapping[str, float], begun: Mapping[str, int] | None = None
    ) -> None:
        self._targets = dict(targets)
        known = begun or {}
        self._clocks = {name: known.get(name, 0) / part for name, part in targets.items()}
        self._now = 0.0

    def asks(self, name: str) -> None:
        """Lets `name` ask again after a pause; limits how much it may catch up."""
        earliest = self._now - CATCH_UP_GROUPS / self._targets[name]
        self._clocks[name] = max(self._clocks[name], earliest)

    def next(self, asking: Iterable[str]) -> str:
        """Returns the environment of `asking` (at least one) whose turn it is."""
        return min(asking, key=lambda name: (self._clocks[name] + 1 / self._targets[name], name))

    def begin(self, name: str) -> None:
        """Counts a group that the environment starts."""
        self._now = max(self._now, self._clocks[name])
        self._clocks[name] += 1 / self._targets[name]

    def upcoming(self, turns: int, wants: Mapping[str, int]) -> dict[str, int]:
        """Returns how many of the next `turns` turns each environment would get, if it asked for
        `wants` groups; nothing is counted.

        Its k-th turn comes at its clock plus k / target. The latest time before which at most
        `turns` turns come is found by bisection, the last few turns are given one by one: the cost
        is that of sorting the environments, however many turns there are.
        """
        asking = [name for name, want in wants.items() if want > 0]
        given = dict.fromkeys(wants, 0)
        if not asking or turns <= 0:
            return given
        parts = np.array([self._targets[name] for name in asking])
        clocks = np.array([self._clocks[name] for name in asking])
        clocks = np.maximum(clocks, self._now - CATCH_UP_GROUPS / parts)
        most = np.array([wants[name] for name in asking])
        counts = np.where(most.sum() <= turns, most, _turns_before(turns, clocks, parts, most))
        left = min(turns, int(most.sum())) - int(counts.sum())
        heap = [
            (clocks[i] + (counts[i] + 1) / parts[i], name, i)
            for i, name in enumerate(asking)
            if counts[i] < most[i]
        ]
        heapq.heapify(heap)
        for _ in range(left):
            _, name, i = heapq.heappop(heap)
            counts[i] += 1
            if counts[i] < most[i]:
                heapq.heappush(heap, (clocks[i] + (counts[i] + 1) / parts[i], name, i))
        return given | dict(zip(asking, counts.tolist(), strict=True))

    def give_back(self, name: str, part: float) -> None:
        """Reduces the cost of a group that the environment started, by `part` in [0, 1]."""
        self._clocks[name] -= part / self._targets[name]


def _turns_before(turns: int, clocks: Floats, parts: Floats, most: Integers) -> Integers:
    """Returns the turns of each before the latest time at which all have at most `turns`."""

    def until(time: float) -> Integers:
        return np.clip(np.floor((time - clocks) * parts), 0, most).astype(np.int64)

    early, late = float(clocks.min()), float((clocks + most / parts).max())
    while early < (middle := (early + late) / 2) < late:
        given = until(middle).sum()
        if given <= turns:
            early = middle
        else:
            late = middle
        if given == turns:
            break
    return until(early)


class Turns:
    """Gives turns to the schedulers of a mix; see `lane`.

    Args:
        room: maximum rollouts in flight, all environments together.
        wanted: number of groups to deliver, all environments together; None: no limit.
    """

    def __init__(self, shares: Shares, *, room: int, wanted: int | None = None) -> None:
        self._shares = shares
        self._room = room
        self._wanted = wanted
        self._asking: dict[str, tuple[int, asyncio.Future[bool]]] = {}
        self._silent_since: dict[str, float] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._rollouts = 0
        self._open = 0
        self._delivered = 0

    def lane(self, name: str) -> Lane:
        """The turns of one environment."""
        self._silent_since[name] = asyncio.get_running_loop().time()
        return Lane(self, name)

    async def take(self, name: str, size: int) -> bool:
        """See `Lane.take`."""
        granted: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._silent_since.pop(name, None)
        self._asking[name] = (size, granted)
        self._shares.asks(name)
        self._give()
        try:
            return await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled() and granted.result():
                self.ended(name, size, "failed")
            raise
        finally:
            if self._asking.get(name, (0, None))[1] is granted:
                del self._asking[name]

    def ended(self, name: str, size: int, how: Ending) -> None:
        """See `Lane.ended`."""
        self._rollouts -= size
        self._open -= 1
        self._delivered += how == "delivered"
        if how == "filtered":
            self._shares.give_back(name, 1 - _FILTERED_COSTS)
        self._give()

    def left(self, name: str) -> None:
        """See `Lane.left`."""
        self._silent_since.pop(name, None)
        self._give()

    def _give(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        # A caller cancelled a moment ago no longer asks, although its cancellation has not run yet.
        self._asking = {name: one for name, one in self._asking.items() if not one[1].done()}
        while self._asking:
            if self._wanted is not None and self._delivered >= self._wanted:
                self._answer(list(self._asking), False)
                return
            if self._wanted is not None and self._delivered + self._open >= self._wanted:
                return
            name = self._shares.next([*self._asking, *self._awaited()])
            if name not in self._asking:
                late = self._silent_since[name] + PATIENCE_SECONDS
                self._timer = asyncio.get_running_loop().call_at(late, self._give)
                return
            size = self._asking[name][0]
            if self._rollouts and self._rollouts + size > self._room:
                return
            self._shares.begin(name)
            self._rollouts += size
            self._open += 1
            self._answer([name], True)

    def _awaited(self) -> list[str]:
        """Returns the environments that are not asking now but will in a moment."""
        earliest = asyncio.get_running_loop().time() - PATIENCE_SECONDS
        return [name for name, since in self._silent_since.items() if since > earliest]

    def _answer(self, names: list[str], granted: bool) -> None:
        now = asyncio.get_running_loop().time()
        for name in names:
            self._asking.pop(name)[1].set_result(granted)
            self._silent_since[name] = now


class Lane:
    """Turns of one environment in a mix."""

    def __init__(self, turns: Turns, name: str) -> None:
        self._turns = turns
        self._name = name

    async def take(self, size: int) -> bool:
        """Waits until a group of `size` rollouts may start; False: no more groups are wanted."""
        return await self._turns.take(self._name, size)

    def ended(self, size: int, how: Ending) -> None:
        """Notes how a group that had its turn ended."""
        self._turns.ended(self._name, size, how)

    def left(self) -> None:
        """Notes that the environment starts no further group."""
        self._turns.left(self._name)
