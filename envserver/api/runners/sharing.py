"""Shares the capacity for groups among all environments of a server, local and on other machines.

In: what trainers want (`store.demand`), and the groups that each environment has open and could
have open. Out: a deal: how many groups each may have open. What holds: no more groups are allowed
than trainers want, but for one of an environment that makes nothing; nobody gets more than it can
make; no place stays free while somebody could use it; in the long run each environment gets its
share of the groups, as far as it can make them.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import msgspec

from ...rollouts.mixing import Share, Shares, targets
from ...store.demand import Demand

_STEP_SECONDS = 1.0


def fair_shares(shares: Iterable[Share]) -> Shares:
    """Returns the clocks of the environments; scales minimum shares down to a sum of at most 1."""
    given = list(shares)
    total = sum(share.minimum for share in given)
    if total > 1:
        given = [Share(one.name, one.weight, one.minimum / total) for one in given]
    return Shares(targets(given))


class ExtraCapacity:
    """Number of groups that may be open beyond the queue's limit; 0 while trainers are the
    bottleneck.

    Open and waiting groups share one limit, so that groups do not grow old in the queue. If the
    queue stays nearly empty while all places are taken, and as many groups have begun as there are
    places, then rollouts are slow rather than the trainers, and half as many more may be open.
    """

    def __init__(self) -> None:
        self._groups = 0
        self._begun = 0
        self._shrunk_at = float("-inf")

    def groups(self, waiting: int, most: int, used: int, begun: int, at: float) -> int:
        """Returns the number of extra groups now.

        Args:
            waiting: groups in the queue.
            most: maximum number of groups in the queue.
            used: open groups.
            begun: groups begun since the start.
            at: time in seconds, of any monotonic clock.
        """
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
"""Maximum number of groups counted as begun at a time."""


class Participant(msgspec.Struct, frozen=True):
    """An environment that shares capacity.

    Args:
        share: its unique name, weight and minimum share.
        env: name of the environment whose groups it makes.
        open: groups that it has open.
        held: groups that it has open, or may open without asking again.
        capacity: number of groups it could have open.
    """

    share: Share
    env: str
    open: int
    held: int
    capacity: int

    @property
    def name(self) -> str:
        return self.share.name


class LocalEnvironment(msgspec.Struct, frozen=True):
    """An environment in the server's own process.

    Args:
        prefix: ID prefix of its groups.
        share: its share, with the name of the environment.
        capacity: number of groups it can have open.
        open_groups, begun: functions that count the groups open now and begun since the start.
    """

    prefix: str
    share: Share
    capacity: int
    open_groups: Callable[[], int]
    begun: Callable[[], int]

    def participant(self) -> Participant:
        """Returns its current state."""
        is_open = self.open_groups()
        return Participant(self.share, self.share.name, is_open, is_open, self.capacity)


class Deal:
    """How many groups each participant may have open. One deal serves all who ask, until the next.

    Args:
        targets: the fair number for each; all open groups and unused places are dealt anew.
        places: number of groups that may be open in total, by environment.
        held: groups that are open or may be opened without asking again, in total.
        idle: environments of which nothing is made: the first participant that asks may have one
            group open, however few places there are.
    """

    def __init__(
        self, targets: dict[str, int], places: dict[str, int], held: int, idle: set[str]
    ) -> None:
        self._targets = targets
        self._places = places
        self._held = held
        self._idle = idle

    def __contains__(self, name: str) -> bool:
        return name in self._targets

    def room(self, asking: Participant) -> int:
        """Returns how many groups `asking` may have open. What another may open without asking
        again is given to nobody else: its place becomes free when that one is told of a smaller
        number.
        """
        target = self._targets[asking.name]
        free = max(0, self._places[asking.env] - self._held + asking.held)
        least = 1 if asking.env in self._idle and asking.capacity else 0
        return max(asking.open, least, min(target, free))

    def grant(self, asking: Participant, room: int) -> None:
        """Notes that `asking` was told of `room`."""
        self._held += max(room, asking.open) - asking.held
        if room:
            self._idle.discard(asking.env)


class SharedCapacity:
    """Capacity shared by all environments of a server.

    Args:
        stretches: whether more groups may open when rollouts are slow (see `ExtraCapacity`);
            not used with a staleness limit.
    """

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
        """Deals all places among `everyone`, at least one."""
        self._count(everyone)
        held, is_open = sum(one.held for one in everyone), sum(one.open for one in everyone)
        most = self._demand.max_waiting()
        idle = {env: self._demand.capacity_if_idle(env) for env in {one.env for one in everyone}}
        places = {free: free + self._extra(free, most, held) for free in set(idle.values())}
        wants = {one.name: one.capacity - one.open for one in everyone}
        dealt = {
            free: self._shares.upcoming(total - is_open, wants) for free, total in places.items()
        }
        return Deal(
            {one.name: one.open + dealt[idle[one.env]][one.name] for one in everyone},
            {env: places[free] for env, free in idle.items()},
            held,
            {env for env, free in idle.items() if free > 0}
            - {one.env for one in everyone if one.held},
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

    def report_to_demand(self, elsewhere: Counter[str]) -> None:
        """Reports the groups in progress on other machines, by environment; groups of this process
        are counted where they are made.
        """
        for env in elsewhere.keys() | self._reported.keys():
            if elsewhere[env] != self._reported[env]:
                self._demand.opened(env, elsewhere[env] - self._reported[env])
        self._reported = elsewhere

    def _extra(self, free: int, most: int, held: int) -> int:
        if not self._stretches:
            return 0
        waiting, at = max(0, most - free), time.monotonic()
        return self._slack.groups(waiting, most, held, self._begun, at)

    def _count(self, everyone: Sequence[Participant]) -> None:
        """Resets the clocks when the set of participants or their shares has changed."""
        sharing = tuple(sorted((one.share for one in everyone), key=lambda share: share.name))
        if sharing != self._sharing:
            self._sharing, self._shares = sharing, fair_shares(sharing)
            self._names = frozenset(share.name for share in sharing)
