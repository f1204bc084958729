"""Turns a fork of the in-sandbox server into a program that a model wrote.

Invariants when the first instruction of the program runs: the only descriptors are 0, 1 and 2; it
has only the variables that it was given; its limits and backend are in place; it is alone in its
session.
"""

from __future__ import annotations

import atexit
import gc
import io
import os
import resource
import signal
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple, NoReturn

from . import linux

MB = 2**20
NOT_STARTED = 127
_EXIT = os._exit  # programs run in this interpreter, and may replace the function
_ADDRESS_SPACE_MB = 4096
"""Address space beyond the memory limit: it costs nothing, and threads and numpy reserve much."""


class Program(NamedTuple):
    """`code` in a warm Python, or `argv` if `code` is None."""

    argv: list[str]
    code: str | None
    cwd: str
    env: dict[str, str]
    limits: dict[str, Any]


def become(
    program: Program, descriptors: tuple[int, int, int], enclose: Callable[[int], None]
) -> NoReturn:
    """Turns this process into the program.

    `descriptors`: its standard input, output and error; `enclose` drops the rights that it must not
    have, last.
    """
    status = NOT_STARTED
    try:
        os.setsid()
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
        os.closerange(3, 2**30)
        os.chdir(program.cwd)
        if program.code is not None:
            _set_variables(program.env)
        linux.prctl(linux.PR_SET_DUMPABLE, 1)  # so that the server can measure its memory
        _set_limits(program.limits)
        enclose(int(program.limits["processes"]))
        for number in (signal.SIGCHLD, signal.SIGPIPE, signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        if program.code is None:
            os.execvpe(program.argv[0], program.argv, program.env)
        status = _run_code(program.code, program.argv)
    except (OSError, ValueError) as error:
        name = program.argv[0] if program.argv and program.code is None else program.cwd
        reason = error.strerror if isinstance(error, OSError) else error
        os.write(2, f"{name}: {reason}\n".encode(errors="replace"))
    finally:
        _EXIT(status)


def _set_variables(env: dict[str, str]) -> None:
    """Only those that differ: a zygote has the usual ones already."""
    for name in [name for name in os.environ if name not in env]:
        del os.environ[name]
    for name, value in env.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


def _set_limits(limits: dict[str, Any]) -> None:
    memory = int(limits["memory_mb"]) * MB
    seconds = max(1, int(limits["cpu_seconds"] + 0.999))
    for name, soft, hard in (
        (resource.RLIMIT_CPU, seconds, seconds + 1),
        # Per process; the total is sampled. Somewhat higher, so that the sample decides.
        (resource.RLIMIT_DATA, memory + memory // 4 + 32 * MB, None),
        (resource.RLIMIT_AS, memory + _ADDRESS_SPACE_MB * MB, None),
        (resource.RLIMIT_FSIZE, int(limits["disk_mb"]) * MB, None),
        (resource.RLIMIT_NOFILE, int(limits["open_files"]), None),
        (resource.RLIMIT_CORE, 0, None),
        (resource.RLIMIT_MEMLOCK, 0, None),
        (resource.RLIMIT_MSGQUEUE, 0, None),
        (resource.RLIMIT_SIGPENDING, 256, None),
    ):
        linux.lower_limit(name, soft, hard)


def _run_code(code: str, argv: list[str]) -> int:
    """Runs `code` as the module __main__ and ends the way `python -c` would."""
    _start_afresh(argv)
    main = ModuleType("__main__")
    main.__builtins__ = sys.modules["builtins"]  # type: ignore[attr-defined]
    sys.modules["__main__"] = main
    try:
        exec(compile(code, "<string>", "exec"), main.__dict__)
        status = 0
    except SystemExit as end:
        status = _status_of(end)
    except BaseException as error:  # noqa: BLE001 - shown as Python shows it
        status = _tell(error)
    return _finish(status)


def warm_up() -> None:
    """Does once what every forked program would otherwise do first.

    The compiler initializes itself at its first use (a millisecond). The standard streams are made
    as Python makes them when the output is not a terminal; nothing was read or written.
    """
    exec(compile("pass", "<string>", "exec"), {})
    stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0)), encoding="utf-8")
    stdout = io.TextIOWrapper(io.BufferedWriter(io.FileIO(1, "w")), encoding="utf-8")
    raw = io.BufferedWriter(io.FileIO(2, "w"))
    stderr = io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", line_buffering=True)
    for name, stream in (("stdin", stdin), ("stdout", stdout), ("stderr", stderr)):
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _start_afresh(argv: list[str]) -> None:
    """Resets the state that two programs of one zygote must not share."""
    sys.argv = ["-c", *argv]
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    for name in ("random", "numpy.random"):
        if name in sys.modules:
            sys.modules[name].seed()
    gc.enable()


def _tell(error: BaseException) -> int:
    trace = error.__traceback__
    error.__traceback__ = trace.tb_next if trace is not None else None  # without this frame
    if "linecache" in sys.modules:
        sys.modules["linecache"].clearcache()
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except BaseException as second:  # noqa: BLE001 - a hook of the program's
        sys.__excepthook__(type(second), second, second.__traceback__)
    if isinstance(error, KeyboardInterrupt):
        return 130
    return 1


def _status_of(end: SystemExit) -> int:
    if end.code is None:
        return 0
    if isinstance(end.code, int):
        return end.code & 0xFF
    sys.stderr.write(f"{end.code}\n")
    return 1


def _finish(status: int) -> int:
    """Waits for threads, runs exit handlers, flushes buffers; returns the exit status."""
    try:
        if "threading" in sys.modules:
            sys.modules["threading"]._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
    except BaseException as error:  # noqa: BLE001 - handlers of the program's
        sys.__excepthook__(type(error), error, error.__traceback__)
        status = status or 120
    sys.stderr.flush()
    return status
