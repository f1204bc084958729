"""Forbids system calls: assembles a filter for the kernel.

A refused call fails with an ordinary error, so that libraries fall back. Only a call by a foreign
architecture's number kills, because the table does not apply to it.

Three reasons to refuse: the call reaches out of the sandbox (other processes, mounts, clocks), it
hides memory from the limits (memfd, shared memory without a file, large pipes), or it is a large
and rarely used part of the kernel (bpf, io_uring, keyrings). Calls newer than this table are
refused.
"""

from __future__ import annotations

import errno
import functools
import platform
import re
import struct
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from envserver_records.errors import ConfigError

from .linux import install_filter

# Classic BPF: operation codes, and the offsets in `struct seccomp_data`.
_LOAD, _AND = 0x20, 0x54
_IF_EQUAL, _IF_GREATER, _IF_AT_LEAST, _IF_ANY_BIT = 0x15, 0x25, 0x35, 0x45
_RETURN, _JUMP = 0x06, 0x05
_FEW = 3
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
_ALLOW, _ERRNO, _KILL_PROCESS = 0x7FFF0000, 0x00050000, 0x80000000

_X32_BIT = 0x40000000
_NEWEST_KNOWN = 462  # mseal, Linux 6.10; numbers from 424 on are the same everywhere

_CLONE_NEW_ANY = 0x7E020000
_PERSONALITY_QUERY = 0xFFFFFFFF
# A lease or a watch on a file of the server would block the server.
_F_SETLEASE, _F_NOTIFY, _F_SETPIPE_SZ = 1024, 1026, 1031
_TIOCSTI, _TIOCLINUX, _TIOCSETD = 0x5412, 0x541C, 0x5423
_SET_FILE_FLAGS, _SET_FILE_FLAGS_32, _SET_FILE_ATTRIBUTES = 0x40086602, 0x40046602, 0x401C5820
_MSG_FASTOPEN = 0x20000000  # connects without `connect`, unseen by Landlock
_MAP_HUGETLB, _MAP_SHARED_ANONYMOUS = 0x40000, 0x21
_FILE_TYPE, _CHARACTER_DEVICE, _BLOCK_DEVICE = 0xF000, 0x2000, 0x6000
_AF_UNIX, _AF_INET, _AF_INET6 = 1, 2, 10
_SOCK_STREAM, _SOCK_DGRAM, _SOCK_SEQPACKET, _SOCK_TYPE = 1, 2, 5, 0xF
_SOL_SOCKET, _BUFFER_SIZES = 1, (7, 8, 32, 33)  # SO_SNDBUF, SO_RCVBUF, and by force
_IP_TYPES = (_SOCK_STREAM, _SOCK_DGRAM)
_IP_PROTOCOLS = (0, 6, 17)  # the type's own, TCP, UDP


class _Machine(NamedTuple):
    audit: int
    column: int


_MACHINES = {"x86_64": _Machine(0xC000003E, 0), "aarch64": _Machine(0xC00000B7, 1)}

# A call's number on x86_64 and on aarch64; None (in tables "-"): the call does not exist there.
_Numbers = tuple[int | None, int | None]
# An instruction: operation, jump if true, jump if false, operand.
_Instruction = tuple[int, int, int, int]
_Code = list[_Instruction]

_CALL = re.compile(r"\w+ (\d+|-)/(\d+|-)")


def _calls(table: str) -> list[_Numbers]:
    found = _CALL.findall(table)
    assert len(found) == table.count("/"), "a call without its numbers"
    return [(_number(x86), _number(arm)) for x86, arm in found]


def _number(text: str) -> int | None:
    return None if text == "-" else int(text)


