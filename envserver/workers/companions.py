"""A companion: a small process in the sandbox of a worker, beside the worker itself.

It is forked from a Python that has imported hardly more than the module of its function
(`Environment.companion`, `workers.lean`), and has none of the worker's memory.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct

READY = b"\0"
"""The worker sends it when its namespaces can be joined, and the companion when it has joined."""
STATUS = struct.Struct("i")


class Companion:
    """The worker's side. `channel`: the function's argument is the other end; `status`: a pipe on
    which its parent tells how it ended."""

    def __init__(self, function: str, channel: socket.socket, status: int) -> None:
        self.function = function
        self.channel = channel
        self._status = status

    @property
    def descriptors(self) -> set[int]:
        return {self.channel.fileno(), self._status}

    def let_in(self) -> None:
        """Tells it that the worker's namespaces are ready; the worker calls this once."""
        with contextlib.suppress(BrokenPipeError):  # it has ended; `joined` says so
            self.channel.send(READY)

    def joined(self) -> bool:
        """Waits until it is as confined as the worker, and returns whether it is."""
        try:
            return self.channel.recv(1) == READY
        except ConnectionResetError:  # it ended before it heard that it may come in
            return False

    def close(self) -> None:
        self.channel.close()
        os.close(self._status)

    def is_alive(self) -> bool:
        poll = select.poll()
        poll.register(self.channel, 0)  # POLLHUP comes unasked
        return not poll.poll(0)

    def has_ended(self) -> bool:
        poll = select.poll()
        poll.register(self._status, select.POLLIN)
        return bool(poll.poll(0))

    def wait(self) -> int:
        """Waits for its end, then closes this side; returns its status, as waitpid(2) does."""
        report = os.read(self._status, STATUS.size)
        self.close()
        return int(STATUS.unpack(report)[0]) if report else 1 << 8


_given: list[Companion] = []


def give_companion(companion: Companion) -> None:
    _given.append(companion)


def take_companion(function: str) -> Companion | None:
    """Returns the companion of this process that runs `function` ("module:name"), once; None if
    there is none, or it has died."""
    if not _given or _given[0].function != function:
        return None
    companion = _given.pop()
    if companion.is_alive():
        return companion
    companion.close()
    return None
