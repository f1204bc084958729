"""Confines the calling process: it computes on what it has open, and can reach nothing else.

A decoder of hostile files may be made to run code of the file: that code finds no file, network,
other process or clock to set, as the kernel refuses every call that is not listed. Imports nothing
of this project, since it runs before the rest of it could.
"""

from __future__ import annotations

import ctypes
import platform
import resource
import struct

_LOAD, _EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _REFUSE, _KILL = 0x7FFF0000, 0x00050001, 0x80000000  # refused: EPERM
_NO_NEW_PRIVILEGES, _SECCOMP, _FILTER = 38, 22, 2
_COLUMNS = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
# Numbers on x86_64 and aarch64.
_ALLOWED = {
    "read": (0, 63),
    "write": (1, 64),
    "pread64": (17, 67),
    "lseek": (8, 62),
    "close": (3, 57),
    "fstat": (5, 80),
    "newfstatat": (262, 79),
    "getrandom": (318, 278),
    "mmap": (9, 222),
    "munmap": (11, 215),
    "mremap": (25, 216),
    "mprotect": (10, 226),
    "brk": (12, 214),
    "madvise": (28, 233),
    "futex": (202, 98),
    "sched_yield": (24, 124),
    "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "clock_gettime": (228, 113),
    "clock_nanosleep": (230, 115),
    "gettimeofday": (96, 169),
    "getpid": (39, 172),
    "gettid": (186, 178),
    "sched_getaffinity": (204, 123),
    "exit": (60, 93),
    "exit_group": (231, 94),
}


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_char_p)]


def limit(cpu_seconds: int, memory_mb: int) -> None:
    """Bounds processor time and memory; nothing can be written to a file."""
    for kind, most in (
        (resource.RLIMIT_CPU, cpu_seconds),
        (resource.RLIMIT_AS, memory_mb << 20),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(kind)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, most))


def confine() -> None:
    """Has the kernel refuse all system calls but those of a program that only computes."""
    if platform.machine() not in _COLUMNS:
        raise OSError(f"no list of system calls for {platform.machine()}")
    column, machine = _COLUMNS[platform.machine()]
    numbers = [both[column] for both in _ALLOWED.values()]
    code = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, machine), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, 0)]
    code += [(_EQUAL, len(numbers) - at, 0, number) for at, number in enumerate(numbers)]
    code += [(_RETURN, 0, 0, _REFUSE), (_RETURN, 0, 0, _ALLOW)]
    raw = b"".join(struct.pack("HBBI", *instruction) for instruction in code)
    libc = ctypes.CDLL(None, use_errno=True)
    zero = ctypes.c_ulong(0)
    program = ctypes.byref(_Program(len(code), raw))
    if libc.prctl(_NO_NEW_PRIVILEGES, ctypes.c_ulong(1), zero, zero, zero) or libc.prctl(
        _SECCOMP, ctypes.c_ulong(_FILTER), program, zero, zero
    ):
        raise OSError(ctypes.get_errno(), "the kernel takes no filter of system calls")