# By the error that a program gets.
_REFUSED: dict[int, list[_Numbers]] = {
    errno.EPERM: _calls("""
        mounts and roots:
            mount 165/40, umount2 166/39, pivot_root 155/41, chroot 161/51, open_tree 428/428,
            move_mount 429/429, fsopen 430/430, fsconfig 431/431, fsmount 432/432, fspick 433/433,
            mount_setattr 442/442, statmount 457/457, listmount 458/458
        namespaces and other processes:
            unshare 272/97, setns 308/268, ptrace 101/117, process_vm_readv 310/270,
            process_vm_writev 311/271, pidfd_getfd 438/438, kcmp 312/272, process_madvise 440/440,
            process_mrelease 448/448, ioprio_set 251/30, migrate_pages 256/238, move_pages 279/239
        memory outside the limits, and its placement:
            shmget 29/194, shmat 30/196, shmctl 31/195, shmdt 67/197, msgget 68/186, msgsnd 69/189,
            msgrcv 70/188, msgctl 71/187, semget 64/190, semop 65/193, semtimedop 220/192,
            semctl 66/191, mq_open 240/180, mq_unlink 241/181, mq_timedsend 242/182,
            mq_timedreceive 243/183, mq_notify 244/184, mq_getsetattr 245/185,
            memfd_secret 447/447, vmsplice 278/75, remap_file_pages 216/234, mbind 237/235,
            set_mempolicy 238/237, get_mempolicy 239/236, set_mempolicy_home_node 450/450
        keyrings, tracing, code in the kernel:
            add_key 248/217, request_key 249/218, keyctl 250/219, bpf 321/280,
            perf_event_open 298/241, userfaultfd 323/282, io_uring_setup 425/425,
            io_uring_enter 426/426, io_uring_register 427/427, create_module 174/-,
            init_module 175/105, finit_module 313/273, delete_module 176/106,
            get_kernel_syms 177/-, query_module 178/-, lookup_dcookie 212/18,
            lsm_get_self_attr 459/459, lsm_set_self_attr 460/460, lsm_list_modules 461/461
        the machine:
            kexec_load 246/104, kexec_file_load 320/294, reboot 169/142, swapon 167/224,
            swapoff 168/225, acct 163/89, syslog 103/116, settimeofday 164/170,
            clock_settime 227/112, clock_adjtime 305/266, adjtimex 159/171, sethostname 170/161,
            setdomainname 171/162, vhangup 153/58, sync 162/81, iopl 172/-, ioperm 173/-,
            modify_ldt 154/-
        files that bypass path checks, and those of all users:
            open_by_handle_at 304/265, name_to_handle_at 303/264, quotactl 179/60,
            quotactl_fd 443/443, fanotify_init 300/262, fanotify_mark 301/263
        obsolete:
            nfsservctl 180/42, uselib 134/-, ustat 136/-, sysfs 139/-, _sysctl 156/-,
            getpmsg 181/-, putpmsg 182/-, afs_syscall 183/-, tuxcall 184/-, security 185/-,
            vserver 236/-
    """),
    # Libraries take these errors for an older kernel and go on without. The flags of clone3 lie in
    # memory, where a filter cannot see them; libraries then use clone, which is checked. The kernel
    # limits inotify and io_setup for the whole machine, to a small number.
    errno.ENOSYS: _calls("""
        clone3 435/435, memfd_create 319/279, cachestat 451/451, inotify_init 253/-,
        inotify_init1 294/26, io_setup 206/0
    """),
    # Extended attributes take disk space that no limit counts.
    errno.EOPNOTSUPP: _calls("""
        setxattr 188/5, lsetxattr 189/6, fsetxattr 190/7, removexattr 197/14, lremovexattr 198/15,
        fremovexattr 199/16
    """),
}

# Without its own mounts, a program with the server's user could change the modes and times of
# the server's files: Landlock does not prevent it. These calls do nothing and report success,
# because copying tools call them for every file and would fail.
_PRETENDED = _calls("""
    chmod 90/-, fchmod 91/52, fchmodat 268/53, fchmodat2 452/452, chown 92/-, fchown 93/55,
    lchown 94/-, fchownat 260/54, utime 132/-, utimes 235/-, futimesat 261/-, utimensat 280/88
""")

