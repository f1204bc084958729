"""Who may begin how many groups: free places are dealt out by weight and minimum share.

Pure. In: how many further groups may be begun by all, and how many each could begin. Out: how many
each may. What holds: no more than are free, to none more than it could begin, all of them while
somebody could begin one; in the long run each has its share of the groups, as far as it can make
them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping

from ...rollouts.mixing import Share, Shares, targets

_STEP_SECONDS = 1.0


def fair_shares(shares: Iterable[Share]) -> Shares:
    """The clocks of those that share; minimum shares of more than 1 together are scaled to 1."""
    given = list(shares)
    total = sum(share.minimum for share in given)
    if total > 1:
        given = [Share(one.name, one.weight, one.minimum / total) for one in given]
    return Shares(targets(given))


def allot(
    free: int, wants: Mapping[str, int], shares: Shares, unused: Mapping[str, int] | None = None
) -> dict[str, int]:
    """How many further groups each may begin.

    Args:
        free: places for all of them.
        wants: how many each could begin now.
        shares: who is how far ahead; stays as it is.
        unused: places that some were dealt before and have not begun a group with: these count, so
            that one that begins nothing does not get all places.
    """
    clocks = copy.deepcopy(shares)
    dealt = dict.fromkeys(wants, 0)
    asking = {name for name, want in wants.items() if want > 0}
    for name in asking:
        clocks.asks(name)
    for name in asking:
        for _ in range((unused or {}).get(name, 0)):
            clocks.begin(name)
    for _ in range(free):
        if not asking:
            break
        name = clocks.next(asking)
        clocks.begin(name)
        dealt[name] += 1
        if dealt[name] == wants[name]:
            asking.discard(name)
    return dealt


class ExtraCapacity:
    """Groups that may be open beyond what may wait: none while trainers are the slower side.

    What is open and what waits is bounded together, so that nothing grows old in the queue. Where
    the queue stays nearly empty although all places are taken, and as many groups were begun as
    there are places, rollouts are long and not the trainers slow: then half as many more may be
    open.
    """

    def __init__(self) -> None:
        self._groups = 0
        self._begun = 0
        self._shrunk_at = float("-inf")

    def groups(self, waiting: int, most: int, used: int, begun: int, at: float) -> int:
        """How many now.

        Args:
            waiting, most: groups in the queue, and how many may be there.
            used: groups that are open.
            begun: groups that were ever begun.
            at: seconds, of any clock.
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
