"""Which replica of an engine serves a request.

A rollout sticks to one replica (rendezvous hash of its id) so that the engine's prefix cache serves
its later turns. A replica that refuses connections is set aside for a time that doubles with each
failure; then one request at a time tries it, and its first answer brings it back.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Collection, Sequence

_LONGEST_ASIDE_SECONDS = 30.0


class Replica:
    """One address of an engine.

    Args:
        url: with neither `/v1` nor a slash at its end, and without credentials.
        slots: bounds the calls in flight.
    """

    def __init__(self, url: str, max_in_flight: int, clock: Callable[[], float]) -> None:
        self.url = url
        self.slots = asyncio.Semaphore(max_in_flight)
        self._clock = clock
        self._failures = 0
        self._aside_until = 0.0
        self._trying = False

    @property
    def usable(self) -> bool:
        """Whether a request may go there now."""
        return not self._failures or (self._clock() >= self._aside_until and not self._trying)

    @property
    def aside_until(self) -> float:
        return self._aside_until

    def begin(self) -> None:
        """A request goes there now; `answered` or `unreachable` or `abandoned` must follow."""
        self._trying = self._failures > 0

    def answered(self) -> None:
        """It gave an HTTP answer, whatever its status."""
        self._failures, self._trying = 0, False

    def abandoned(self) -> None:
        """The request ended without telling anything about the replica."""
        self._trying = False

    def unreachable(self) -> None:
        """It took no connection: set it aside."""
        self._failures += 1
        # Bounded before it is a power: an engine may be away for thousands of requests.
        seconds = min(_LONGEST_ASIDE_SECONDS, 0.25 * 2.0 ** min(self._failures, 16))
        self._aside_until = self._clock() + seconds
        self._trying = False


class Replicas:
    """The addresses of one engine."""

    def __init__(
        self, urls: Sequence[str], max_in_flight: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.all = [Replica(url, max_in_flight, clock) for url in urls]

    def pick(self, rollout_id: str, avoid: Collection[Replica] = ()) -> Replica:
        """The best for `rollout_id`: usable and not to be avoided, if there is such a one."""
        if len(self.all) == 1:
            return self.all[0]
        ranked = sorted(self.all, key=lambda replica: _weight(rollout_id, replica.url))
        for replica in ranked:
            if replica.usable and replica not in avoid:
                return replica
        for replica in ranked:
            if replica.usable:
                return replica
        return min(ranked, key=lambda replica: (replica in avoid, replica.aside_until))

    def other_usable(self, avoid: Collection[Replica]) -> bool:
        """Whether some usable replica is not among `avoid`."""
        return any(replica.usable and replica not in avoid for replica in self.all)


def _weight(rollout_id: str, url: str) -> bytes:
    return hashlib.blake2b(f"{rollout_id}\0{url}".encode(), digest_size=8).digest()