# Calls that are judged by their arguments.
_CLONE, _PERSONALITY, _PRLIMIT64, _MMAP = (56, 220), (135, 92), (302, 261), (9, 222)
_IOCTL, _FCNTL, _SOCKET, _SOCKETPAIR = (16, 29), (72, 25), (41, 198), (53, 199)
_CONNECT, _BIND, _SETSOCKOPT = (42, 203), (49, 200), (54, 208)
# Calls that send, and which argument has their flags.
_SEND = (((44, 206), 3), ((46, 211), 2), ((307, 269), 3))
_SETPRIORITY, _SCHEDULING = (141, 140), ((203, 122), (144, 119), (142, 118), (314, 274))
_MAKE_NODE: tuple[tuple[_Numbers, int], ...] = (((133, None), 1), ((259, 33), 2))


@functools.cache
def program(*, inet: bool, host: bool = False) -> bytes:
    """The filter, ready for `install`.

    Args:
        inet: allow Unix, TCP and UDP sockets, for a sandbox with its own network. Else only
            connected pairs are allowed: even a Unix socket can reach a server of the host.
        host: the network is the host's: with `inet`, only TCP sockets that connect are allowed.
            Without `inet` the network is always the host's; in both cases files are the host's,
            too.
    """
    machine = _MACHINES.get(platform.machine())
    if machine is None:
        raise ConfigError(
            f"There is no system-call filter for {platform.machine()!r} machines.",
            hint=f"Known: {', '.join(_MACHINES)}. The backend 'docker' brings its own.",
        )
    code = _assemble(machine, inet=inet, host=host)
    return b"".join(struct.pack("HBBI", *instruction) for instruction in code)


install = install_filter


def _assemble(machine: _Machine, *, inet: bool, host: bool) -> _Code:
    column = machine.column
    code: _Code = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_IF_EQUAL, 1, 0, machine.audit),
        _return(_KILL_PROCESS),
        (_LOAD, 0, 0, _NUMBER),
    ]
    # x32 calls share the architecture of x86_64; no such number exists elsewhere.
    code += [(_IF_AT_LEAST, 0, 1, _X32_BIT), _return(_KILL_PROCESS)]
    code += [(_IF_GREATER, 0, 1, _NEWEST_KNOWN), _refuse(errno.ENOSYS)]
    bodies: dict[int | None, _Code] = {}
    for error, calls in _REFUSED.items():
        for numbers in calls:
            bodies.setdefault(numbers[column], [_refuse(error)])
    for numbers in () if inet and not host else _PRETENDED:
        bodies.setdefault(numbers[column], [_refuse(0)])
    for numbers, body in _judged(inet=inet, host=host):
        bodies.setdefault(numbers[column], body)
    ordered = sorted((number, body) for number, body in bodies.items() if number is not None)
    return code + _search(ordered)


def _search(ordered: list[tuple[int, _Code]]) -> _Code:
    """Builds a binary search: the kernel runs the filter at every call."""
    if len(ordered) <= _FEW:
        return [*(step for rule in ordered for step in _when(*rule)), _return(_ALLOW)]
    middle = len(ordered) // 2
    low, high = _search(ordered[:middle]), _search(ordered[middle:])
    return [(_IF_AT_LEAST, 0, 1, ordered[middle][0]), (_JUMP, 0, 0, len(low)), *low, *high]


