"""Runs the stream of groups: how many at once, of which environment, when to stop.

A group that the sink already has is skipped; resuming needs nothing else. Several environments
share a run by weight (`Shares`): the one furthest behind its share comes first, and one that does
not ask for a while is not waited for.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any, Final, Literal, Protocol

import msgspec
import numpy as np
import structlog
from envserver_records.errors import (
    AllFailed,
    ConfigError,
    EnvserverError,
    StoreError,
    TooMuchUntrained,
)
from envserver_records.records import Group
from envserver_records.waiting import cancel_and_wait
from numpy.typing import NDArray
from structlog.contextvars import bind_contextvars

from ..environment import Environment
from ..settings.config import RolloutsConfig
from ..telemetry.tracing import evaluation, gathered
from .estimates import Scored
from .events import GroupDelivered, GroupSink, Observer, dropped
from .policy import Drop, UntrainedCeiling, retry_delay_seconds
from .stream import GroupRequest, read

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Ending = Literal["delivered", "filtered", "failed"]
CATCH_UP_GROUPS = 16
"""Maximum number of groups an idle environment may catch up."""
PATIENCE_SECONDS = 0.5
"""Seconds to wait for the environment whose turn it is."""
_LEAST_PART: Final = 1e-6
"""Share below which smaller ones count as this one: clocks of 1 / share stay numbers."""
_FILTERED_COSTS = 0.25
"""Cost of a turn. Without it, an environment whose groups are all filtered would block others."""


class Share(msgspec.Struct, frozen=True):
    """The share of an environment in all groups: by `weight` relative to the others, but at least
    `minimum` in [0, 1]."""

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
    """Weighted fair queueing with one virtual clock per environment (1 / target per group)."""

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
        return min(asking, key=lambda name: (self._clocks[name] + 1 / self._targets[name], name))

    def begin(self, name: str) -> None:
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


@dataclass(eq=False, repr=False)
class Turns:
    """Gives turns to the schedulers of a mix. `room`: maximum rollouts in flight, `wanted`: groups
    to deliver (None: no limit), all environments together."""

    shares: Shares
    _: KW_ONLY
    room: int
    wanted: int | None = None

    def __post_init__(self) -> None:
        self._asking: dict[str, tuple[int, asyncio.Future[bool]]] = {}
        self._silent_since: dict[str, float] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._rollouts = 0
        self._open = 0
        self._delivered = 0

    def lane(self, name: str) -> Lane:
        self._silent_since[name] = asyncio.get_running_loop().time()
        return Lane(self, name)

    async def take(self, name: str, size: int) -> bool:
        """Waits until a group of `size` rollouts may start; False: no more groups are wanted."""
        granted: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._silent_since.pop(name, None)
        self._asking[name] = (size, granted)
        self.shares.asks(name)
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
        self._rollouts -= size
        self._open -= 1
        self._delivered += how == "delivered"
        if how == "filtered":
            self.shares.give_back(name, 1 - _FILTERED_COSTS)
        self._give()

    def left(self, name: str) -> None:
        """Notes that the environment starts no further group."""
        self._silent_since.pop(name, None)
        self._give()

    def _give(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        # A caller cancelled a moment ago no longer asks, although its cancellation has not run yet.
        self._asking = {
            name: waiting for name, waiting in self._asking.items() if not waiting[1].done()
        }
        while self._asking:
            if self.wanted is not None and self._delivered >= self.wanted:
                self._answer(list(self._asking), False)
                return
            if self.wanted is not None and self._delivered + self._open >= self.wanted:
                return
            name = self.shares.next([*self._asking, *self._awaited()])
            if name not in self._asking:
                late = self._silent_since[name] + PATIENCE_SECONDS
                self._timer = asyncio.get_running_loop().call_at(late, self._give)
                return
            size = self._asking[name][0]
            if self._rollouts and self._rollouts + size > self.room:
                return
            self.shares.begin(name)
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
    """The turns of one environment in a mix."""

    def __init__(self, turns: Turns, name: str) -> None:
        self.take = partial(turns.take, name)
        self.ended = partial(turns.ended, name)
        self.left = partial(turns.left, name)


def lanes(
    shares: Sequence[Share], begun: Mapping[str, int], *, room: int, total: int | None
) -> dict[str, Lane | None]:
    """Returns the lane of each environment; None: it is alone, and needs no turns. `begun`: groups
    of each so far, which count for `total`. `room`: see `Turns`."""
    wanted = still_wanted(total, sum(begun.values()))
    turns = Turns(Shares(targets(shares), begun), room=room, wanted=wanted)
    takes_turns = len(shares) > 1 or total is not None
    return {share.name: turns.lane(share.name) if takes_turns else None for share in shares}


def still_wanted(groups: int | None, made: int) -> int | None:
    """None: as many as there are."""
    return None if groups is None else max(0, groups - made)


log = structlog.get_logger()


class GroupMaker(Protocol):
    """Makes groups: with the parts of this process (`RolloutContext`), or on other machines."""

    @property
    def environment(self) -> Environment: ...

    @property
    def rollouts(self) -> RolloutsConfig: ...

    @property
    def observer(self) -> Observer: ...

    @property
    def ceiling(self) -> UntrainedCeiling: ...

    async def make(self, request: GroupRequest) -> Group | Drop: ...


@dataclass(eq=False, repr=False)
class Scheduler:
    """Runs groups until enough are delivered, the tasks end, or `drain` is called.

    Args:
        wanted: number of groups to deliver; None: all tasks.
        opened: called with 1 when a group starts and with -1 when it ends.
        lane: gives each group its turn if several environments share a run.
        counted: stores the result of each group that was scored but not delivered.
        stop_on_failures: end with AllFailed after `rollouts.stop_after_failed_groups` failed groups
            in a row; otherwise pause with growing delays (a server outlives its engine).
    """

    context: GroupMaker
    requests: Iterator[GroupRequest]
    sink: GroupSink
    _: KW_ONLY
    wanted: int | None
    stop_on_failures: bool
    lane: Lane | None = None
    opened: Callable[[int], object] | None = None
    counted: Callable[[Scored], Awaitable[None]] | None = None

    def __post_init__(self) -> None:
        self._size = self.context.environment.config.group_size
        self._draining = asyncio.Event()
        self._all_begun = False
        self._open: set[asyncio.Task[Ending]] = set()
        self._delivering: set[asyncio.Task[Any]] = set()
        self._failed_in_a_row = 0
        self._dropped_in_a_row = 0
        self._reasons: Counter[str] = Counter()
        self._messages: dict[str, str] = {}
        self._works = False
        self._bug: AllFailed | None = None
        self.delivered = 0

    @property
    def open_groups(self) -> int:
        return len(self._open)

    @property
    def cut_off(self) -> int:
        return sum(group.cancelled() for group in self._open)

    @property
    def complete(self) -> bool:
        """Whether it ended because no group was left to make."""
        return self._all_begun and not self._open

    @property
    def drained(self) -> bool:
        return self._draining.is_set()

    def drain(self) -> None:
        """Starts no further group; `run` returns when the open ones are done."""
        self._draining.set()

    async def run(self) -> None:
        most = max(1, self.context.rollouts.max_concurrent // self._size) + 1
        try:
            while not self._draining.is_set() and self.delivered != self.wanted:
                await self._pause_after_failures()
                await self._until_fewer_than(most)
                if not self._is_wanting() or not await self._has_capacity():
                    continue
                request = await self._next_request()
                if request is None:
                    break
                if await self.sink.known([request.group_id]):
                    continue
                if not await self._has_turn():
                    break
                self._start(request)
            self._all_begun = not self.drained
            if self.lane is not None:
                self.lane.left()
            await self._until_fewer_than(1)
            if self._bug is not None and self.stop_on_failures:
                raise self._bug
        except EnvserverError:
            if self.stop_on_failures and self._delivering:
                # What is made is not lost to another's failure.
                await asyncio.wait(self._delivering)
            raise
        finally:
            if self.lane is not None:
                self.lane.left()
            await cancel_and_wait(*self._open)

    def _start(self, request: GroupRequest) -> None:
        group = asyncio.create_task(self._one(request), name=request.group_id)
        self._open.add(group)
        if self.opened is not None:
            opened = self.opened
            opened(1)
            group.add_done_callback(lambda _: opened(-1))
        if self.lane is not None:  # also of a group that is cancelled before its first step
            group.add_done_callback(self._return_turn)

    def _is_wanting(self) -> bool:
        return self.wanted is None or self.delivered + len(self._open) < self.wanted

    async def _until_fewer_than(self, most: int) -> None:
        self._reap()
        while len(self._open) >= most or (self._open and not self._is_wanting()):
            await asyncio.wait(self._open, return_when=asyncio.FIRST_COMPLETED)
            self._reap()

    def _reap(self) -> None:
        done = {task for task in self._open if task.done()}
        self._open -= done
        errors = [error for task in done if (error := task.exception()) is not None]
        if errors:
            raise errors[0]

    async def _arrives(
        self, waiting: asyncio.Future[Any], others: Iterable[asyncio.Task[Any]] = ()
    ) -> bool:
        """Returns whether `waiting` is done before the run is drained and one of `others` ends."""
        drain = asyncio.create_task(self._draining.wait())
        try:
            await asyncio.wait({waiting, drain, *others}, return_when=asyncio.FIRST_COMPLETED)
            return waiting.done() and not drain.done()
        finally:
            await cancel_and_wait(waiting, drain)

    async def _has_capacity(self) -> bool:
        room = asyncio.create_task(self.sink.wait_for_capacity())
        arrives = await self._arrives(room, self._open)
        if not room.cancelled():
            room.result()
        return arrives

    async def _next_request(self) -> GroupRequest | None:
        reading = read(self.requests)
        return reading.result() if await self._arrives(reading) else None

    async def _has_turn(self) -> bool:
        """Waits for the turn of the next group; False if none is wanted or the run is drained."""
        if self.lane is None:
            return True
        turn = asyncio.create_task(self.lane.take(self._size))
        used = False
        try:
            used = await self._arrives(turn)
            return used and turn.result()
        finally:
            if not used and (await cancel_and_wait(turn))[0] is True:
                self.lane.ended(self._size, "failed")

    def _return_turn(self, group: asyncio.Task[Ending]) -> None:
        assert self.lane is not None
        failed = group.cancelled() or group.exception() is not None
        self.lane.ended(self._size, "failed" if failed else group.result())

    async def _one(self, request: GroupRequest) -> Ending:
        bind_contextvars(group_id=request.group_id, env=request.env)
        with gathered() as traces:
            made = await self.context.make(request)
        if isinstance(made, Drop):
            await self._count(made)
            self._dropped(request, made)
            return "failed" if made.failed else "filtered"
        began = time.time()
        await self._deliver(made)
        rewards = {
            trajectory.rollout_id: trajectory.score.reward for trajectory in made.trajectories
        }
        for root, trace in traces:
            reward = rewards.get(root["envserver.rollout_id"])
            about = {"envserver.group_id": request.group_id}
            about |= {} if reward is None else evaluation("reward", reward)
            trace.past("store put", about, began, time.time())
        self._failed_in_a_row = self._dropped_in_a_row = 0
        self._works, self._bug = True, None
        self._reasons.clear()
        self.delivered += 1
        self.context.observer(GroupDelivered(group=made))
        return "delivered"

    async def _count(self, drop: Drop) -> None:
        """Stores the result for the curriculum; if the store fails, only an estimate is lost."""
        if drop.scored is None or self.counted is None:
            return
        try:
            await self.counted(drop.scored)
        except StoreError as error:
            log.warning("group.not_counted", group_id=drop.scored.group_id, error=str(error))

    def _dropped(self, request: GroupRequest, drop: Drop) -> None:
        self.context.observer(dropped(request, drop))
        if drop.reason == "untrained" and self.stop_on_failures:
            raise TooMuchUntrained(drop.message, hint=self.context.ceiling.hint())
        self._judge_bug(drop)
        self._dropped_in_a_row += 1
        self._failed_in_a_row = self._failed_in_a_row + 1 if drop.failed else 0
        self._reasons[drop.reason] += 1
        self._messages[drop.reason] = drop.message
        self._judge_waste()

    def _judge_waste(self) -> None:
        """Ends a run that only drops groups, and warns of a first few that were all dropped.

        A run whose first groups are all too long ends like one whose first groups all failed.
        """
        limits, dropped = self.context.rollouts, self._dropped_in_a_row
        reason, count = self._reasons.most_common(1)[0]
        none_yet = not self.delivered and dropped == limits.stop_after_failed_groups
        if self.stop_on_failures and (
            self._failed_in_a_row >= limits.stop_after_failed_groups
            or dropped >= limits.stop_after_dropped_groups
            or (none_yet and (reason, count) == ("too_long", dropped))
        ):
            raise self._all_failed()
        if none_yet:
            log.warning("groups.all_dropped", groups=dropped, most=self._cause())

    def check(self) -> None:
        if self._failed_in_a_row and not self._works:
            raise self._all_failed()

    def _all_failed(self) -> AllFailed:
        return AllFailed(
            f"The last {self._dropped_in_a_row} groups were all dropped, most of them as "
            f"{self._cause()}",
            hint="See the failures file for each rollout's cause.",
        )

    def _cause(self) -> str:
        reason, _ = self._reasons.most_common(1)[0]
        return f"{reason}: {self._messages[reason]}"

    def _judge_bug(self, drop: Drop) -> None:
        """Ends a run in which no group works yet: at the first group that lacks a library or a
        setting, at the second group with another bug (one task alone may be broken)."""
        self._works = self._works or not drop.failed
        if self._works or not drop.bug:
            self._bug = None
            return
        again = self._bug is not None
        self._bug = AllFailed(drop.message, hint="The failures file has the traceback.")
        if self.stop_on_failures and (again or drop.hopeless):
            raise self._bug

    async def _pause_after_failures(self) -> None:
        if self._failed_in_a_row and not self.stop_on_failures:
            seconds = retry_delay_seconds(self._failed_in_a_row, random.random())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._draining.wait(), seconds)

    async def _deliver(self, group: Group) -> None:
        """Puts `group` into the sink; a server retries forever, a file gets three attempts."""
        if (task := asyncio.current_task()) is not None:
            self._delivering.add(task)
            task.add_done_callback(self._delivering.discard)
        tries = 0
        while True:
            try:
                await self.sink.put(group)
            except StoreError as error:
                tries += 1
                if self.stop_on_failures and tries >= 3:
                    raise
                log.error("group.not_stored", group_id=group.group_id, error=str(error))
                await asyncio.sleep(retry_delay_seconds(tries, random.random()))
            else:
                return
