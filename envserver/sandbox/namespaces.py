"""The built-in backend: Linux namespaces, with nothing to install.

It has two layers. The *outer* layer is made once, around a zygote: a read-only root directory that
holds only what programs may see, and a pid namespace whose end kills every process in it. The
*inner* layer is made around each sandbox, inside the outer one: its own user, process, mount,
network, IPC and UTS namespaces, a bounded tmpfs for everything writable, and programs without
capabilities.

A server that runs as root changes to an unprivileged user, a different one for each sandbox, before
it makes the inner layer. So the kernel counts processes per sandbox, and no sandbox runs as root.
"""

from __future__ import annotations

import os
import resource
import signal
import stat
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from . import linux
from .linux import (
    MS_BIND,
    MS_NODEV,
    MS_NOEXEC,
    MS_NOSUID,
    MS_PRIVATE,
    MS_RDONLY,
    MS_REC,
    MS_REMOUNT,
)

# Each namespace inside the outer layer copies its mounts, and hundreds of them (one for each
# package) take 1 to 2 ms of CPU. Overlayfs shows the folder below a layer of whiteouts: what these
# name is not there. Names that come later are seen.

_READ_ONLY = MS_RDONLY | MS_NOSUID | MS_NODEV
_SPECIAL = frozenset(":,\\ \t\n")
"""Characters that have a meaning in the options of overlayfs, or that mountinfo escapes."""


def show_without(folder: str, hidden: Sequence[str], target: str, spare: str) -> bool:
    """Shows `folder` at `target`, read-only, without the paths `hidden` in it.

    `target` and `spare` are empty folders; nothing stays in `spare`. Returns whether it does: not
    on every file system and kernel, nor where something is mounted in it.
    """
    real = os.path.realpath(folder)  # where mounts are listed
    if _SPECIAL & {*real, *spare} or _holds_mounts(real):
        return False
    linux.mount("tmpfs", spare, "tmpfs", MS_NOSUID | MS_NODEV, "mode=0755,size=1m")
    try:
        for path in hidden:
            parent, name = os.path.split(path)
            os.mknod(f"{_like(parent, folder, spare)}/{name}", stat.S_IFCHR)
        linux.mount("overlay", target, "overlay", _READ_ONLY, f"lowerdir={spare}:{real}")
    except OSError:  # it is shown by a mount for each entry then
        return False
    finally:
        linux.unmount(spare)  # an overlay that uses it keeps it
    return True


def _like(path: str, folder: str, spare: str) -> str:
    """Makes a folder in `spare` with the owner and the rights of `path`, which is in `folder`."""
    made = spare + path.removeprefix(folder)
    if path != folder:
        _like(os.path.dirname(path), folder, spare)
        os.makedirs(made, exist_ok=True)
    state = os.stat(path)
    if os.geteuid() == 0:  # only root can
        os.chown(made, state.st_uid, state.st_gid)
    os.chmod(made, stat.S_IMODE(state.st_mode))
    return made


def _holds_mounts(folder: str) -> bool:
    """Whether something is mounted below `folder`: an overlay would not show it."""
    below = os.fsencode(folder) + b"/"
    with open("/proc/self/mountinfo", "rb") as lines:
        return any(line.split()[4].startswith(below) for line in lines)


_INNER = (
    linux.CLONE_NEWUSER
    | linux.CLONE_NEWNS
    | linux.CLONE_NEWPID
    | linux.CLONE_NEWNET
    | linux.CLONE_NEWIPC
    | linux.CLONE_NEWUTS
    | linux.CLONE_NEWCGROUP
)
SOCKET_BUFFERS = "4096 65536 131072"
"""TCP buffer sizes in bytes. Data waiting in the kernel is memory; hosts allow megabytes."""
INNER_ID = 1000
"""User and group of the programs, as they see themselves."""
DEVICES = ("null", "zero", "full", "random", "urandom")
LINKS = {"fd": "", "stdin": "/0", "stdout": "/1", "stderr": "/2"}
"""Names in /dev of what is in /proc/self/fd."""
OWN_INODES = 5
"""Inodes that a sandbox's writable folders use before programs create any."""
_LARGEST_FILE = 2**63 - 1
PLACE = "/agent"
"""Where a folder of the caller appears."""
_EMPTY_DIRECTORIES = ("work", "tmp", "box", "proc", "dev", "dev/shm", "run", "etc")


def own_users() -> None:
    """Gives an ordinary user a user namespace in which it may mount; root does not need one.

    Call it while this process has one thread: before imports that may start others.
    """
    if os.geteuid() == 0:
        return
    ids = os.geteuid(), os.getegid()
    linux.unshare(linux.CLONE_NEWUSER)
    _map_ids(ids, ids)


def enter_outer(
    root: str, seen: Mapping[str, Any], then: Callable[[], None], shown: str = ""
) -> int:
    """Runs `then` inside a fresh outer layer, as process 1 of its pid namespace.

    Call `own_users` first. Returns the exit status of that process. If either process dies, the
    other is killed.

    Args:
        root: an empty directory; only this call's processes see what is mounted there.
        seen: host paths that appear at the same place, read-only, by `system.describe`; links stay
            links.
        shown: a folder of this machine that appears at `PLACE`, read-only; "": none.
    """
    linux.unshare(linux.CLONE_NEWNS | linux.CLONE_NEWPID)
    linux.mount("", "/", flags=MS_REC | MS_PRIVATE)
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        linux.die_with(0, signal.SIGKILL)  # the parent has no number in this namespace
        _build_root(root, seen, shown)
        linux.pivot_root(root)
        then()
        os._exit(0)
    assert os.getpid() == parent
    return linux.wait_for(pid)


