"""The kernel calls that tie processes together. Linux only; all of them act on this process."""

from __future__ import annotations

import os
import random
import resource
import secrets
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import Context, ContextVar, copy_context
from functools import cache
from pathlib import Path
from typing import Any

from ..descriptors import raise_open_files
from ..sandbox.linux import PR_SET_CHILD_SUBREAPER, die_with, lower_limit, prctl

_MOST_DESCRIPTORS = 2**30
_SPARE_ADDRESS_SPACE_BYTES = 8 * 2**30
_OPEN_FILES = 512
"""Maximum open files of a sandboxed process: each connection to the proxy also takes one of the
server's."""
_KILL_SECONDS = 5.0
_MARKS = "MARKS_OF_RUNS"
_RLIMIT_LOCKS = 10
"""A limit that the kernel keeps and inherits, but does not apply."""
_STARTS = {"os.fork", "os.forkpty", "os.posix_spawn", "os.system", "subprocess.Popen"}
_run: ContextVar[int] = ContextVar("run", default=0)
_ended: set[int] = set()
_WATCH = """
import os, select, signal, sys, time
if os.fork():
    os._exit(0)  # it is no child of the process that it watches
ends = select.poll()
ends.register(int(sys.argv[1]), select.POLLIN)
ends.poll()
for second in range(1, 8):  # what is killed may be starting another
    time.sleep(1)
    for pid in set(filter(str.isdigit, os.listdir("/proc"))) - {str(os.getpid())}:
        try:
            marked = []
            for name in "environ", "limits":
                with open(f"/proc/{pid}/{name}", "rb") as file:
                    marked.append(sys.argv[2].encode() in file.read())
            if marked[0] or (second > 4 and marked[1]):
                os.kill(int(pid), signal.SIGKILL)
            elif marked[1]:  # lets a stopped process end by itself
                os.kill(int(pid), signal.SIGCONT)
        except OSError:  # it ended meanwhile, or we may not read it (nor kill it)
            continue
"""
die_with_parent = die_with


