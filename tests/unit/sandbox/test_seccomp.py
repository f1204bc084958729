"""Runs the system-call filter in an interpreter, to cover architectures other than this one."""

from __future__ import annotations

import errno
import platform
import struct

import pytest
from envserver_records.errors import ConfigError

from envserver.sandbox import seccomp

AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
ALLOW, KILL = 0x7FFF0000, 0x80000000


def refused(error: int) -> int:
    return 0x00050000 | error


def verdict(program: bytes, audit: int, number: int, *arguments: int) -> int:
    """What the kernel would do about a call: classic BPF, as far as filters use it."""
    data = struct.pack("=IIQ6Q", number, audit, 0, *arguments, *[0] * (6 - len(arguments)))
    code = [struct.unpack_from("HBBI", program, place) for place in range(0, len(program), 8)]
    place = value = 0
    while True:
        operation, if_so, if_not, operand = code[place]
        place += 1
        match operation:
            case 0x20:
                (value,) = struct.unpack_from("=I", data, operand)
            case 0x54:
                value &= operand
            case 0x05:
                place += operand
            case 0x15:
                place += if_so if value == operand else if_not
            case 0x25:
                place += if_so if value > operand else if_not
            case 0x35:
                place += if_so if value >= operand else if_not
            case 0x45:
                place += if_so if value & operand else if_not
            case 0x06:
                return operand
            case _:
                raise AssertionError(f"{operation:#x} is unknown")


PERM, NONE, FAMILY = refused(errno.EPERM), refused(errno.ENOSYS), refused(errno.EAFNOSUPPORT)

# Name, its numbers, arguments, verdict with a network of its own, and without.
CALLS = [
    ("read", (0, 63), (0, 0, 1), ALLOW, ALLOW),
    ("openat", (257, 56), (), ALLOW, ALLOW),
    ("execve", (59, 221), (), ALLOW, ALLOW),
    ("mmap", (9, 222), (0, 4096, 3, 0x22), ALLOW, ALLOW),
    ("mmap of a shared file", (9, 222), (0, 4096, 3, 0x01, 3), ALLOW, ALLOW),
    ("mmap of shared memory", (9, 222), (0, 4096, 3, 0x21), PERM, PERM),
    ("mmap of huge pages", (9, 222), (0, 4096, 3, 0x40022), PERM, PERM),
    ("io_setup", (206, 0), (1,), NONE, NONE),
    ("futex", (202, 98), (), ALLOW, ALLOW),
    ("exit_group", (231, 94), (), ALLOW, ALLOW),
    ("getrandom", (318, 278), (), ALLOW, ALLOW),
    ("close_range", (436, 436), (), ALLOW, ALLOW),
    ("mseal", (462, 462), (), ALLOW, ALLOW),
    ("mount", (165, 40), (), PERM, PERM),
    ("setns", (308, 268), (), PERM, PERM),
    ("ptrace", (101, 117), (), PERM, PERM),
    ("reboot", (169, 142), (), PERM, PERM),
    ("lsm_list_modules", (461, 461), (), PERM, PERM),
    ("clone3", (435, 435), (), NONE, NONE),
    ("a call of tomorrow", (463, 463), (), NONE, NONE),
    ("a thread", (56, 220), (0x3D0F00,), ALLOW, ALLOW),
    ("a user namespace", (56, 220), (0x10000011,), PERM, PERM),
    ("its own limits", (302, 261), (0, 7), ALLOW, ALLOW),
    ("another's limits", (302, 261), (4242, 7), PERM, PERM),
    ("another's limits, by a number with a tail", (302, 261), (1 << 32 | 4242, 7), PERM, PERM),
    ("its own priority", (141, 140), (0, 0, 5), ALLOW, ALLOW),
    ("a group's priority", (141, 140), (1, 0, 5), PERM, PERM),
    ("a pipe in the file system", (259, 33), (0, 0, 0o010644), ALLOW, ALLOW),
    ("a device", (259, 33), (0, 0, 0o020644), PERM, PERM),
    ("window size", (16, 29), (0, 0x5413), ALLOW, ALLOW),
    ("typing into a terminal", (16, 29), (0, 1 << 32 | 0x5412), PERM, PERM),
    ("a lock", (72, 25), (3, 6), ALLOW, ALLOW),
    ("a lease", (72, 25), (3, 1024), PERM, PERM),
    ("a Unix socket", (41, 198), (1, 1, 0), ALLOW, FAMILY),
    ("TCP", (41, 198), (2, 1 | 0o2000000, 6), ALLOW, FAMILY),
    ("UDP over IPv6", (41, 198), (10, 2, 0), ALLOW, FAMILY),
    ("raw IP", (41, 198), (2, 3, 1), FAMILY, FAMILY),
    ("vsock", (41, 198), (40, 1, 0), FAMILY, FAMILY),
    ("a pair", (53, 199), (1, 1, 0), ALLOW, ALLOW),
    ("a pair of datagram sockets", (53, 199), (1, 2, 0), ALLOW, PERM),
    ("a large buffer", (54, 208), (3, 1, 7), refused(0), refused(0)),
    ("another option", (54, 208), (3, 1, 2), ALLOW, ALLOW),
    ("an option of TCP", (54, 208), (3, 6, 7), ALLOW, ALLOW),
    ("connect", (42, 203), (), ALLOW, PERM),
    ("chmod by a descriptor", (91, 52), (), ALLOW, refused(0)),
    ("times of a file", (280, 88), (), ALLOW, refused(0)),
]


@pytest.mark.parametrize("machine", AUDIT)
@pytest.mark.parametrize("inet", [True, False], ids=["own network", "no network"])
def test_every_call_gets_its_verdict(
    machine: str, inet: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    program = seccomp.program.__wrapped__(inet=inet)
    assert len(program) // 8 < 4096  # the kernel takes no longer one
    column = 0 if machine == "x86_64" else 1
    found = {
        name: verdict(program, AUDIT[machine], numbers[column], *arguments)
        for name, numbers, arguments, *_ in CALLS
    }
    assert found == {name: with_it if inet else without for name, *_, with_it, without in CALLS}
    other = AUDIT["aarch64" if machine == "x86_64" else "x86_64"]
    assert verdict(program, other, 0) == KILL
    assert verdict(program, AUDIT[machine], 0x40000000) == KILL


def test_a_machine_without_a_table_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    with pytest.raises(ConfigError, match="riscv64"):
        seccomp.program.__wrapped__(inet=True)
