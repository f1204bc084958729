"""Token buckets: so many a second on average, and a burst at once."""

from __future__ import annotations


class Bucket:
    """A token bucket.

    Args:
        rate: tokens added per second.
        most: capacity; the bucket starts full.
        now: current time in seconds.
    """

    __slots__ = ("_at", "_level", "most", "rate")

    def __init__(self, rate: float, most: float, now: float) -> None:
        self.rate = rate
        self.most = most
        self._level = most
        self._at = now

    def wait_seconds(self, amount: float, now: float) -> float:
        """Returns the seconds until `amount` is available; 0 if it is. Takes nothing."""
        self._fill(now)
        return max(0.0, (amount - self._level) / self.rate)

    def take(self, amount: float, now: float) -> None:
        """Takes `amount`, even if the balance becomes negative; later requests then wait."""
        self._fill(now)
        self._level -= amount

    def _fill(self, now: float) -> None:
        self._level = min(self.most, self._level + max(0.0, now - self._at) * self.rate)
        self._at = now
