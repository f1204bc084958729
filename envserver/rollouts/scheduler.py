"""Runs the stream of groups: how many at once, when to stop, what to do if everything fails.

Group requests flow in, groups flow to the sink. Only as many groups are open as can fill the
rollout slots. A group that the sink already has is skipped; resuming needs nothing else.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Protocol

import structlog
from envserver_records.cancelling import cancel_and_wait
from envserver_records.errors import AllFailed, EnvserverError, StoreError, TooMuchUntrained
from envserver_records.records import Group
from structlog.contextvars import bind_contextvars

from ..environment import Environment
from ..settings.config import RolloutsConfig
from ..telemetry.genai import evaluation
from ..telemetry.tracing import gathered
from .estimates import Scored
from .events import GroupDelivered, GroupDropped, GroupSink, Observer
from .mixing import Ending, Lane
from .policy import Drop, UntrainedCeiling, retry_delay_seconds
from .stream import GroupRequest, read

log = structlog.get_logger()


class GroupMaker(Protocol):
    """Makes groups: with the parts of this process (`RolloutContext`), or elsewhere."""

    @property
    def environment(self) -> Environment: ...

    @property
    def rollouts(self) -> RolloutsConfig: ...

    @property
    def observer(self) -> Observer:
        """Gets the events of rollouts, and of groups."""
        ...

    @property
    def ceiling(self) -> UntrainedCeiling: ...

    async def make(self, request: GroupRequest) -> Group | Drop:
        """Returns the group, or why there is none."""
        ...


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

    def __init__(
        self,
        context: GroupMaker,
        requests: Iterator[GroupRequest],
        sink: GroupSink,
        *,
        wanted: int | None,
        stop_on_failures: bool,
        lane: Lane | None = None,
        opened: Callable[[int], object] | None = None,
        counted: Callable[[Scored], Awaitable[None]] | None = None,
    ) -> None:
        self._context = context
        self._requests = requests
        self._sink = sink
        self._wanted = wanted
        self._stop_on_failures = stop_on_failures
        self._lane = lane
        self._opened = opened
        self._counted = counted
        self._size = context.environment.config.group_size
        self._draining = asyncio.Event()
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
        """Number of groups in progress."""
        return len(self._open)

    @property
    def cut_off(self) -> int:
        """Number of groups cancelled together with `run`."""
        return sum(group.cancelled() for group in self._open)

    @property
    def drained(self) -> bool:
        """Whether `drain` was called."""
        return self._draining.is_set()

    def drain(self) -> None:
        """Starts no further group; `run` returns when the open ones are done."""
        self._draining.set()

    async def run(self) -> None:
        """Runs the stream to its end."""
        most = max(1, self._context.rollouts.max_concurrent // self._size) + 1
        try:
            while not self._draining.is_set() and self.delivered != self._wanted:
                await self._pause_after_failures()
                await self._until_fewer_than(most)
                if not self._is_wanting() or not await self._has_capacity():
                    continue
                request = await self._next_request()
                if request is None:
                    break
                if await self._sink.known([request.group_id]):
                    continue
                if not await self._has_turn():
                    break
                self._start(request)
            if self._lane is not None:
                self._lane.left()
            await self._until_fewer_than(1)
            if self._bug is not None and self._stop_on_failures:
                raise self._bug
        except EnvserverError:
            if self._stop_on_failures and self._delivering:
                # What is made is not lost to another's failure.
                await asyncio.wait(self._delivering)
            raise
        finally:
            if self._lane is not None:
                self._lane.left()
            await cancel_and_wait(*self._open)

    def _start(self, request: GroupRequest) -> None:
        group = asyncio.create_task(self._one(request), name=request.group_id)
        self._open.add(group)
        if self._opened is not None:
            opened = self._opened
            opened(1)
            group.add_done_callback(lambda _: opened(-1))
        if self._lane is not None:  # also of a group that is cancelled before its first step
            group.add_done_callback(self._return_turn)

    def _is_wanting(self) -> bool:
        return self._wanted is None or self.delivered + len(self._open) < self._wanted

    async def _until_fewer_than(self, most: int) -> None:
        self._reap()
        while len(self._open) >= most or (self._open and not self._is_wanting()):
            await asyncio.wait(self._open, return_when=asyncio.FIRST_COMPLETED)
            self._reap()

    def _reap(self) -> None:
        """Removes finished groups; raises the error of one that failed for good."""
        done = {task for task in self._open if task.done()}
        self._open -= done
        errors = [error for task in done if (error := task.exception()) is not None]
        if errors:
            raise errors[0]

    async def _has_capacity(self) -> bool:
        """Waits until the sink has capacity; False if the run is drained meanwhile."""
        room = asyncio.create_task(self._sink.wait_for_capacity())
        drain = asyncio.create_task(self._draining.wait())
        try:
            await asyncio.wait({room, drain, *self._open}, return_when=asyncio.FIRST_COMPLETED)
            if room.done():
                room.result()
            return room.done() and not drain.done()
        finally:
            await cancel_and_wait(room, drain)

    async def _next_request(self) -> GroupRequest | None:
        """Returns the next request; None after the last, or if the run is drained meanwhile."""
        reading = read(self._requests)
        drain = asyncio.create_task(self._draining.wait())
        try:
            first: set[asyncio.Future[Any]] = {reading, drain}
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            return None if drain.done() else reading.result()
        finally:
            await cancel_and_wait(reading, drain)

    async def _has_turn(self) -> bool:
        """Waits for the turn of the next group; False if none is wanted or the run is drained."""
        if self._lane is None:
            return True
        turn = asyncio.create_task(self._lane.take(self._size))
        drain = asyncio.create_task(self._draining.wait())
        used = False
        try:
            first: set[asyncio.Future[Any]] = {turn, drain}
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            used = not drain.done()
            return used and turn.result()
        finally:
            given, _ = await cancel_and_wait(turn, drain)
            if given is True and not used:
                self._lane.ended(self._size, "failed")

    def _return_turn(self, group: asyncio.Task[Ending]) -> None:
        assert self._lane is not None
        failed = group.cancelled() or group.exception() is not None
        self._lane.ended(self._size, "failed" if failed else group.result())

    async def _one(self, request: GroupRequest) -> Ending:
        bind_contextvars(group_id=request.group_id, env=request.env)
        with gathered() as traces:
            made = await self._context.make(request)
        if isinstance(made, Drop):
            await self._count(made)
            self._dropped(request, made)
            return "failed" if made.failed else "filtered"
        began = time.time()
        await self._deliver(made)
        rewards = {one.rollout_id: one.score.reward for one in made.trajectories}
        for root, trace in traces:
            reward = rewards.get(root["envserver.rollout_id"])
            about = {"envserver.group_id": request.group_id}
            about |= {} if reward is None else evaluation("reward", reward)
            trace.past("store put", about, began, time.time())
        self._failed_in_a_row = self._dropped_in_a_row = 0
        self._works, self._bug = True, None
        self._reasons.clear()
        self.delivered += 1
        self._context.observer(GroupDelivered(group=made))
        return "delivered"

    async def _count(self, drop: Drop) -> None:
        """Stores the result for the curriculum; if the store fails, only an estimate is lost."""
        if drop.scored is None or self._counted is None:
            return
        try:
            await self._counted(drop.scored)
        except StoreError as error:
            log.warning("group.not_counted", group_id=drop.scored.group_id, error=str(error))

    def _dropped(self, request: GroupRequest, drop: Drop) -> None:
        self._context.observer(
            GroupDropped(
                group_id=request.group_id,
                index=request.index,
                task_id=request.task.id,
                reason=drop.reason,
                failed=drop.failed,
                message=drop.message,
                at=time.time(),
                scored=drop.scored,
                alike=drop.alike,
            )
        )
        if drop.reason == "untrained" and self._stop_on_failures:
            raise TooMuchUntrained(drop.message, hint=self._context.ceiling.hint())
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
        limits, dropped = self._context.rollouts, self._dropped_in_a_row
        reason, count = self._reasons.most_common(1)[0]
        none_yet = not self.delivered and dropped == limits.stop_after_failed_groups
        if self._stop_on_failures and (
            self._failed_in_a_row >= limits.stop_after_failed_groups
            or dropped >= limits.stop_after_dropped_groups
            or (none_yet and (reason, count) == ("too_long", dropped))
        ):
            raise self._all_failed()
        if none_yet:
            log.warning("groups.all_dropped", groups=dropped, most=self._cause())

    def check(self) -> None:
        """Raises AllFailed if there were groups and all of them failed."""
        if self._failed_in_a_row and not self._works:
            raise self._all_failed()

    def _all_failed(self) -> AllFailed:
        return AllFailed(
            f"The last {self._dropped_in_a_row} groups were all dropped, most of them as "
            f"{self._cause()}",
            hint="See the failures file for each rollout's cause.",
        )

    def _cause(self) -> str:
        """The commonest reason of the dropped groups, with the message of the last of them."""
        reason, _ = self._reasons.most_common(1)[0]
        return f"{reason}: {self._messages[reason]}"

    def _judge_bug(self, drop: Drop) -> None:
        """Ends a run in which no group works yet: at the first group that lacks a library or a
        setting, at the second group with another bug (one task alone may be broken).
        """
        self._works = self._works or not drop.failed
        if self._works or not drop.bug:
            self._bug = None
            return
        again = self._bug is not None
        self._bug = AllFailed(drop.message, hint="The failures file has the traceback.")
        if self._stop_on_failures and (again or drop.hopeless):
            raise self._bug

    async def _pause_after_failures(self) -> None:
        if self._failed_in_a_row and not self._stop_on_failures:
            seconds = retry_delay_seconds(self._failed_in_a_row, random.random())
            pause = asyncio.create_task(self._draining.wait())
            await asyncio.wait({pause}, timeout=seconds)
            pause.cancel()

    async def _deliver(self, group: Group) -> None:
        """Puts `group` into the sink; a server retries forever, a file gets three attempts."""
        if (task := asyncio.current_task()) is not None:
            self._delivering.add(task)
            task.add_done_callback(self._delivering.discard)
        tries = 0
        while True:
            try:
                await self._sink.put(group)
            except StoreError as error:
                tries += 1
                if self._stop_on_failures and tries >= 3:
                    raise
                log.error("group.not_stored", group_id=group.group_id, error=str(error))
                await asyncio.sleep(retry_delay_seconds(tries, random.random()))
            else:
                return