def fork_inner(uid: int | None) -> int:
    """Forks a child that is process 1 of fresh namespaces; it must call `settle_inner` first.

    `uid`: user that owns the namespaces; None: the current user.
    """
    if uid is None:
        return linux.fork_into(_INNER)
    os.setgroups([])
    os.setegid(uid)
    os.seteuid(uid)  # the effective user at creation owns a namespace
    try:
        pid = linux.fork_into(_INNER)
    except OSError:
        _be_root()
        raise
    if pid != 0:
        _be_root()
    return pid


def owner(uid: int | None) -> tuple[int, int]:
    """The user and group that own `fork_inner`'s namespaces; call it before the fork."""
    return (uid, uid) if uid is not None else (os.geteuid(), os.getegid())


def settle_inner(user: int, group: int) -> None:
    """Makes the child of `fork_inner` the only user of its namespace, for good."""
    linux.prctl(linux.PR_SET_DUMPABLE, 1)  # else /proc/self belongs to root
    _map_ids((INNER_ID, INNER_ID), (user, group))
    become_inner()


def become_inner() -> None:
    """Makes this process, which has joined the namespaces of a sandbox, its only user, for good."""
    _become(INNER_ID)


def _be_root() -> None:
    os.seteuid(0)
    os.setegid(0)
    linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)  # every change of user resets it


def become_user(uid: int) -> None:
    """Changes from root to an ordinary user and group `uid`, for good."""
    os.setgroups([])
    _become(uid)


def _become(uid: int) -> None:
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    linux.prctl(linux.PR_SET_DUMPABLE, 1)  # else /proc/self belongs to root


def furnish() -> None:
    """Sets up /proc, host name and loopback; process 1 of a sandbox calls it first."""
    for direction in ("tcp_rmem", "tcp_wmem"):
        try:
            _write(f"/proc/sys/net/ipv4/{direction}", SOCKET_BUFFERS)
        except OSError:  # read-only in some containers: sockets are counted in any case
            continue
    linux.mount("proc", "/proc", "proc", MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC)
    linux.set_hostname("sandbox")
    linux.raise_loopback()


def mount_writable(disk_bytes: int, inodes: int) -> None:
    """Mounts one bounded tmpfs for /work, /tmp and /dev/shm; it vanishes with the sandbox."""
    options = f"size={disk_bytes},nr_inodes={inodes + OWN_INODES},mode=0755"
    linux.mount("tmpfs", "/box", "tmpfs", MS_NOSUID | MS_NODEV, options)
    for name, target in (("work", "/work"), ("tmp", "/tmp"), ("shm", "/dev/shm")):
        os.mkdir(f"/box/{name}", 0o755)
        linux.mount(f"/box/{name}", target, flags=MS_BIND)
    _replace_zero()
    linux.unmount("/box")


def _replace_zero() -> None:
    """Replaces /dev/zero by an endless file: mapping the device gives shared memory.

    Such memory belongs to no process, so the memory limit would not see it. The file uses no space.
    """
    _write("/box/zero", "")
    most = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    os.truncate("/box/zero", _LARGEST_FILE if most < 0 else min(most, _LARGEST_FILE))
    linux.mount("/box/zero", "/dev/zero", flags=MS_BIND)
    read_only = MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV
    linux.mount("", "/dev/zero", flags=read_only)


def _map_ids(inner: tuple[int, int], outer: tuple[int, int]) -> None:
    """Maps a user and a group of a fresh user namespace: more needs privileges."""
    _write("/proc/self/setgroups", "deny")
    _write("/proc/self/uid_map", f"{inner[0]} {outer[0]} 1\n")
    _write("/proc/self/gid_map", f"{inner[1]} {outer[1]} 1\n")


def _build_root(root: str, seen: Mapping[str, Any], shown: str) -> None:
    visible, partly = seen["visible"], seen["partly"]
    linux.mount("tmpfs", root, "tmpfs", MS_NOSUID | MS_NODEV, "mode=0755,size=1m")
    for name in _EMPTY_DIRECTORIES:
        os.mkdir(f"{root}/{name}")
    folders = tuple(f"{folder}/" for folder in partly)
    for path in visible:
        if not path.startswith(folders):
            _show(root, path)
    for folder, hidden in partly.items():
        os.makedirs(root + folder, exist_ok=True)
        if not show_without(folder, hidden, root + folder, f"{root}/box"):
            for path in visible:
                if path.startswith(f"{folder}/"):
                    _show(root, path)
    if shown:
        os.mkdir(root + PLACE)
        _bind_read_only(shown, root + PLACE)
    for name, text in seen["etc"].items():
        target = f"{root}/etc/{name}"
        if not os.path.exists(target):
            _write(target, text)
    for name in DEVICES:
        _write(f"{root}/dev/{name}", "")
        linux.mount(f"/dev/{name}", f"{root}/dev/{name}", flags=MS_BIND)
    for name, number in LINKS.items():
        os.symlink(f"/proc/self/fd{number}", f"{root}/dev/{name}")
    # Must be whole and stay so: only who sees a whole /proc may mount another one.
    linux.mount("proc", f"{root}/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    linux.mount("", root, flags=MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV)


def _show(root: str, path: str) -> None:
    target = root + path
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:  # removed since the places were listed
        return
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.islink(target) or (os.path.exists(target) and not stat.S_ISDIR(mode)):
        return
    if stat.S_ISLNK(mode):
        os.symlink(os.readlink(path), target)
        return
    if stat.S_ISDIR(mode):
        os.makedirs(target, exist_ok=True)
    else:
        _write(target, "")
    _bind_read_only(path, target)


def _bind_read_only(path: str, target: str) -> None:
    linux.mount(path, target, flags=MS_BIND | MS_REC)
    linux.make_read_only(target)


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)
