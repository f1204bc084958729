"""Which version of the policy is published, and which rollouts in flight are too old for it.

In: attempts, while their agents run, and versions, as trainers publish them. Out: at most one
`Stale` for each. What holds: when `publish` has returned, no attempt that is watched goes on whose
oldest sampled token is further behind than it may be.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from envserver_records.errors import Stale

from ..proxy.attempts import ProxyAttempt
from .policy import is_stale


class StalenessMonitor:
    """Ends attempts that have become too old.

    Args:
        max_staleness: versions that their oldest token may be behind; None: they are left alone.
    """

    def __init__(self, max_staleness: int | None) -> None:
        self.version = -1
        """Published last; -1 before any."""
        self._most = max_staleness
        self._watched: dict[asyncio.Timeout, ProxyAttempt] = {}
        self._ended: dict[asyncio.Timeout, Stale] = {}

    def publish(self, version: int) -> None:
        """`version` is what trainers train on from now on; a lower one is a restart of theirs."""
        self.version = version
        now = asyncio.get_running_loop().time()
        for timeout, attempt in self._watched.items():
            oldest = attempt.oldest_version
            if timeout not in self._ended and is_stale(oldest, version, self._most):
                self._ended[timeout] = Stale(
                    f"Its first token is of version {oldest}, {version} is published.",
                    hint="See rollouts.max_staleness.",
                    oldest=oldest,
                    version=version,
                )
                timeout.reschedule(now)

    @asynccontextmanager
    async def watching(self, attempt: ProxyAttempt) -> AsyncIterator[None]:
        """Within: `attempt` is in flight.

        Raises:
            Stale: it has become too old; the block within was cancelled.
        """
        timeout = asyncio.timeout(None)
        try:
            async with timeout:
                self._watched[timeout] = attempt
                yield
        except TimeoutError:
            if timeout in self._ended:
                raise self._ended[timeout] from None
            raise
        finally:
            self._watched.pop(timeout, None)
            self._ended.pop(timeout, None)
