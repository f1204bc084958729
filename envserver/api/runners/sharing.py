"""Shares the capacity for groups among all environments of a server, local and on other machines.

In: what trainers want (`store.demand`), and the groups that each environment has open and could
have open. Out: how many groups an environment may have open.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from ...rollouts.mixing import Share
from ...store.demand import Demand
from .allotment import ExtraCapacity, allot, fair_shares

_MOST_COUNTED: Final = 4096
"""Maximum number of groups counted as begun at a time."""


class Participant(msgspec.Struct, frozen=True):
    """An environment that shares capacity.

    Args:
        share: its unique name, weight and minimum share.
        env: name of the environment whose groups it makes.
        held: groups that it has open, or may open without asking again.
        capacity: number of groups it could have open.
        unused: places that it holds without an open group.
    """

    share: Share
    env: str
    held: int
    capacity: int
    unused: int = 0


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

    def holder(self) -> Participant:
        """Returns its current state as a participant."""
        return Participant(self.share, self.share.name, self.open_groups(), self.capacity)


class SharedCapacity:
    """Capacity shared by all environments of a server.

    Args:
        stretches: whether more groups may open when rollouts are slow (see
            `allotment.ExtraCapacity`); not used with a staleness limit.
    """

    def __init__(self, demand: Demand, *, stretches: bool = True) -> None:
        self._demand = demand
        self._stretches = stretches
        self._slack = ExtraCapacity()
        self._sharing: tuple[Share, ...] = ()
        self._shares = fair_shares([Share("none")])
        self._reported: Counter[str] = Counter()
        self._begun = 0

    def room(self, asking: Participant, others: Sequence[Participant]) -> int:
        """Returns how many groups `asking` may have open: those it holds, plus its part of the
        free places.

        A place that another participant may take without asking again is not free. An environment
        with no group waiting or in progress may always begin one.
        """
        everyone = [*others, asking]
        used = sum(one.held for one in everyone)
        free, most = self._demand.capacity_if_idle(asking.env), self._demand.max_waiting()
        if self._stretches:
            waiting, at = max(0, most - free), time.monotonic()
            free += self._slack.groups(waiting, most, used, self._begun, at)
        wants = {one.share.name: one.capacity - one.held for one in everyone}
        self._count(everyone)
        unused = {one.share.name: one.unused for one in everyone}
        dealt = allot(max(0, free - used), wants, self._shares, unused)[asking.share.name]
        nothing_is_made = not any(one.held for one in everyone if one.env == asking.env)
        if (
            not dealt
            and asking.capacity
            and nothing_is_made
            and self._demand.capacity_if_idle(asking.env) > 0
        ):
            dealt = 1
        return asking.held + dealt

    def count_begun(self, name: str, groups: int) -> None:
        """Counts `groups` begun by `name`, which advances its clock in the fair queueing."""
        self._begun += max(0, groups)
        if any(share.name == name for share in self._sharing):
            for _ in range(min(groups, _MOST_COUNTED)):
                self._shares.begin(name)

    def report_to_demand(self, elsewhere: Counter[str]) -> None:
        """Reports the groups in progress on other machines, by environment; groups of this process
        are counted where they are made.
        """
        for env in elsewhere.keys() | self._reported.keys():
            if elsewhere[env] != self._reported[env]:
                self._demand.opened(env, elsewhere[env] - self._reported[env])
        self._reported = elsewhere

    def _count(self, everyone: Sequence[Participant]) -> None:
        """Resets the clocks when the set of participants or their shares has changed."""
        sharing = tuple(sorted((one.share for one in everyone), key=lambda share: share.name))
        if sharing != self._sharing:
            self._sharing, self._shares = sharing, fair_shares(sharing)
