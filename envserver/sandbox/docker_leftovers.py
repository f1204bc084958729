"""Removes the containers that a killed server left: its own are named after it.

A container ends when its server does, since its input ends. One stays if the engine's command was
killed before it asked the engine to start it or to remove it. A name identifies the server: the
boot of its machine, its pid namespace, process id and start time. So only a server that certainly
runs no more is cleaned up after: one of this boot and this namespace, whose process is gone.
"""

from __future__ import annotations

import os
import subprocess
import uuid
from pathlib import Path

from .docker import LABEL, Engine, asked

_SECONDS = 60.0
_START_TIME = 19
"""Its field in /proc/PID/stat, counted after the name."""


def new_prefix() -> str:
    """Returns the beginning of the names of containers for one service of this process."""
    started = _start_time(os.getpid()) or 0
    return f"{_here()}-{os.getpid()}-{started}-{uuid.uuid4().hex[:8]}"


def remove_leftovers(engine: Engine, prefix: str = "") -> list[str]:
    """Removes the containers of servers that are gone; returns their names.

    Args:
        prefix: removes those whose names begin so instead.
    """
    names = [name for name in _names(engine) if _is_left(name, prefix)]
    if names:
        words = ("rm", "--force", "--volumes", *names)
        asked(engine.program, engine.variables, *words, seconds=_SECONDS)
    return names


def _is_left(name: str, prefix: str) -> bool:
    if prefix:
        return name.startswith(f"{prefix}-")
    parts = name.split("-")
    if not name.startswith(f"{_here()}-") or len(parts) != 7:
        return False
    pid, started = parts[3], parts[4]
    return pid.isdigit() and started.isdigit() and _is_gone(int(pid), int(started))


def _is_gone(pid: int, started: int) -> bool:
    known = _start_time(pid)
    if known is not None:
        return known != started
    # A /proc with `hidepid` has no processes of others: their signals are refused.
    try:
        os.kill(pid, 0)
    except PermissionError:
        return False
    except (OSError, OverflowError):
        pass
    return True


def _names(engine: Engine) -> list[str]:
    words = ("ps", "--all", "--filter", f"label={LABEL}", "--format", "{{.Names}}")
    try:
        done = subprocess.run(
            [engine.program, *words],
            env=engine.variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.split()


def _here() -> str:
    """The beginning of the names of this machine's servers: its boot and this pid namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")[:12]
    return f"envserver-{boot}-{Path('/proc/self/ns/pid').stat().st_ino}"


def _start_time(pid: int) -> int | None:
    """Returns the start time of a process, in ticks since the boot; None: there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in ("Z", "X") else int(fields[_START_TIME])
