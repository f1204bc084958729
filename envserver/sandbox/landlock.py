"""Landlock: a process gives up access to files, connections and signals for good.

It needs no privileges. It does not hide names, counts nothing, and ignores sockets with a path
(before its version 9). So it is combined with a filter of system calls, limits and a watcher.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import struct
from collections.abc import Iterable, Sequence

from . import linux

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_ASK_VERSION = 1
_PATH_BENEATH, _NET_PORT = 1, 2
_LOG_SAME_EXEC_OFF = 1  # version 7: refusals do not fill the machine's audit log

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_MAKE_CHAR, _MAKE_BLOCK = 1 << 6, 1 << 11
_TRUNCATE, _IOCTL_DEV = 1 << 14, 1 << 15
_CONNECT_TCP = 2

# Number of file rights by version; newer: renames across directories, truncation, device ioctls.
_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
_ALL_NET = 3  # bind, connect: version 4
_ALL_SCOPES = 3  # abstract sockets, signals: version 6

_READ = _EXECUTE | _READ_FILE | _READ_DIR
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV
_DEVICES = ("/dev/null", "/dev/full", "/dev/random", "/dev/urandom")
_ZERO = "/dev/zero"  # a writable one can be mapped: memory that the sampling does not see

_libc = ctypes.CDLL(None, use_errno=True)


def abi() -> int:
    """The kernel's Landlock version; 0 if it is absent or turned off."""
    version: int = _libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), _ASK_VERSION)
    return max(0, version)


def restrict(
    readable: Iterable[str],
    writable: Iterable[str],
    *,
    listed: Iterable[str] = (),
    connect_ports: Sequence[int] = (),
) -> None:
    """Takes from this thread, and all that it starts, every right that this kernel can take.

    Files: those below `readable` may be read and executed, those below `writable` also changed, and
    the usual devices used; directories in `listed` may be listed. Missing paths are skipped, and so
    are links: what they lead to is allowed if its real place is. Network: TCP to `connect_ports`
    only (version 4). Signals and abstract sockets: only among confined processes (version 6).
    """
    version = abi()
    if version == 0:
        raise OSError(errno.EOPNOTSUPP, "this kernel has no Landlock")
    files = (1 << _FILE_RIGHTS.get(version, _FILE_RIGHTS[5])) - 1
    net = _ALL_NET if version >= 4 else 0
    scopes = _ALL_SCOPES if version >= 6 else 0
    attributes = struct.pack("QQQ", files, net, scopes)
    ruleset = _call("landlock_create_ruleset", _CREATE_RULESET, attributes, len(attributes), 0)
    try:
        for path in readable:
            _allow_path(ruleset, path, files & _READ)
        for path in listed:
            _allow_path(ruleset, path, files & _READ_DIR)
        for path in writable:
            _allow_path(ruleset, path, files & ~(_MAKE_CHAR | _MAKE_BLOCK | _IOCTL_DEV))
        for path in _DEVICES:
            _allow_path(ruleset, path, files & (_READ_FILE | _WRITE_FILE | _TRUNCATE))
        _allow_path(ruleset, _ZERO, files & _READ_FILE)
        for port in connect_ports if net else ():
            rule = struct.pack("QQ", _CONNECT_TCP, port)
            _call("landlock_add_rule", _ADD_RULE, ruleset, _NET_PORT, rule, 0)
        linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
        flags = _LOG_SAME_EXEC_OFF if version >= 7 else 0
        _call("landlock_restrict_self", _RESTRICT_SELF, ruleset, flags)
    finally:
        os.close(ruleset)


def _allow_path(ruleset: int, path: str, rights: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:  # a path that cannot be reached needs no rule
        return
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISLNK(mode):
            return
        if not stat.S_ISDIR(mode):
            rights &= _OF_FILES
        if rights == 0:
            return
        rule = struct.pack("=Qi", rights, descriptor)
        _call("landlock_add_rule", _ADD_RULE, ruleset, _PATH_BENEATH, rule, 0)
    finally:
        os.close(descriptor)


def _call(name: str, number: int, *arguments: int | bytes) -> int:
    words = [
        ctypes.c_char_p(value) if isinstance(value, bytes) else ctypes.c_long(value)
        for value in arguments
    ]
    result: int = _libc.syscall(ctypes.c_long(number), *words)
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")
    return result