def _judged(*, inet: bool, host: bool) -> Iterable[tuple[_Numbers, _Code]]:
    """Yields calls and the code that decides on each; every path of that code returns."""
    refuse, allow = _refuse(errno.EPERM), _return(_ALLOW)
    yield _CLONE, [_load(0), (_IF_ANY_BIT, 0, 1, _CLONE_NEW_ANY), refuse, allow]
    yield _PERSONALITY, [_load(0), (_IF_EQUAL, 1, 0, _PERSONALITY_QUERY), refuse, allow]
    only_self = [_load(0), (_IF_EQUAL, 1, 0, 0), refuse, allow]
    yield _PRLIMIT64, only_self
    for scheduling in _SCHEDULING:
        yield scheduling, only_self
    # setpriority(PRIO_PROCESS, 0, ...) only: other processes and whole users are refused.
    yield (
        _SETPRIORITY,
        [_load(0), (_IF_EQUAL, 0, 2, 0), _load(1), (_IF_EQUAL, 1, 0, 0), refuse, allow],
    )
    for numbers, argument in _MAKE_NODE:
        yield (
            numbers,
            [_load(argument), (_AND, 0, 0, _FILE_TYPE), *_one_of(_DEVICES, refuse), allow],
        )
    # Shared memory without a file survives when it is no longer mapped, and then belongs to no
    # process; huge pages are not counted for any process either.
    shared = [(_AND, 0, 0, _MAP_SHARED_ANONYMOUS), *_one_of((_MAP_SHARED_ANONYMOUS,), refuse)]
    yield _MMAP, [_load(3), (_IF_ANY_BIT, 0, 1, _MAP_HUGETLB), refuse, *shared, allow]
    yield _IOCTL, [_load(1), *_one_of(_REQUESTS, refuse), allow]
    yield _FCNTL, [_load(1), *_one_of((_F_SETLEASE, _F_NOTIFY, _F_SETPIPE_SZ), refuse), allow]
    # Larger buffers are memory that no limit sees; for programs the size is only a hint.
    larger = [_load(2), *_one_of(_BUFFER_SIZES, _refuse(0)), allow]
    yield _SETSOCKOPT, [_load(1), (_IF_EQUAL, 1, 0, _SOL_SOCKET), allow, *larger]
    no_family = _refuse(errno.EAFNOSUPPORT)
    unix_only = [_load(0), (_IF_EQUAL, 1, 0, _AF_UNIX), no_family]
    if inet and not host:
        yield _SOCKETPAIR, [*unix_only, allow]
        yield _SOCKET, _sockets(no_family, allow, _IP_TYPES, _IP_PROTOCOLS, _AF_UNIX)
    else:
        # One socket of a datagram pair could still send anywhere.
        connected = _one_of((_SOCK_STREAM, _SOCK_SEQPACKET), allow)
        yield _SOCKETPAIR, [*unix_only, _load(1), (_AND, 0, 0, _SOCK_TYPE), *connected, refuse]
        tcp = _sockets(no_family, allow, _IP_TYPES[:1], _IP_PROTOCOLS[:2])
        yield _SOCKET, tcp if inet else [no_family]
        yield _CONNECT, [allow if inet else refuse]
        yield _BIND, [refuse]
        for sending, argument in _SEND:
            yield sending, [_load(argument), (_IF_ANY_BIT, 0, 1, _MSG_FASTOPEN), refuse, allow]


_DEVICES = (_CHARACTER_DEVICE, _BLOCK_DEVICE)
_REQUESTS = (
    *(_TIOCSTI, _TIOCLINUX, _TIOCSETD),
    *(_SET_FILE_FLAGS, _SET_FILE_FLAGS_32, _SET_FILE_ATTRIBUTES),
)


def _sockets(
    refuse: _Instruction,
    allow: _Instruction,
    types: Sequence[int],
    protocols: Sequence[int],
    *families: int,
) -> _Code:
    """Allows IP sockets of these types and protocols, and any sockets of the other `families`."""
    code = [_load(0), *_one_of(families, allow), *_none_of((_AF_INET, _AF_INET6), refuse)]
    code += [_load(1), (_AND, 0, 0, _SOCK_TYPE), *_none_of(types, refuse)]
    return [*code, _load(2), *_one_of(protocols, allow), refuse]


def _when(number: int, body: _Code) -> _Code:
    """Runs `body` for one call; other calls jump over it."""
    return [(_IF_EQUAL, 0, len(body), number), *body]


def _one_of(values: Iterable[int], then: _Instruction) -> _Code:
    """Runs `then` if the loaded value is one of `values`; otherwise continues."""
    code: _Code = []
    for value in values:
        code += [(_IF_EQUAL, 0, 1, value), then]
    return code


def _none_of(values: Sequence[int], then: _Instruction) -> _Code:
    """Runs `then` if the loaded value is none of `values`; otherwise continues."""
    return [*((_IF_EQUAL, len(values) - at, 0, value) for at, value in enumerate(values)), then]


def _load(argument: int) -> _Instruction:
    """Loads the lower half of an argument: the kernel uses only that in these calls."""
    return (_LOAD, 0, 0, _ARGUMENTS + 8 * argument)


def _refuse(error: int) -> _Instruction:
    return _return(_ERRNO | error)


def _return(action: int) -> _Instruction:
    return (_RETURN, 0, 0, action)
