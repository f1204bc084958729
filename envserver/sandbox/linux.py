"""The kernel calls that backends use. Linux only; all of them act on this process."""

from __future__ import annotations

import ctypes
import fcntl
import os
import resource
import signal
import socket
import struct

CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 32, 4096, 16384, 1 << 18
MNT_DETACH = 2

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38
_PR_SET_SECCOMP = 22
_SECCOMP_MODE_FILTER = 2

_SYS_MOUNT_SETATTR = 442  # on every architecture; Linux 5.12
_MOUNT_ATTR_RDONLY_NOSUID_NODEV = 7
_AT_RECURSIVE = 0x8000
_F_ADD_SEALS = 1033
_ALL_SEALS = 0xF
_SIOCSIFFLAGS = 0x8914
_IFF_UP_RUNNING = 0x41
_CAPABILITIES_V3 = 0x20080522

_libc = ctypes.CDLL(None, use_errno=True)
_python = ctypes.PyDLL(None, use_errno=True)  # keeps the GIL
_SYS_CLONE = {"x86_64": 56, "aarch64": 220}.get(os.uname().machine, -1)
_no_capabilities = ctypes.create_string_buffer(24)
_capability_header = ctypes.create_string_buffer(struct.pack("Ii", _CAPABILITIES_V3, 0), 8)


def lower_limit(kind: int, soft: int, hard: int | None = None) -> None:
    """Sets `resource.RLIMIT_...`, where the machine's own limit is not lower; `hard` None: as
    `soft`."""
    most = resource.getrlimit(kind)[1]
    wanted = (soft, soft if hard is None else hard)
    if most != resource.RLIM_INFINITY:
        wanted = (min(wanted[0], most), min(wanted[1], most))
    resource.setrlimit(kind, wanted)


def unshare(flags: int) -> None:
    """Moves this process into new namespaces (for the pid namespace: its children)."""
    _checked(_libc.unshare(flags), f"unshare({flags:#x})")


def fork_into(flags: int) -> int:
    """Forks a child that starts in new namespaces (its pid namespace included).

    Takes one fork less than unshare(2). Only for a process with one thread.
    """
    _python.PyOS_BeforeFork()
    pid: int = _python.syscall(_SYS_CLONE, ctypes.c_ulong(flags | signal.SIGCHLD), 0, 0, 0, 0)
    if pid == 0:
        _python.PyOS_AfterFork_Child()
        return 0
    number = ctypes.get_errno()
    _python.PyOS_AfterFork_Parent()
    if pid < 0:
        raise OSError(number, f"clone({flags:#x}): {os.strerror(number)}")
    return pid


def join(pidfd: int, flags: int) -> None:
    """Joins namespaces of another process (for the pid namespace: this process's children do)."""
    _checked(_libc.setns(pidfd, flags), f"setns({flags:#x})")


def mount(source: str, target: str, kind: str = "", flags: int = 0, data: str = "") -> None:
    """mount(2); empty strings stand for none."""
    result = _libc.mount(
        _text(source or "none"), _text(target), _text(kind), ctypes.c_ulong(flags), _text(data)
    )
    _checked(result, f"mount({source or kind!r}, {target!r})")


def make_read_only(target: str) -> None:
    """Makes everything mounted at and below `target` read-only, without devices and setuid."""
    attributes = struct.pack("QQQQ", _MOUNT_ATTR_RDONLY_NOSUID_NODEV, 0, 0, 0)
    result = _libc.syscall(
        _SYS_MOUNT_SETATTR, -100, _text(target), _AT_RECURSIVE, attributes, len(attributes)
    )
    _checked(result, f"mount_setattr({target!r})")


def unmount(target: str) -> None:
    """Unmounts `target` lazily: open files in it stay usable."""
    _checked(_libc.umount2(_text(target), MNT_DETACH), f"umount({target!r})")


def pivot_root(root: str) -> None:
    """Makes `root`, a mount point, the root directory; the old root is unmounted."""
    os.chdir(root)
    _checked(_libc.pivot_root(b".", b"."), "pivot_root")
    unmount(".")
    os.chdir("/")


def wait_for(pid: int) -> int:
    """Also reaps all other children that end before it; returns its exit status."""
    while True:
        ended, status = os.waitpid(-1, 0)
        if ended == pid:
            return os.waitstatus_to_exitcode(status)


def prctl(option: int, value: int) -> None:
    _checked(_libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0), f"prctl({option})")


def die_with(parent_pid: int, signal_number: int) -> None:
    """Has the kernel send `signal_number` when the forking thread ends; exits if it has."""
    prctl(PR_SET_PDEATHSIG, signal_number)
    if os.getppid() != parent_pid:
        os._exit(1)


def drop_capabilities() -> None:
    """Drops all capabilities for good: executing a file does not bring them back."""
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    result = _libc.capset(_capability_header, _no_capabilities)
    _checked(result, "capset")


def seal(descriptor: int) -> None:
    """Seals a memory file: it can no longer be changed or grown."""
    fcntl.fcntl(descriptor, _F_ADD_SEALS, _ALL_SEALS)


class _FilterProgram(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_char_p)]


def install_filter(program: bytes) -> None:
    """Installs a system-call filter on this thread and its children, for good."""
    whole = _FilterProgram(len(program) // 8, program)
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    mode, unused = ctypes.c_ulong(_SECCOMP_MODE_FILTER), ctypes.c_ulong(0)
    result = _libc.prctl(_PR_SET_SECCOMP, mode, ctypes.byref(whole), unused, unused)
    _checked(result, "the system-call filter")


def set_hostname(name: str) -> None:
    os_name = _text(name)
    _checked(_libc.sethostname(os_name, len(os_name)), "sethostname")


def raise_loopback() -> None:
    """Brings up the interface `lo` of the current network namespace."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sh22x", b"lo", _IFF_UP_RUNNING)
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, request)


def _text(value: str) -> bytes:
    return os.fsencode(value)


def _checked(result: int, call: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")