def adopt_orphans() -> None:
    """Makes this process the parent of every descendant whose own parent ends."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)


def children(of: int | None = None) -> list[int]:
    """Returns the pids of the children of a process (default: this one), zombies included."""
    tasks = Path(f"/proc/{of or 'self'}/task")
    try:
        found = [(task / "children").read_text() for task in tasks.iterdir()]
        return [int(pid) for pid in " ".join(found).split()]
    except OSError:
        # A thread has ended, the kernel has no CONFIG_PROC_CHILDREN, or /proc hides other users'.
        return [pid for pid in _processes() if _stat(pid)[1:2] == [str(of or os.getpid())]]


def cpu_seconds(pid: int) -> float:
    """Of a process and its descendants, also of those that it reaped."""
    ticks = sum(map(int, _stat(pid)[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK") + sum(map(cpu_seconds, children(pid)))


def kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def kill_group(leader: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def descendants(of: int | None = None) -> list[int]:
    return [pid for child in children(of) for pid in (child, *descendants(child))]


def kill_descendants() -> None:
    """Kills the children until there is none; with `adopt_orphans`, all descendants."""
    until = time.monotonic() + _KILL_SECONDS
    while (remaining := children()) and time.monotonic() < until:
        for pid in remaining:
            kill(pid)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                continue
        except ChildProcessError:
            return
        time.sleep(0.001)


def kill_marked(marker: str) -> None:
    """Sends SIGKILL to every process whose initial environment holds `marker` (an unguessable
    path), or that has it as a mark of `killing_programs`."""
    needle = marker.encode()
    for pid in _processes():
        try:
            found = any(
                needle in Path(f"/proc/{pid}/{name}").read_bytes() for name in ("environ", "limits")
            )
        except OSError:  # it ended meanwhile, or we may not read it (nor kill it)
            continue
        if found and pid != os.getpid():
            kill(pid)


def kill_programs_at_end() -> None:
    """Has every program that this process starts from now on killed, in whatever session, after the
    end of this process, however it ends: a second later, without its variables five."""
    mark = str(secrets.randbits(62))
    os.environ[_MARKS] = f"{os.environ.get(_MARKS, '')} {mark}"
    with suppress(OSError, ValueError):  # gVisor has no such limit; a lower one is set already
        resource.setrlimit(_RLIMIT_LOCKS, (int(mark), resource.getrlimit(_RLIMIT_LOCKS)[1]))
    _kill_at_end(mark)


@contextmanager
def killing_programs() -> Iterator[Context]:
    """Yields a context: every program that code in it starts is killed at the end of the block, or
    of this process; later it can start none. Programs of other code of this process go on."""
    _mark_programs()
    mark = secrets.randbits(62)
    context = copy_context()
    context.run(_run.set, mark)
    _kill_at_end(str(mark))
    try:
        yield context
    finally:
        _ended.add(mark)
        kill_marked(str(mark))


@cache
def _mark_programs() -> None:
    """Has each program begin with the mark of the run whose code starts it, or with none."""
    import _posixsubprocess
    import subprocess
    from multiprocessing import resource_tracker

    resource_tracker.ensure_running()  # all runs share it
    unmarked, most = resource.getrlimit(_RLIMIT_LOCKS)

    def limit(mark: int) -> None:
        with suppress(OSError, ValueError):
            resource.setrlimit(_RLIMIT_LOCKS, (mark, most))

    def mark(event: str, _: tuple[Any, ...]) -> None:
        if event in _STARTS:
            if (run := _run.get()) in _ended:
                raise RuntimeError("The call of envserver that starts this program has ended.")
            limit(run or unmarked)

    def start(*arguments: Any) -> int:
        mark("subprocess.Popen", ())
        try:
            return fork_exec(*arguments)
        finally:
            limit(unmarked)

    def keep_mark() -> None:
        nonlocal unmarked
        unmarked = resource.getrlimit(_RLIMIT_LOCKS)[0]

    sys.addaudithook(mark)
    os.register_at_fork(after_in_parent=lambda: limit(unmarked), after_in_child=keep_mark)
    # multiprocessing starts programs with it, without an audit event.
    fork_exec = _posixsubprocess.fork_exec
    _posixsubprocess.fork_exec = start
    subprocess._fork_exec = start  # type: ignore[attr-defined]


def _kill_at_end(mark: str) -> None:
    import subprocess  # not before: it would be in each companion

    this = os.pidfd_open(os.getpid())
    # A program of its own: it looks like no server, and holds none of its memory.
    subprocess.run(
        [sys.executable, "-ISc", _WATCH, str(this), mark],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        env={_MARKS: mark},
        pass_fds=[this],
        start_new_session=True,
        check=False,
    )
    os.close(this)


def open_descriptors() -> set[int]:
    found = {int(entry.name) for entry in Path("/proc/self/fd").iterdir()}
    return {fd for fd in found if _is_open(fd)}


def close_all_but(kept: Iterable[int]) -> None:
    low = 0
    for fd in sorted(kept):
        if low < fd:  # an empty range at 0 would close everything
            os.closerange(low, fd)
        low = fd + 1
    os.closerange(low, _MOST_DESCRIPTORS)


def limit_resources() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    raise_open_files()


def bound(memory_mb: int, reserved_mb: int, file_mb: int) -> None:
    """Limits this process of a sandbox and all that it starts, each by itself.

    Args:
        reserved_mb: what it may reserve beyond what it uses, as engines of JavaScript do.
        file_mb: the largest file that it may write.
    """
    memory, reserved = memory_mb << 20, reserved_mb << 20
    for name, most in (
        (resource.RLIMIT_DATA, memory + memory // 4 + reserved),
        (resource.RLIMIT_AS, memory + _SPARE_ADDRESS_SPACE_BYTES + reserved),
        (resource.RLIMIT_FSIZE, file_mb << 20),
        (resource.RLIMIT_NOFILE, _OPEN_FILES),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
    ):
        lower_limit(name, most)


def new_random_numbers() -> None:
    """Seeds what else gives the same random numbers in every fork."""
    random.seed()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()


def out_of_memory_kills() -> int:
    """Returns how many processes the kernel killed for lack of memory since boot (0: unknown)."""
    try:
        counters = Path("/proc/vmstat").read_bytes()
    except OSError:
        return 0
    _, _, count = counters.partition(b"\noom_kill ")
    return int(count.partition(b"\n")[0] or 0)


def _processes() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _stat(pid: int) -> list[str]:
    """Returns what /proc/PID/stat has after the name of the program; []: the process has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True
