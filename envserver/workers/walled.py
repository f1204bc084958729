"""A worker whose whole process lives behind the kernel's wall, for agents that execute code in it.

    nursery (in the outer layer) --fork--> holder --fork--> keeper, process 1 --fork--> worker

The holder is the nursery's child and dies as the worker did; its end is the end of the keeper's
namespace, and so of everything in there. The keeper bounds memory, which limits of single
processes cannot. The only way out of the worker's private network is one listening socket in it,
at the proxy's own port, that the keeper hands to the server: whatever HTTP client an agent uses
reaches the proxy at the address that it was given, and nothing else.
"""

from __future__ import annotations

import os
import resource
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

import msgspec

from ..sandbox import landlock, linux, namespaces
from ..sandbox.room import NamespaceRoom
from ..sandbox.sampling import sample
from ..sandbox.wire import WHOLE_WALLS
from .child import Birth, become_worker

LOOK_SECONDS = 0.1
_MB = 2**20
_SPARE_ADDRESS_SPACE_MB = 8192
_FORKED_STATUS = 128
"""Added by the keeper to the number of the signal that ended the worker, as shells do."""


class Wall(msgspec.Struct, frozen=True, kw_only=True):
    """What workers live behind.

    Args:
        kind: "namespace", "bubblewrap" or "landlock".
        port: of the proxy, on this machine's loopback.
        memory_mb: of a worker with all that it starts.
        disk_mb, inodes: of what it may write.
        processes: and threads.
    """

    kind: str
    port: int
    memory_mb: int
    disk_mb: int
    inodes: int = 65536
    processes: int = 256


def live_behind(
    wall: Wall,
    seen: dict[str, Any],
    uid: int | None,
    birth: Birth,
    hand_out: Callable[[socket.socket], None],
) -> NoReturn:
    """Turns this process, just forked, into a holder with a walled worker below it.

    Args:
        seen: what it will see; see `sandbox.layout`.
        uid: user to become first; None: we are an ordinary one.
        hand_out: gives a listening socket to the server.
    """
    try:
        os.dup2(birth.output_fd, 1)
        os.dup2(birth.output_fd, 2)
        if wall.kind not in WHOLE_WALLS:
            _confine_on_the_host(wall, seen, uid, birth)
        os.setsid()
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
        owner = namespaces.owner(uid)
        pid = namespaces.fork_inner(uid)
        if pid == 0:
            namespaces.settle_inner(*owner)
            linux.die_with(0, signal.SIGKILL)  # the holder has no number in our namespace
            _keep(wall, seen, birth, hand_out)
        _close_all_but_output()
        _end_like(os.waitpid(pid, 0)[1])
    except BaseException:  # noqa: BLE001 - the last frame: whatever it is, say it and end
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(1)


def _confine_on_the_host(
    wall: Wall, seen: dict[str, Any], uid: int | None, birth: Birth
) -> NoReturn:
    """Without namespaces: a user and a directory of its own, Landlock, a filter, limits.

    What it may connect to is the proxy's port, at whatever address.
    """
    if uid is not None:
        namespaces.become_user(uid)
    _bound(wall)
    linux.drop_capabilities()
    if wall.kind == "landlock":
        landlock.restrict(seen["visible"], [str(birth.directory)], connect_ports=[wall.port])
        linux.install_filter(bytes.fromhex(seen["tcp_filter"]))
    become_worker(birth)


def _end_like(status: int) -> NoReturn:
    code = os.waitstatus_to_exitcode(status)
    number = code - _FORKED_STATUS if code > _FORKED_STATUS else -code
    if number > 0:
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(code & 0xFF)


def _close_all_but_output() -> None:
    os.closerange(3, 2**30)


def _keep(
    wall: Wall, seen: dict[str, Any], birth: Birth, hand_out: Callable[[socket.socket], None]
) -> NoReturn:
    """In process 1: furnishes the place, forks the worker, watches it."""
    status = 1
    try:
        room = NamespaceRoom(bytes.fromhex(seen["filter"]), seen["variables"])
        room.furnish(wall.disk_mb * _MB, wall.inodes)
        os.environ.clear()
        os.environ.update(room.variables)
        hand_out(_listen(wall.port))
        linux.prctl(linux.PR_SET_DUMPABLE, 0)
        pid = os.fork()
        if pid == 0:
            linux.prctl(linux.PR_SET_DUMPABLE, 1)
            _bound(wall)
            room.enclose(wall.processes)
            become_worker(birth)
        _close_all_but_output()
        status = _watch(wall, room, pid)
    except BaseException:  # noqa: BLE001 - the last frame: whatever it is, say it and end
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(status)


def _listen(port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listener.bind(("127.0.0.1", port))
    listener.listen(128)
    return listener


def _bound(wall: Wall) -> None:
    memory = wall.memory_mb * _MB
    for name, most in (
        (resource.RLIMIT_DATA, memory + memory // 4),
        (resource.RLIMIT_AS, memory + _SPARE_ADDRESS_SPACE_MB * _MB),
        (resource.RLIMIT_FSIZE, wall.disk_mb * _MB),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
    ):
        resource.setrlimit(name, (most, most))


def _watch(wall: Wall, room: NamespaceRoom, pid: int) -> int:
    """Until the worker has ended; its status in one byte. Orphans are buried on the way."""
    poll = select.poll()
    pidfd = os.pidfd_open(pid)
    poll.register(pidfd, select.POLLIN)
    limit = wall.memory_mb * _MB
    while not poll.poll(LOOK_SECONDS * 1000):
        if os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOHANG) is not None:
            _kill(pid, "The worker was stopped by a signal.")  # which it never does to itself
        if sample(room.programs(), limit).memory_bytes + room.kernel_bytes() > limit:
            _kill(pid, f"The worker passed its {wall.memory_mb} MB of memory.")
        _bury_orphans(pid)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return code if code >= 0 else _FORKED_STATUS - code


def _kill(pid: int, why: str) -> None:
    sys.stderr.write(f"{why}\n")
    sys.stderr.flush()
    os.kill(pid, signal.SIGKILL)


def _bury_orphans(worker_pid: int) -> None:
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if ended is None or ended.si_pid == worker_pid:
            return
        os.waitpid(ended.si_pid, 0)
