"""The shares of the environments of a server, and how many groups may be open beyond the queue's
limit. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable

from ...rollouts.mixing import Share, Shares, targets

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
