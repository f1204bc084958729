"""Limits of CPU time, for machines of any speed."""

import time
from typing import Final

_GOOD_SECONDS: Final = 0.0025
"""CPU seconds of `_work` on a fast machine."""


def cpu_limit(seconds: float) -> float:
    """CPU seconds on this machine, as it is now, for what `seconds` suffice for on a good one."""
    return seconds * max(1.0, max(_work() for _ in range(5)) / _GOOD_SECONDS)


def _work() -> float:
    began = time.thread_time()
    sum(n * n % 7 for n in range(50_000))
    return time.thread_time() - began
