"""The differences between backends for the in-sandbox server: paths, and limits of programs."""

from __future__ import annotations

import os
import resource
import signal
import stat
import time
from collections.abc import Iterator
from typing import Any, Protocol

from . import linux, namespaces
from .usage import Accounts, numbers

_SWEEP_SECONDS = 5.0
_TOO_MANY = 2**31
_LONGEST_PATH = 4096
"""Longest path of a directory that is counted; opening a deeper one takes ever longer."""
_SOCKET_BYTES = 212992
"""Default socket buffer size of Linux; the filter keeps programs from asking for more."""


class Backend(Protocol):
    """The place and the limits of one sandbox's programs, made before the first request."""

    work: str
    """The workspace directory, as the server sees it (in a namespace it is /work itself)."""
    temporary: str
    variables: dict[str, str]
    """Environment variables of programs; nothing else is inherited."""

    def furnish(self, disk_bytes: int, inodes: int) -> None:
        """Creates the writable folders; called once."""

    def enclose(self, processes: int) -> None:
        """Drops the rights of a program's process, just before the program starts."""

    def programs(self) -> Iterator[int]:
        """The process ids of all programs in the sandbox, zombies included."""

    def kill(self) -> None:
        """Kills all programs; returns when none is left that could start another."""

    def used(self) -> tuple[int, int]:
        """The bytes and inodes used in the writable folders."""

    def accounts(self) -> Accounts: ...

    def kernel_bytes(self) -> int:
        """An upper bound of the kernel memory that programs hold, beyond their own."""


class NamespaceBackend:
    """Programs run in the pid namespace of which the in-sandbox server is process 1, so that its
    /proc lists every process of the sandbox."""

    work, temporary = "/work", "/tmp"
    reset_signals = (signal.SIGTERM, signal.SIGINT)
    """Signals whose handlers a new backend removes."""

    def __init__(self, filter_program: bytes, variables: dict[str, str]) -> None:
        ignore_signals_from_inside()
        namespaces.furnish()
        self._filter = filter_program
        self.variables = variables

    def furnish(self, disk_bytes: int, inodes: int) -> None:
        namespaces.mount_writable(disk_bytes, inodes)

    def enclose(self, processes: int) -> None:
        enclose(self._filter, processes)

    def programs(self) -> Iterator[int]:
        ours = os.getpid()
        return (pid for pid in numbers() if pid != ours)

    def kill(self) -> None:
        try:
            while True:
                os.kill(-1, signal.SIGKILL)  # all processes of the namespace except this one
                while os.waitpid(-1, 0)[0]:
                    continue
        except (ProcessLookupError, ChildProcessError):
            return

    def used(self) -> tuple[int, int]:
        state = os.statvfs(self.work)
        taken = (state.f_blocks - state.f_bfree) * state.f_frsize
        return taken, state.f_files - state.f_ffree - namespaces.OWN_INODES

    def accounts(self) -> Accounts:
        return Accounts()

    def kernel_bytes(self) -> int:
        return kernel_bytes()


def enclose(filter_program: bytes, processes: int) -> None:
    """For a process in namespaces of its own."""
    _limit_processes(processes + 1)  # and process 1
    linux.drop_capabilities()
    linux.install_filter(filter_program)


def ignore_signals_from_inside() -> None:
    """Keeps programs from ending this process, which is process 1 of their pid namespace.

    From inside its own namespace, process 1 receives only signals that it has a handler for.
    """
    for number in NamespaceBackend.reset_signals:
        signal.signal(number, signal.SIG_DFL)


def kernel_bytes(proc: str = "/proc") -> int:
    """The most that can wait in sockets of the network namespace of process 1 of `proc`."""
    with open(f"{proc}/1/net/sockstat") as counts:
        return int(counts.readline().split()[2]) * _SOCKET_BYTES


class HostBackend:
    """Programs run in a directory of the host, without a mount namespace.

    They are the descendants of the server (a subreaper). A program that outlives it is not limited.

    Args:
        root: an empty directory that belongs to its user.
        seen: what programs may see, see `system.describe`.
        confined: Landlock and a system-call filter around programs; else only limits.
        own_user: the user belongs to this sandbox alone, so the kernel can count its processes.
    """

    def __init__(self, root: str, seen: dict[str, Any], *, confined: bool, own_user: bool) -> None:
        linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1)
        self._root = root
        self.work, self.temporary = f"{root}/work", f"{root}/tmp"
        self._readable, self._listed = seen["visible"], seen["search_path"]
        self._filter = bytes.fromhex(seen["filter"])
        self.variables = seen["variables"]
        self._confined = confined
        self._own_user = own_user

    def furnish(self, disk_bytes: int, inodes: int) -> None:
        os.mkdir(self.work)
        os.mkdir(self.temporary)
        if self._confined:
            from . import landlock

            # A link that a program leaves must not lead the in-sandbox server out of the folder.
            landlock.restrict([*self._readable, "/proc"], [self._root], listed=self._listed)

    def enclose(self, processes: int) -> None:
        if self._own_user:
            _limit_processes(processes + 1)
        linux.drop_capabilities()
        if self._confined:
            from . import landlock

            writable = [self.work, self.temporary]
            landlock.restrict(self._readable, writable, listed=self._listed)
            linux.install_filter(self._filter)

    def programs(self) -> Iterator[int]:
        found = [os.getpid()]
        for pid in found:
            try:
                for thread in os.listdir(f"/proc/{pid}/task"):
                    with open(f"/proc/{pid}/task/{thread}/children") as children:
                        text = children.read()
                    found.extend(int(child) for child in text.split())
            except OSError:  # it has ended
                continue
        yield from found[1:]

    def kill(self) -> None:
        until = time.monotonic() + _SWEEP_SECONDS
        while time.monotonic() < until:
            for pid in self.programs():
                try:
                    os.kill(pid, signal.SIGKILL)
                except (ProcessLookupError, PermissionError):
                    continue
            try:
                while os.waitpid(-1, os.WNOHANG)[0]:
                    continue
            except ChildProcessError:
                return
            time.sleep(0.001)

    def used(self) -> tuple[int, int]:
        """Counts what cannot be measured (too deep, or closed to its own user) as too much."""
        taken = inodes = 0
        waiting = [self._root]
        while waiting:
            directory = waiting.pop()
            if len(directory) > _LONGEST_PATH:
                return taken, _TOO_MANY
            try:
                for entry in os.scandir(directory):
                    inodes += 1
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
                    else:
                        taken += entry.stat(follow_symlinks=False).st_blocks * 512
            except FileNotFoundError:  # removed meanwhile
                continue
            except OSError:
                return taken, _TOO_MANY
        return taken + self._unnamed(), inodes

    def accounts(self) -> Accounts:
        return Accounts()

    def kernel_bytes(self) -> int:
        return sum(stat.S_ISSOCK(file.st_mode) for file in self._open_files()) * _SOCKET_BYTES

    def _unnamed(self) -> int:
        device = os.stat(self._root).st_dev
        found = {
            file.st_ino: file.st_blocks * 512
            for file in self._open_files()
            if file.st_nlink == 0 and file.st_dev == device
        }
        return sum(found.values())

    def _open_files(self) -> Iterator[os.stat_result]:
        for pid in self.programs():
            try:
                places = [entry.path for entry in os.scandir(f"/proc/{pid}/fd")]
            except OSError:  # it has ended
                continue
            for place in places:
                try:
                    yield os.stat(place)
                except OSError:  # closed meanwhile
                    continue


def _limit_processes(most: int) -> None:
    linux.lower_limit(resource.RLIMIT_NPROC, most)
