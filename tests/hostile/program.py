"""What a hostile program is, and what it is told about the host.

Every program is bounded by itself: it stops at a few hundred processes or megabytes, what it leaves
behind ends within half a minute, calls that would harm are made with arguments that cannot, and a
broadcast signal is one that nobody minds. So a wall that does not hold costs a red test, not the
machine.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal

from envserver import InputError, Sandbox, SandboxLimits

USUAL = SandboxLimits(
    wall_seconds=6,
    cpu_seconds=6,
    memory_mb=128,
    disk_mb=16,
    inodes=512,
    processes=16,
    open_files=64,
    output_kb=16,
    input_kb=64,
)
BRIEF = SandboxLimits(
    wall_seconds=1,
    cpu_seconds=1,
    memory_mb=128,
    disk_mb=16,
    inodes=512,
    processes=16,
    open_files=64,
    output_kb=16,
    input_kb=64,
)

AMPLE = SandboxLimits(wall_seconds=90, cpu_seconds=30)

Told = dict[str, str | int]
"""What a program knows of the host: each is a variable of that name."""
FollowUp = Callable[[Sandbox, Told], Awaitable[bytes]]


@dataclass(frozen=True, kw_only=True)
class Hostile:
    """One program.

    Args:
        must: what has to happen.
        source: Python after PRELUDE, or a shell script that has the same names as variables.
        ends: what may end it: reasons of `killed_by`, "exit N" or "signal N"; nothing: anything.
        prints: exactly its standard output, where that matters.
        then: asked of the same sandbox afterwards; what it returns is searched for secrets too.
        seconds: it must have returned by then (its wall time and a minute where unset).
        needs: a module without which it is left out.
    """

    name: str
    must: str
    source: str
    language: Literal["python", "shell"] = "python"
    limits: SandboxLimits = USUAL
    ends: tuple[str, ...] = ()
    prints: str | None = None
    then: FollowUp | None = None
    stdin: bytes = b""
    preload: tuple[str, ...] = ()
    seconds: float | None = None
    needs: str | None = None


@dataclass(frozen=True, kw_only=True)
class Ordinary:
    """A program that has to work: it exits with 0, and `prints` is in its standard output."""

    name: str
    source: str
    prints: str
    language: Literal["python", "shell"] = "python"
    limits: SandboxLimits = AMPLE
    files: dict[str, bytes] | None = None
    needs: str | None = None


# Numbers of system calls on x86-64 and aarch64 (-1: there is none).
CALLS = {
    "acct": (163, 89), "add_key": (248, 217), "bpf": (321, 280), "chroot": (161, 51),
    "clock_settime": (227, 112), "clone3": (435, 435), "fanotify_init": (300, 262),
    "finit_module": (313, 273), "fsopen": (430, 430), "init_module": (175, 105),
    "io_uring_setup": (425, 425), "iopl": (172, -1), "ioprio_set": (251, 30),
    "kexec_load": (246, 104), "keyctl": (250, 219), "kcmp": (312, 272),
    "memfd_create": (319, 279), "mknodat": (259, 33), "modify_ldt": (154, -1),
    "mount": (165, 40), "move_mount": (429, 429), "mq_open": (240, 180), "msgget": (68, 186),
    "msgsnd": (69, 189), "open_by_handle_at": (304, 265), "open_tree": (428, 428),
    "perf_event_open": (298, 241), "pidfd_getfd": (438, 438), "pidfd_open": (434, 434),
    "pidfd_send_signal": (424, 424), "pivot_root": (155, 41), "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271), "ptrace": (101, 117), "quotactl": (179, 60),
    "reboot": (169, 142), "request_key": (249, 218), "sethostname": (170, 161),
    "setns": (308, 268), "settimeofday": (164, 170), "shmget": (29, 194), "swapon": (167, 224),
    "syslog": (103, 116), "umount2": (166, 39), "unshare": (272, 97), "userfaultfd": (323, 282),
}  # fmt: skip

PRELUDE = """\
import ctypes, errno, os, signal, socket, struct, sys, time
libc = ctypes.CDLL(None, use_errno=True)
CALLS = {name: numbers[os.uname().machine == "aarch64"] for name, numbers in CALLS.items()}
REFUSED = {errno.EPERM, errno.EACCES, errno.ENOSYS, errno.EAFNOSUPPORT, errno.EPROTONOSUPPORT}

def call(name, *arguments):
    ctypes.set_errno(0)
    result = libc.syscall(CALLS[name], *arguments)
    return result, ctypes.get_errno()

def got(what=""):
    os.write(1, ("GOT" + f"-IN {MARK} {what}\\n").encode())

def attempt(name, *arguments):
    "Says so when the kernel would have let us: it did it, or found fault with the arguments only."
    result, error = call(name, *arguments)
    if CALLS[name] >= 0 and (result >= 0 or error not in REFUSED):
        got(f"{name} {result} {errno.errorcode.get(error)}")
    return result

def show(path, most=1 << 16):
    try:
        with open(path, "rb") as file:
            os.write(1, file.read(most))
    except (OSError, ValueError):
        pass

WORK = os.getcwd()
libc.prctl(15, MARK.encode())  # whatever it forks carries the mark

"""


def reading(path: str) -> FollowUp:
    """A read of that path; to be told that there is no such file is fine."""

    async def read(box: Sandbox, told: Told) -> bytes:
        try:
            return await box.read(path.replace("MARK", str(told["MARK"])))
        except InputError:
            return b""

    return read


def running(source: str) -> FollowUp:
    """A second Python program in the same sandbox, which has the prelude too."""

    async def run(box: Sandbox, told: Told) -> bytes:
        result = await box.run_python(python(source, told), limits=USUAL)
        return result.stdout + result.stderr

    return run


async def still_works(box: Sandbox, told: Told) -> bytes:
    """Another program in the same sandbox runs as if nothing had happened."""
    result = await box.run_python("print('fine')")
    assert result.stdout == b"fine\n", f"the next program ended so: {result}"
    return b""


def python(source: str, told: Told) -> str:
    """The whole Python program."""
    known = "".join(f"{name} = {value!r}\n" for name, value in told.items())
    return f"{known}CALLS = {json.dumps(CALLS)}\n{PRELUDE}{source}"


def shell(told: Told) -> dict[str, str]:
    """The variables of a shell script."""
    return {name: str(value) for name, value in told.items()}
