"""Runs one program in a sandbox, from its fork to the end of every process that it started.

In: a Program, its input, the backend. Out: a record of how it ended and what it used. While it
runs, its usage is sampled every few milliseconds; the first limit that it exceeds ends it.
Afterwards all processes left are killed, so that nothing runs between two programs.
"""

from __future__ import annotations

import os
import resource
import select
import signal
import socket
import time
from collections.abc import Callable

from . import linux
from .accounts import Accounts, Totals
from .backend import Backend
from .program import MB, Program, become
from .sampling import sample

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

FIRST_LOOK_SECONDS = 0.005
LOOK_SECONDS = 0.025
OUTPUT_KILL_FACTOR = 8
"""Multiple of the kept output at which a writing program is killed; before, it is dropped."""
_READ_BYTES = 65536
_DRAIN_SECONDS = 1.0


class _Output:
    """The output of one pipe: keeps the beginning and counts the rest."""

    def __init__(self, keep: int) -> None:
        self.reading, self.writing = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self.reading, False)
        self.kept = bytearray()
        self.total = 0
        self._keep = keep

    def take(self) -> bool:
        """Reads the available output; False at its end."""
        try:
            data = os.read(self.reading, _READ_BYTES)
        except BlockingIOError:
            return True
        self.total += len(data)
        self.kept += data[: max(0, self._keep - len(self.kept))]
        return bool(data)


