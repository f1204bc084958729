"""Turns a freshly forked child into a worker."""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import sys
import tempfile
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from . import linux, process
from .companions import Companion, give_companion
from .deaths import EXIT_CRASHED
from .printing import kept_stream

OUTSIDE = 0


@dataclass(frozen=True)
class WorkerSpec:
    """The data that a forked child needs to become a worker.

    Args:
        control: its socket to the server.
        output_fd: the pipe for all that it prints.
        directory: its own, for the current directory, HOME and TMPDIR.
        parent_pid: the process whose end is its own; OUTSIDE: of another namespace.
        kept_descriptors: what the environments opened while they were imported.
        heartbeat_seconds: how long it may say nothing.
        companion: the process beside it in its sandbox.
    """

    control: socket.socket
    output_fd: int
    directory: Path
    parent_pid: int
    kept_descriptors: set[int]
    heartbeat_seconds: float
    companion: Companion | None = None


def worker_main(spec: WorkerSpec) -> NoReturn:
    """Turns this process, just forked, into a worker; ends with it, running no exit handler."""
    code = EXIT_CRASHED
    try:
        _leave_the_nursery(spec)
        _settle_in(spec)
        process.main(spec.control, heartbeat_seconds=spec.heartbeat_seconds)
        code = 0
    except BaseException:  # noqa: BLE001 - the last frame: whatever it is, say it and end
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)


def _leave_the_nursery(spec: WorkerSpec) -> None:
    """Own session, process group and death pact; no descriptor or handler of the forkserver."""
    os.setsid()
    linux.die_with_parent(spec.parent_pid, signal.SIGKILL)
    linux.adopt_orphans()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if spec.parent_pid != OUTSIDE:  # else it is deaf to these
        for number in (signal.SIGTERM, signal.SIGINT):  # each ends us, and is seen
            signal.signal(number, signal.SIG_DFL)
    os.dup2(spec.output_fd, 1)
    os.dup2(spec.output_fd, 2)
    kept = {0, 1, 2, spec.control.fileno(), *spec.kept_descriptors}
    if spec.companion is not None:
        kept |= spec.companion.descriptors
    linux.close_all_but(kept)
    linux.limit_resources()


def _settle_in(spec: WorkerSpec) -> None:
    """Own directory, unbuffered lines of output, own random numbers, a trace at a crash."""
    os.chdir(spec.directory)
    os.environ["HOME"] = os.environ["TMPDIR"] = str(spec.directory)
    tempfile.tempdir = None
    sys.stdout, sys.stderr = kept_stream(1, "stdout"), kept_stream(2, "stderr")
    faulthandler.enable()
    linux.new_random_numbers()
    if spec.companion is not None:
        _expect(spec.companion)


def _expect(companion: Companion) -> None:
    """Waits for the companion to join; without one, agents fork what they need."""
    if companion.joined():
        give_companion(companion)
    else:
        sys.stderr.write("The companion of this worker could not start.\n")
