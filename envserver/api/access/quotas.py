"""Rate limits: requests and bytes per access token, and failed attempts per address.

Token buckets in memory. What holds: one state per access token and at most 4096 for addresses, so
memory use is limited; after a restart all buckets are full.
"""

from __future__ import annotations

import ipaddress
import math
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from envserver_records.errors import UsageError

from ...buckets import Bucket
from ...settings.server import Quota

_MEGABYTE: Final = 1_000_000
_MOST_ADDRESSES: Final = 4096
_FAILURES_AT_ONCE: Final = 20
_FAILURES_PER_SECOND: Final = 0.5


class TooManyRequests(UsageError):
    """Too many requests; `detail["retry_after_seconds"]` says when to retry."""

    kind, status = "too_many_requests", 429

    def __init__(self, message: str, seconds: float) -> None:
        super().__init__(message, retry_after_seconds=math.ceil(seconds))


class Usage:
    """Usage of the quota of one access token."""

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
        """Counts a request."""
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
        """Counts bytes of a body, sent or received."""
        if self._bytes is not None and size:
            self._bytes.take(size, self._clock())


class Usages:
    """Usage of all access tokens, by token id.

    Args:
        quota: for tokens without a quota of their own.
    """

    def __init__(self, quota: Quota, clock: Callable[[], float] = time.monotonic) -> None:
        self._quota = quota
        self._clock = clock
        self._known: OrderedDict[str, tuple[Quota | None, Usage]] = OrderedDict()

    def of(self, token_id: str, own: Quota | None) -> Usage:
        """Returns the usage of this token; it restarts when the token's own quota has changed."""
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
    """Limits requests without a valid token per address: 20 at once, then one every two seconds. An
    IPv6 /64 network counts as one address.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failures: OrderedDict[str, Bucket] = OrderedDict()

    def failed(self, address: str) -> None:
        """Counts a failed attempt.
        Raises TooManyRequests: there were too many from this address.
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