class Execution:
    """Runs `program` once; its usage is added to `totals`.

    Args:
        stdin: the program's input, or a socket for its input and output.
    """

    def __init__(
        self,
        program: Program,
        stdin: bytes | socket.socket,
        backend: Backend,
        accounts: Accounts,
        totals: Totals,
    ) -> None:
        self._program = program
        self._limits = program.limits
        self._stdin = stdin
        self._backend = backend
        self._totals = totals
        self._used = Totals(executions=1)
        self._killed_by = ""
        self._accounts = accounts
        self._cpu_before = accounts.cpu_seconds()
        self._io_before = accounts.bytes_moved()
        self._peaks_before = accounts.peak_memory(), accounts.peak_tasks()
        self._kills_before = accounts.memory_kills()

    def cancel(self) -> None:
        """Lets `run` end the program at once."""
        self._killed_by = "cancelled"

    def run(self, channel: int, asked_to_cancel: Callable[[], bool]) -> dict[str, Any]:
        """Runs the program until it and all processes that it started have ended.

        Args:
            channel: a descriptor; when it becomes readable, `asked_to_cancel` is called.
        """
        keep = int(self._limits["output_kb"]) * 1024
        self._outputs = [_Output(keep), _Output(keep)]
        began = time.monotonic()
        pid = self._fork()
        pidfd = os.pidfd_open(pid)
        try:
            self._watch(pid, pidfd, began, channel, asked_to_cancel)
        finally:
            os.close(pidfd)
            if self._killed_by:
                os.kill(pid, signal.SIGKILL)
        status, usage = self._bury(pid)
        self._used.wall_seconds = time.monotonic() - began
        return self._record(status, usage)

    def _fork(self) -> int:
        out, error = self._outputs
        if isinstance(self._stdin, bytes):
            stdin, stdout = _readable(self._stdin), out.writing
        else:
            stdin = stdout = self._stdin.detach()
        pid = os.fork()
        if pid == 0:
            become(self._program, (stdin, stdout, error.writing), self._backend.enclose)
        os.close(stdin)
        for output in self._outputs:
            os.close(output.writing)
        return pid

    def _watch(
        self,
        pid: int,
        pidfd: int,
        began: float,
        channel: int,
        asked_to_cancel: Callable[[], bool],
    ) -> None:
        """Waits until the program has ended or must be killed."""
        poll = select.poll()
        for descriptor in (pidfd, channel, *(output.reading for output in self._outputs)):
            poll.register(descriptor, select.POLLIN)
        by_descriptor = {output.reading: output for output in self._outputs}
        wall_end = began + float(self._limits["wall_seconds"])
        next_look = began + FIRST_LOOK_SECONDS
        while not self._killed_by:
            now = time.monotonic()
            if now >= wall_end:
                self._killed_by = "wall"
                return
            if now >= next_look:
                self._look()
                next_look = time.monotonic() + LOOK_SECONDS
                continue
            wait = min(next_look, wall_end) - now
            for descriptor, _ in poll.poll(max(1, round(wait * 1000))):
                if descriptor == pidfd:
                    return
                if descriptor == channel:
                    if asked_to_cancel():
                        self._killed_by = "cancelled"
                elif not by_descriptor[descriptor].take():
                    poll.unregister(descriptor)
            if max(o.total for o in self._outputs) > self._kept_bytes * OUTPUT_KILL_FACTOR:
                self._killed_by = "output"

    @property
    def _kept_bytes(self) -> int:
        return int(self._limits["output_kb"]) * 1024

    def _look(self) -> None:
        limits, used = self._limits, self._used
        memory_limit = int(limits["memory_mb"]) * MB
        seen = sample(self._backend.programs(), memory_limit)
        disk, inodes = self._backend.used()
        used.peak_memory = max(used.peak_memory, seen.memory_bytes)
        used.peak_processes = max(used.peak_processes, seen.processes)
        used.disk_bytes = max(used.disk_bytes, disk)
        cpu_seconds = self._accounts.cpu_seconds(seen.cpu_seconds) - self._cpu_before
        for reason, passed in (
            ("memory", seen.memory_bytes + self._backend.kernel_bytes() > memory_limit),
            ("cpu", cpu_seconds > float(limits["cpu_seconds"])),
            ("processes", seen.processes > int(limits["processes"])),
            ("disk", disk > int(limits["disk_mb"]) * MB),
            ("inodes", inodes > int(limits["inodes"]) + 4),
        ):
            if passed:
                self._killed_by = self._killed_by or reason

    def _bury(self, pid: int) -> tuple[int, resource.struct_rusage]:
        """Returns the exit status; kills the program's other processes and reads their output."""
        _, status, usage = os.wait4(pid, 0)
        self._backend.kill()
        until = time.monotonic() + _DRAIN_SECONDS
        for output in self._outputs:
            os.set_blocking(output.reading, False)
            while time.monotonic() < until:
                before = output.total
                if not output.take() or output.total == before:
                    break
            os.close(output.reading)
        return status, usage

    def _record(self, status: int, usage: resource.struct_rusage) -> dict[str, Any]:
        used = self._used
        code = os.waitstatus_to_exitcode(status)
        if not self._killed_by and code == -signal.SIGXCPU:
            self._killed_by = "cpu"
        if not self._killed_by and self._accounts.memory_kills() > self._kills_before:
            self._killed_by = "memory"
        used.cpu_seconds = self._accounts.cpu_seconds() - self._cpu_before
        read, written = self._accounts.bytes_moved()
        used.read_bytes = max(0, read - self._io_before[0])
        used.written_bytes = max(0, written - self._io_before[1])
        used.output_bytes = sum(output.total for output in self._outputs)
        used.cpu_exact = self._accounts.cpu_exact
        used.peak_memory = max(used.peak_memory, usage.ru_maxrss * 1024)
        used.peak_processes = max(used.peak_processes, 1)
        memory, tasks = self._accounts.peak_memory(), self._accounts.peak_tasks()
        if memory > self._peaks_before[0]:  # reached by this program, else by an earlier one
            used.peak_memory, used.memory_exact = memory, True
        if tasks > self._peaks_before[1]:
            used.peak_processes = tasks
        used.disk_bytes = max(used.disk_bytes, self._backend.used()[0])
        if self._killed_by:
            used.killed = {self._killed_by: 1}
        self._totals.add(used)
        out, error = self._outputs
        return {
            "exit": code if code >= 0 and not self._killed_by else None,
            "signal": -code if code < 0 else None,
            "killed_by": self._killed_by,
            "stdout": bytes(out.kept),
            "stderr": bytes(error.kept),
            "truncated": any(output.total > len(output.kept) for output in self._outputs),
            "usage": used.as_record(),
        }


def _readable(data: bytes) -> int:
    """Returns a descriptor for reading `data`, sealed so that programs cannot write to it."""
    descriptor = os.memfd_create("stdin", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with os.fdopen(os.dup(descriptor), "wb") as file:
        file.write(data)
    os.lseek(descriptor, 0, os.SEEK_SET)
    linux.seal(descriptor)
    return descriptor
