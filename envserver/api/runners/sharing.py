"""The room for groups, shared by all environments of a server, here and on other machines.

In: what trainers want (`store.demand`), and what each environment has open and could have. Out: how
many groups one of them may have open.
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
"""Groups that count as begun at a time."""


class Participant(msgspec.Struct, frozen=True):
    """One that shares.

    Args:
        share: its name, unique among them, its weight and minimum share.
        env: what it makes groups of.
        held: groups that it has open, or may open without asking again.
        capacity: that it could have open.
        unused: places that it holds and has no open group for.
    """

    share: Share
    env: str
    held: int
    capacity: int
    unused: int = 0


class LocalEnvironment(msgspec.Struct, frozen=True):
    """An environment of the server's own process.

    Args:
        prefix: with which the ids of its groups begin.
        share: named as the environment.
        capacity: groups that it can have open.
        open_groups, begun: that it has open now, and ever began.
    """

    prefix: str
    share: Share
    capacity: int
    open_groups: Callable[[], int]
    begun: Callable[[], int]

    def holder(self) -> Participant:
        """As it is now."""
        return Participant(self.share, self.share.name, self.open_groups(), self.capacity)


class SharedCapacity:
    """See the module.

    Args:
        stretches: see `rooms.ExtraCapacity`; not where a group may be only so many versions old.
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
        """Groups that `asking` may have open: those that it has (`held`), and its part of what is
        free.

        A place that another one may take without asking again is not free. An environment of which
        nothing waits and nothing is made may always begin one.
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
        """`name` has begun so many: it is so far ahead of the others."""
        self._begun += max(0, groups)
        if any(share.name == name for share in self._sharing):
            for _ in range(min(groups, _MOST_COUNTED)):
                self._shares.begin(name)

    def report_to_demand(self, elsewhere: Counter[str]) -> None:
        """By environment the groups that are being made on other machines: those of this process
        count them, too."""
        for env in elsewhere.keys() | self._reported.keys():
            if elsewhere[env] != self._reported[env]:
                self._demand.opened(env, elsewhere[env] - self._reported[env])
        self._reported = elsewhere

    def _count(self, everyone: Sequence[Participant]) -> None:
        """The clocks begin anew when others share than before."""
        sharing = tuple(sorted((one.share for one in everyone), key=lambda share: share.name))
        if sharing != self._sharing:
            self._sharing, self._shares = sharing, fair_shares(sharing)
