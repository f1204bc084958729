"""Statistics of an open store: commits and leases since it was opened."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Final

from ..telemetry.numbers import SHORT_SECONDS, Distribution
from .rows import Lease

_SIZES: Final = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0)


class StoreStatistics:
    """Counts commits and leases.

    Args:
        commit_seconds: seconds of each transaction, from its first statement until it is durable.
        commit_sizes: operations in each commit.
        leases: number of leases that were leased, acked, nacked.
        on_lease: called with each lease that is handed out.
    """

    def __init__(self) -> None:
        self.commit_seconds = Distribution(SHORT_SECONDS)
        self.commit_sizes = Distribution(_SIZES)
        self.leases: Counter[str] = Counter()
        self.on_lease: Callable[[Lease], None] | None = None

    def committed(self, operations: int, seconds: float) -> None:
        """Counts one commit."""
        self.commit_seconds.add(seconds)
        self.commit_sizes.add(operations)

    def leased(self, lease: Lease | None) -> Lease | None:
        """Counts `lease` unless it is None, and returns it."""
        if lease is not None:
            self.leases["leased"] += 1
            if self.on_lease is not None:
                self.on_lease(lease)
        return lease
