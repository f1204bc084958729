"""Cancels rollouts in flight that have become too stale for the published policy version.

In: attempts, while their agents run, and versions, as trainers publish them. Out: at most one
`Stale` per attempt. What always holds: when `publish` has returned, every watched attempt whose
oldest sampled token exceeds the limit is being cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from envserver_records.errors import Stale

from ..proxy.attempts import ProxyAttempt
from .policy import is_stale


class StalenessMonitor:
    """Cancels attempts that are too stale.

    Args:
        max_staleness: versions that their oldest token may be behind; None: no limit.
    """

    def __init__(self, max_staleness: int | None) -> None:
        self.version = -1
        """The version published last; -1 before any."""
        self._most = max_staleness
        self._watched: dict[asyncio.Timeout, ProxyAttempt] = {}
        self._ended: dict[asyncio.Timeout, Stale] = {}

    def publish(self, version: int) -> None:
        """Notes that trainers now train `version`; a lower one means that they restarted."""
        self.version = version
        now = asyncio.get_running_loop().time()
        for timeout, attempt in self._watched.items():
            oldest = attempt.oldest_version
            if timeout not in self._ended and is_stale(oldest, version, self._most):
                self._ended[timeout] = Stale(
                    f"The first token is of version {oldest}, version {version} is published.",
                    hint="See rollouts.max_staleness.",
                    oldest=oldest,
                    version=version,
                )
                timeout.reschedule(now)

    @asynccontextmanager
    async def watching(self, attempt: ProxyAttempt) -> AsyncIterator[None]:
        """Watches `attempt` while the block runs.
        Raises Stale: the attempt became too stale and the block was cancelled.
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
