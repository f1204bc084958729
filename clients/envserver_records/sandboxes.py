from __future__ import annotations

from typing import Literal

import msgspec

KilledBy = Literal[
    "", "wall", "cpu", "memory", "disk", "inodes", "processes", "output", "cancelled", "lost"
]
"""Reason why a program in a sandbox was killed: a limit, the caller ("cancelled"), or a failure of
the server ("lost"). Empty if the program ended by itself, also by a signal that it caused."""


class SandboxLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of one program in a sandbox; disk and inodes are for the whole sandbox.

    MB are 2**20 bytes, KB 2**10. `output_kb` applies to stdout and stderr each: more is cut off and
    marked; a program that writes eight times as much is killed.
    """

    wall_seconds: float = 10.0
    cpu_seconds: float = 10.0
    memory_mb: int = 512
    disk_mb: int = 64
    inodes: int = 4096
    processes: int = 32
    open_files: int = 256
    output_kb: int = 64
    input_kb: int = 1024


class SandboxSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Describes a sandbox: `/work` with `files`, a read-only system, no network.

    Args:
        files: contents by path below /work; parents are made.
        archive: a tar file to unpack into /work first.
        env: environment variables in addition to PATH, HOME, LANG and TMPDIR.
        preload: modules to import before the sandbox is closed, shared by all sandboxes with the
            same list, so that `run_python` has them at no cost. Only trusted code may set it.
        limits: limits of every program; `exec` may lower them.
        image: container image for the backend `docker` ("": `--sandbox.docker_image`); other
            backends refuse it with SandboxUnavailable.
        image_hides: directories of the image that are empty in this sandbox.
    """

    files: dict[str, bytes] = {}
    archive: bytes | None = None
    env: dict[str, str] = {}
    preload: tuple[str, ...] = ()
    limits: SandboxLimits = SandboxLimits()
    image: str = ""
    image_hides: tuple[str, ...] = ()


class SandboxUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Resources that programs in a sandbox used; for several (`Sandbox.total`) sums and peaks.

    `cpu_exact`: all CPU time is counted. `memory_exact`: the peak is the kernel's, not sampled.
    `executions`: number of programs. `killed`: number by KilledBy, without "".
    """

    wall_seconds: float = 0.0
    cpu_seconds: float = 0.0
    cpu_exact: bool = False
    peak_memory_mb: float = 0.0
    memory_exact: bool = False
    read_bytes: int = 0
    written_bytes: int = 0
    output_bytes: int = 0
    disk_mb: float = 0.0
    peak_processes: int = 0
    executions: int = 1
    killed: dict[str, int] = {}


class ExecResult(msgspec.Struct, frozen=True, kw_only=True):
    """How one program in a sandbox ended.

    Args:
        exit: its exit status, None where a signal ended it.
        signal: the number of the signal that ended it.
        killed_by: see KilledBy; if it is not "", exit and signal say nothing about the program.
        truncated: stdout or stderr were longer than stored here.
    """

    exit: int | None
    signal: int | None = None
    killed_by: KilledBy = ""
    stdout: bytes = b""
    stderr: bytes = b""
    truncated: bool = False
    usage: SandboxUsage = SandboxUsage()

    @property
    def ok(self) -> bool:
        return self.exit == 0 and not self.killed_by
