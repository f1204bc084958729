"""The parent process of an engine: ends all of the engine when we or the engine end.

    python -I -S keeper.py GRACE_SECONDS COMMAND ...

Imports the standard library only. The engine runs in a session of its own, so that all its
processes can be ended together: when our end of standard input closes (we ended, by whatever
signal), at SIGTERM, or when the engine's first process is gone. The first line on standard output
is that process's id; the exit status is the engine's, or 128 + n if signal n ended it. If the
keeper itself is killed, the engine's first process is killed with it (Linux).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time

_PR_SET_PDEATHSIG = 1
_LOOK_SECONDS = 0.2


class _StopRequested(Exception): ...


def main(argv: list[str]) -> int:
    grace_seconds, command = float(argv[0]), argv[1:]
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _tell)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    engine = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=2, start_new_session=True, preexec_fn=_die_with_us
    )
    with contextlib.suppress(_StopRequested):
        os.write(1, b"%d\n" % engine.pid)
        while engine.poll() is None:
            readable, _, _ = select.select([0], [], [], _LOOK_SECONDS)
            if readable and not os.read(0, 4096):
                break
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _end(engine, grace_seconds)
    status = engine.wait()
    return status if status >= 0 else 128 - status


def _tell(number: int, frame: object) -> None:
    raise _StopRequested


def _die_with_us() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _end(engine: subprocess.Popen[bytes], grace_seconds: float) -> None:
    _signal(engine, signal.SIGTERM)
    end = time.monotonic() + grace_seconds
    while engine.poll() is None and time.monotonic() < end:
        time.sleep(0.05)
    _signal(engine, signal.SIGKILL)


def _signal(engine: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(engine.pid, number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
