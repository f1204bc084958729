"""A clock that tests move."""

import time


class Clock:
    """Stands in for the module `time` where code asks for `time.monotonic()`.

    Args:
        ahead: seconds that are added to the real clock.
    """

    def __init__(self) -> None:
        self.ahead = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead

    def time(self) -> float:
        return time.time()
