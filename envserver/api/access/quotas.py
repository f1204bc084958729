"""How often: what each access token may ask for in a time, and how often a stranger may fail.

Token buckets in memory. What holds: one state for each access token and at most 4096 for addresses,
so nobody fills the memory; a server that starts again begins with full buckets.
"""

from __future__ import annotations

import ipaddress
import math
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from envserver_records.errors import UsageError

from ...config import Quota

_MEGABYTE: Final = 1_000_000
_MOST_ADDRESSES: Final = 4096
_FAILURES_AT_ONCE: Final = 20
_FAILURES_PER_SECOND: Final = 0.5


class TooManyRequests(UsageError):
    """`detail["retry_after_seconds"]` says when to come again."""

    kind, status = "too_many_requests", 429

    def __init__(self, message: str, seconds: float) -> None:
        super().__init__(message, retry_after_seconds=math.ceil(seconds))


class Bucket:
    """So much at once, and so much a second.

    Args:
        rate: per second.
        most: what is in it when it is full, as it is at first.
        now: seconds.
    """

    __slots__ = ("_at", "_level", "most", "rate")

    def __init__(self, rate: float, most: float, now: float) -> None:
        self.rate = rate
        self.most = most
        self._level = most
        self._at = now

    def wait_seconds(self, amount: float, now: float) -> float:
        """How long until `amount` is there; 0: it is. Nothing is taken."""
        self._fill(now)
        return max(0.0, (amount - self._level) / self.rate)

    def take(self, amount: float, now: float) -> None:
        """Takes what has been used, even more than is there: what comes next waits for it."""
        self._fill(now)
        self._level -= amount

    def _fill(self, now: float) -> None:
        self._level = min(self.most, self._level + max(0.0, now - self._at) * self.rate)
        self._at = now


class Usage:
    """What one access token has used of its quota."""

    def __init__(self, quota: Quota, clock: Callable[[], float] = time.monotonic) -> None:
        self._quota = quota
        self._clock = clock
        self._requests = self._bytes = None
        now = clock()
        if quota.requests_per_second is not None:
            self._requests = Bucket(quota.requests_per_second, quota.burst, now)
        if quota.megabytes_per_minute is not None:
            a_minutes = quota.megabytes_per_minute * _MEGABYTE
            self._bytes = Bucket(a_minutes / 60, a_minutes, now)
        self.open_streams = 0

    def begin(self, *, is_stream: bool) -> None:
        """Counts a request.

        Raises:
            TooManyRequests: the quota is used up; then nothing was counted.
        """
        now = self._clock()
        if self._bytes is not None and (wait := self._bytes.wait_seconds(1, now)):
            raise TooManyRequests("This access token has moved as many bytes as it may.", wait)
        if self._requests is not None:
            if wait := self._requests.wait_seconds(1, now):
                raise TooManyRequests("This access token asks too often.", wait)
            self._requests.take(1, now)
        if is_stream:
            most = self._quota.open_streams
            if most is not None and self.open_streams >= most:
                raise TooManyRequests(f"This access token has {most} open streams already.", 1)
            self.open_streams += 1

    def end_stream(self) -> None:
        self.open_streams -= 1

    def moved(self, size: int) -> None:
        """Counts bytes of a body, in any direction."""
        if self._bytes is not None and size:
            self._bytes.take(size, self._clock())


class Usages:
    """Of all access tokens, by their id.

    Args:
        quota: of those that have none of their own.
    """

    def __init__(self, quota: Quota, clock: Callable[[], float] = time.monotonic) -> None:
        self._quota = quota
        self._clock = clock
        self._known: OrderedDict[str, tuple[Quota | None, Usage]] = OrderedDict()

    def of(self, token_id: str, own: Quota | None) -> Usage:
        """What this token has used; it begins anew when its own quota was changed."""
        known = self._known.get(token_id)
        if known is None or known[0] != own:
            quota = self._quota
            if own is not None:
                quota = quota.model_copy(update=own.model_dump(exclude_unset=True))
            known = self._known[token_id] = (own, Usage(quota, self._clock))
            if len(self._known) > _MOST_ADDRESSES:
                self._known.popitem(last=False)
        return known[1]


class Strangers:
    """How often requests of an address came without a good token: 20 at once, then one in two
    seconds. Of IPv6 a network of 2^64 addresses counts as one.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failures: OrderedDict[str, Bucket] = OrderedDict()

    def failed(self, address: str) -> None:
        """Counts a failure.

        Raises:
            TooManyRequests: there were too many from there.
        """
        now = self._clock()
        place = _network(address)
        bucket = self._failures.pop(place, None)
        if bucket is None:
            bucket = Bucket(_FAILURES_PER_SECOND, _FAILURES_AT_ONCE, now)
            if len(self._failures) >= _MOST_ADDRESSES:
                self._failures.popitem(last=False)
        self._failures[place] = bucket
        if wait := bucket.wait_seconds(1, now):
            raise TooManyRequests("Too many requests from here without a good token.", wait)
        bucket.take(1, now)


def _network(address: str) -> str:
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return ""
    if found.version == 4 or found.ipv4_mapped:
        return str(found)
    return str(ipaddress.ip_network((found, 64), strict=False))
