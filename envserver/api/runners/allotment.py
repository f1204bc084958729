"""Decides who may begin how many groups: free places are dealt by weight and minimum share.

Pure. In: how many more groups may be begun in total, and how many each environment could begin.
Out: how many each may begin. What holds: the total is never exceeded; nobody gets more than it
could begin; no place stays unused while somebody could use it; in the long run each environment
gets its share of the groups, as far as it can make them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping

from ...rollouts.mixing import Share, Shares, targets

_STEP_SECONDS = 1.0


def fair_shares(shares: Iterable[Share]) -> Shares:
    """Returns the clocks of the environments; scales minimum shares down to a sum of at most 1."""
    given = list(shares)
    total = sum(share.minimum for share in given)
    if total > 1:
        given = [Share(one.name, one.weight, one.minimum / total) for one in given]
    return Shares(targets(given))


def allot(
    free: int, wants: Mapping[str, int], shares: Shares, unused: Mapping[str, int] | None = None
) -> dict[str, int]:
    """Returns how many more groups each environment may begin.

    Args:
        free: free places in total.
        wants: how many groups each could begin now.
        shares: the clocks of fair queueing; not changed.
        unused: places that were dealt earlier and are still without a group. They count, so that
            an environment that begins nothing does not collect all places.
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
