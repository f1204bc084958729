"""Sends news to runners: policy versions, pauses, and how many groups each may have open.

Heartbeats wait until there is news for them. Dealing the places takes a small part of the time
however many runners there are."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

from starlette.types import Receive

from ..http.requests import Hangup
from ..proxy.gate import InFlight
from ..rollouts.scheduler import Share, Shares, targets
from ..store import Store
from ..store.demand import Demand, StoreSink
from .messages import ENGINES, NEXT_SECONDS, EngineList, Heartbeat, News, Pause
from .runner import Runner, RunnerTable, poll_seconds

_STEP_SECONDS = 1.0


def fair_shares(shares: Iterable[Share]) -> Shares:
    """Returns the clocks of the environments; scales minimum shares down to a sum of at most 1."""
    given = list(shares)
    total = sum(share.minimum for share in given)
    if total > 1:
        given = [Share(share.name, share.weight, share.minimum / total) for share in given]
    return Shares(targets(given))


class ExtraCapacity:
    """Number of groups that may be open beyond the queue's limit; 0 while trainers are the
    bottleneck.

    Open and waiting groups share one limit, so that groups do not grow old in the queue. If the
    queue stays nearly empty while all places are taken, and as many groups have begun as there are
    places, then rollouts are slow rather than the trainers, and half as many more may be open."""

    def __init__(self) -> None:
        self._groups = 0
        self._begun = 0
        self._shrunk_at = float("-inf")

    def groups(self, waiting: int, most: int, used: int, begun: int, at: float) -> int:
        """Returns the number of extra groups now. `waiting` groups are in the queue, at most
        `most`; `used` are open; `begun` since the start; `at`: seconds of any monotonic clock."""
        places = most + self._groups
        if waiting > most // 2:
            self._begun = begun
            if at - self._shrunk_at >= _STEP_SECONDS:
                self._shrunk_at = at
                self._groups //= 2
        elif waiting <= most // 4 and waiting + used >= places and begun - self._begun >= places:
            self._begun = begun
            self._groups += max(1, places // 2)
        return self._groups


_MOST_COUNTED: Final = 4096


class Participant(Protocol):
    """An environment that shares capacity: a runner, or one of the server itself."""

    @property
    def share(self) -> Share:
        """Its unique name, weight and minimum share."""

    @property
    def env(self) -> str:
        """Name of the environment whose groups it makes."""

    @property
    def open(self) -> int: ...

    @property
    def held(self) -> int:
        """Groups that it has open, or may open without asking again."""

    @property
    def capacity(self) -> int:
        """Number of groups it could have open."""


@dataclass(eq=False, repr=False)
class Deal:
    """How many groups each participant may have open. One deal serves all who ask, until the next.

    Args:
        targets: the fair number for each; all open groups and unused places are dealt anew.
        places: number of groups that may be open in total, by environment.
        held: groups that are open or may be opened without asking again, in total.
        idle: environments of which nothing is made: the first participant that asks may have one
            group open, however few places there are.
    """

    _targets: dict[str, int]
    _places: dict[str, int]
    _held: int
    _idle: set[str]

    def __contains__(self, name: str) -> bool:
        return name in self._targets

    def room(self, asking: Participant) -> int:
        """Returns how many groups `asking` may have open. What another may open without asking
        again is given to no other: its place becomes free when that one learns of a smaller number.
        """
        target = self._targets[asking.share.name]
        free = max(0, self._places[asking.env] - self._held + asking.held)
        least = 1 if asking.env in self._idle and asking.capacity else 0
        return max(asking.open, least, min(target, free))

    def grant(self, asking: Participant, room: int) -> None:
        self._held += max(room, asking.open) - asking.held
        if room:
            self._idle.discard(asking.env)


class SharedCapacity:
    """Capacity shared by all environments of a server. `stretches`: whether more groups may open
    when rollouts are slow (see `ExtraCapacity`); not used with a staleness limit."""

    def __init__(self, demand: Demand, *, stretches: bool = True) -> None:
        self._demand = demand
        self._stretches = stretches
        self._slack = ExtraCapacity()
        self._sharing: tuple[Share, ...] = ()
        self._names: frozenset[str] = frozenset()
        self._shares = fair_shares([Share("none")])
        self._reported: Counter[str] = Counter()
        self._begun = 0

    def deal(self, everyone: Sequence[Participant]) -> Deal:
        self._count(everyone)
        held, is_open = (
            sum(participant.held for participant in everyone),
            sum(participant.open for participant in everyone),
        )
        most = self._demand.max_waiting()
        idle = {
            env: self._demand.capacity_if_idle(env)
            for env in {participant.env for participant in everyone}
        }
        places = {free: free + self._extra(free, most, held) for free in set(idle.values())}
        wants = {
            participant.share.name: participant.capacity - participant.open
            for participant in everyone
        }
        dealt = {
            free: self._shares.upcoming(total - is_open, wants) for free, total in places.items()
        }
        return Deal(
            {
                participant.share.name: participant.open
                + dealt[idle[participant.env]][participant.share.name]
                for participant in everyone
            },
            {env: places[free] for env, free in idle.items()},
            held,
            {env for env, free in idle.items() if free > 0}
            - {participant.env for participant in everyone if participant.held},
        )

    def count_begun(self, name: str, groups: int) -> None:
        """Counts `groups` begun by `name`, which advances its clock in the fair queueing."""
        self._begun += max(0, groups)
        if name in self._names:
            for _ in range(min(groups, _MOST_COUNTED)):
                self._shares.begin(name)

    def wanted(self, env: str) -> int:
        """Returns how many groups of `env` trainers would have open, if none were."""
        return max(0, self._demand.capacity_if_idle(env))

    def report_to_demand(self, opened: Counter[str]) -> None:
        """Reports the groups in progress on other machines, by environment; groups of this process
        are counted where they are made."""
        for env in opened.keys() | self._reported.keys():
            if opened[env] != self._reported[env]:
                self._demand.opened(env, opened[env] - self._reported[env])
        self._reported = opened

    def _extra(self, free: int, most: int, held: int) -> int:
        if not self._stretches:
            return 0
        waiting, at = max(0, most - free), time.monotonic()
        return self._slack.groups(waiting, most, held, self._begun, at)

    def _count(self, everyone: Sequence[Participant]) -> None:
        """Resets the clocks when the set of participants or their shares has changed."""
        sharing = tuple(
            sorted((participant.share for participant in everyone), key=lambda share: share.name)
        )
        if sharing != self._sharing:
            self._sharing, self._shares = sharing, fair_shares(sharing)
            self._names = frozenset(share.name for share in sharing)


_LOOK_SECONDS: Final = 0.25
"""Seconds between checks whether there is room for a local environment, or a pause is complete."""
_LONGEST_UNSEEN_SECONDS: Final = 1.0
_SHORTEST_UNSEEN_SECONDS: Final = 0.02
"""Between two looks at what trainers have taken; the clocks of silence and of extra capacity move
by themselves."""
_FEW_PARTICIPANTS: Final = 50
_SECONDS_EACH: Final = 3e-5
"""A deal among more serves for so long per participant, about twenty times what it costs."""


class RunnerNews:
    def __init__(self, store: Store, runners: RunnerTable, shared: SharedCapacity) -> None:
        self._store = store
        self._runners = runners
        self.shared = shared
        self.local: list[LocalEnvironmentSink] = []
        self._version = -1
        self._pause: Pause | None = None
        self._engines = EngineList(id="")
        self._change = asyncio.Event()
        self._waiting: dict[asyncio.Future[News | None], tuple[Runner, Heartbeat]] = {}
        """Heartbeats that wait; None: no news came."""
        self._timer: asyncio.TimerHandle | None = None
        self._present = 0
        self._deal: Deal | None = None
        self._deal_at = self._deal_lasts = 0.0

    async def pause(self, in_flight: InFlight, timeout_seconds: float) -> bool:
        """Stops the runners' model calls until `resume`; returns whether all present runners
        confirmed (with "keep": that they start no new call). Silent runners stop by themselves."""
        self._pause = pause = Pause(id=secrets.token_hex(8), in_flight=in_flight)
        self.wake()
        end = time.monotonic() + timeout_seconds
        while not all(runner.beat.quiet == pause.id for runner in self._runners.present()):
            left = end - time.monotonic()
            if left <= 0 or self._pause is not pause:
                return False
            await self._changed(min(left, _LOOK_SECONDS))
            await asyncio.sleep(_SHORTEST_UNSEEN_SECONDS)  # many confirm at about the same time
        return True

    def resume(self) -> None:
        self._pause = None
        self.wake()

    def publish(self, version: int) -> None:
        self._version = version
        self.wake()

    def tell_engines(self, engines: EngineList) -> None:
        if engines.id != self._engines.id:
            self._engines = engines
            self.wake()

    def wake(self) -> None:
        self._change.set()
        self._change = asyncio.Event()
        if self._timer is None and self._waiting:
            seconds = max(0.0, self._deal_at + self._deal_lasts - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(seconds, self._look)

    async def run(self) -> None:
        """Looks for news whenever trainers have taken groups, until cancelled."""
        while True:
            seen = self._store.activity
            await self._store.wait_for_activity(_LONGEST_UNSEEN_SECONDS, since=seen)
            self.wake()
            await asyncio.sleep(_SHORTEST_UNSEEN_SECONDS)

    async def wait(
        self, runner: Runner, beat: Heartbeat, seconds: float, receive: Receive
    ) -> News | None:
        """Waits for news for a runner at most `seconds` long; None: there was none, or the client
        has disconnected. `receive`: of the request."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[News | None] = loop.create_future()
        self._waiting[answer] = runner, beat
        timer = loop.call_later(seconds, _answer, answer, None)
        try:
            async with Hangup(receive) as hangup:
                hangup.then(partial(_answer, answer, None))
                return await answer
        finally:
            timer.cancel()
            del self._waiting[answer]

    def end_waits(self, env_id: str) -> None:
        for answer, (runner, _) in self._waiting.items():
            if runner.id == env_id:
                _answer(answer, None)

    def _look(self) -> None:
        self._timer = None
        for answer, (runner, beat) in list(self._waiting.items()):
            if not answer.done() and self.is_new(runner, beat):
                _answer(answer, self.for_runner(runner))

    async def wait_for_local_capacity(self, local: LocalEnvironmentSink) -> None:
        """Waits until `local` may begin a group, given the shares of the runners."""
        runners = self._runners
        while any(map(runners.is_present, runners.known.values())):
            deal = self._current_deal(local)
            if deal.room(local) > local.open:
                deal.grant(local, local.open + 1)
                return
            await self._changed(_LOOK_SECONDS)

    def for_runner(self, runner: Runner) -> News:
        """Returns the news for a runner, which has from now on the room that they name."""
        deal = self._current_deal(runner)
        room = deal.room(runner)
        deal.grant(runner, room)
        runner.room = room
        if runner.understands(NEXT_SECONDS):
            shortest = self._runners.heartbeats.silent_after_seconds
            runner.poll_seconds = poll_seconds(self._present, shortest)
        return News(
            policy_version=self._version,
            pause=self._pause,
            room=room,
            drain=runner.drain,
            next_seconds=runner.poll_seconds or None,
            engines=self._engines if self._hears_engines(runner, runner.beat) else None,
        )

    def _hears_engines(self, runner: Runner, beat: Heartbeat) -> bool:
        if not runner.understands(ENGINES):
            return False
        seen = beat.seen.engines if beat.seen is not None else None
        return seen is None or seen.id != self._engines.id

    def is_new(self, runner: Runner, beat: Heartbeat) -> bool:
        seen = beat.seen
        if (
            seen is None
            or seen.policy_version != self._version
            or seen.drain != runner.drain
            or seen.pause != self._pause
            or self._hears_engines(runner, beat)
        ):
            return True
        if beat.open < seen.room:  # it has not used what it has
            return False
        return self._current_deal(runner).room(runner) > seen.room

    def _current_deal(self, asking: Participant) -> Deal:
        """Returns a deal in which `asking` takes part. With many runners, where dealing takes long,
        one deal serves for a while: dealing takes about a twentieth of the time at most.

        A silent runner counts for none; when it returns with its open groups, the limit is exceeded
        for a moment."""
        deal, name = self._deal, asking.share.name
        if deal is None or name not in deal or time.monotonic() >= self._deal_at + self._deal_lasts:
            everyone = self._everyone(asking)
            deal = self._deal = self.shared.deal(everyone)
            count = len(everyone)
            self._deal_lasts = _SECONDS_EACH * count if count > _FEW_PARTICIPANTS else 0.0
            self._deal_at = time.monotonic()
        return deal

    def _everyone(self, asking: Participant) -> list[Participant]:
        present = self._runners.present()
        self._present = len(present)
        opened: Counter[str] = Counter()
        for runner in present:
            opened[runner.env] += runner.open
        self.shared.report_to_demand(opened)
        for local in self.local:
            self.shared.count_begun(local.env, local.begun - local.counted)
            local.counted = local.begun
        everyone: list[Participant] = [*present, *self.local]
        names = {participant.share.name for participant in everyone}
        return everyone if asking.share.name in names else [*everyone, asking]

    def count_begun(self, runner: Runner, begun: int) -> None:
        """Counts groups begun since the last report; the first report only sets the base."""
        before = begun if runner.counted is None else runner.counted
        self.shared.count_begun(runner.name, begun - before)
        runner.counted = max(before, begun)

    async def _changed(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._change.wait()


def _answer(waiting: asyncio.Future[News | None], news: News | None) -> None:
    if not waiting.done():
        waiting.set_result(news)


class LocalEnvironmentSink(StoreSink):
    """The sink of an environment in the server's own process, which shares capacity with the
    runners. `prefix`: ID prefix of its groups; `capacity`: number of groups it can have open."""

    def __init__(
        self,
        store: Store,
        demand: Demand,
        news: RunnerNews,
        *,
        share: Share,
        prefix: str,
        capacity: int,
    ) -> None:
        super().__init__(store, share.name, demand)
        self.share, self.prefix, self.capacity = share, prefix, capacity
        self.env = share.name
        self.open = self.begun = self.counted = 0
        self._news = news
        news.local.append(self)

    @property
    def held(self) -> int:
        return self.open

    async def wait_for_capacity(self) -> None:
        await super().wait_for_capacity()
        await self._news.wait_for_local_capacity(self)

    def opened(self, groups: int) -> None:
        self.open += groups
        self.begun += max(0, groups)
        super().opened(groups)
