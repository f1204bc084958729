"""Starts processes of multiprocessing in the interpreter of an environment.

Both sides run the same envserver, the one of the server (`Interpreter.search_path`), with other
libraries, and exchange pickles.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from multiprocessing import popen_spawn_posix, reduction, resource_tracker, spawn, util
from multiprocessing.context import SpawnContext, SpawnProcess, set_spawning_popen
from multiprocessing.process import BaseProcess
from typing import Any, NoReturn, cast

from .installed import Interpreter

SETTINGS = "ENVSERVER_"
"""Prefix of the server's environment variables, which these processes do not get."""
PYTHON_VARIABLES = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
"""Variables that lead to the server's libraries; its own interpreter must not follow them."""


def variables(server: Mapping[str, str]) -> dict[str, str]:
    """Returns the server's environment variables without its settings and its libraries."""
    return {
        name: value
        for name, value in server.items()
        if not name.startswith(SETTINGS) and name not in PYTHON_VARIABLES
    }


def become(python: Interpreter, argv: list[str]) -> NoReturn:
    """Replaces this process by `envserver` with `argv` in the interpreter `python`, at the same
    terminal: there the environment is one of its own."""
    program = (
        f"import sys; sys.path[:] = {python.search_path!r}; "
        f"from envserver.cli import main; sys.exit(main({argv!r}))"
    )
    kept = {name: value for name, value in os.environ.items() if name not in PYTHON_VARIABLES}
    os.execve(python.executable, [python.executable, "-P", "-c", program], kept)


class InterpreterContext(SpawnContext):
    def __init__(self, interpreter: Interpreter) -> None:
        super().__init__()
        self.Process = partial(_Process, interpreter)  # type: ignore[misc, assignment]


class _Process(SpawnProcess):
    def __init__(self, interpreter: Interpreter, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.interpreter = interpreter

    @staticmethod
    def _Popen(process_obj: BaseProcess) -> _Popen:  # multiprocessing's name
        return _Popen(process_obj)


class _Popen(popen_spawn_posix.Popen):
    """Starts one process; differs from its base class in the program, its path and variables."""

    _fds: list[int]

    def _launch(self, process_obj: BaseProcess) -> None:
        assert isinstance(process_obj, _Process)
        python = process_obj.interpreter
        tracker = cast(int, resource_tracker.getfd())
        self._fds.append(tracker)
        data = dumped(self, process_obj, sys_path=python.search_path)
        parent_reads, child_writes = os.pipe()
        child_reads, parent_writes = os.pipe()
        try:
            passed = [*self._fds, child_reads, child_writes]
            self.pid = _spawn(python, tracker, passed, child_reads)
        finally:
            os.close(child_reads)
            os.close(child_writes)
        self.sentinel = parent_reads
        self.finalizer = util.Finalize(self, os.close, (parent_reads,))
        with os.fdopen(parent_writes, "wb") as pipe:
            pipe.write(data)


def dumped(popen: Any, process_obj: BaseProcess, **facts: Any) -> memoryview:
    """Returns what a process that `popen` starts gets first: facts, and itself.

    It does not import the caller's script, as multiprocessing would: that would run it again where
    it has no `if __name__ == "__main__"`.
    """
    with start_method_stays():
        given = spawn.get_preparation_data(process_obj.name)
    own = {key: value for key, value in given.items() if not key.startswith("init_main")}
    data = io.BytesIO()
    set_spawning_popen(popen)
    try:
        reduction.dump({**own, **facts}, data)
        reduction.dump(process_obj, data)
    finally:
        set_spawning_popen(None)
    return data.getbuffer()


@contextmanager
def start_method_stays() -> Iterator[None]:
    """Leaves multiprocessing's start method for the caller to choose: its parts settle it."""
    before = multiprocessing.get_start_method(allow_none=True)
    try:
        yield
    finally:
        if before is None:
            multiprocessing.set_start_method(None, force=True)


def _spawn(python: Interpreter, tracker: int, descriptors: list[int], reads: int) -> int:
    program = (
        "from multiprocessing.spawn import spawn_main; "
        f"spawn_main(tracker_fd={tracker}, pipe_handle={reads})"
    )
    words = [python.executable, "-P", "-c", program, "--multiprocessing-fork"]
    # -P: what lies in the working directory is not imported.
    # To duplicate a descriptor to itself is how posix_spawn passes it on.
    kept = [(os.POSIX_SPAWN_DUP2, each, each) for each in sorted(set(descriptors))]
    # A terminal sends Ctrl-C to all processes; the server decides how they react.
    return os.posix_spawn(
        words[0],
        words,
        variables(os.environ),
        file_actions=kept,
        setsigmask=[signal.SIGINT],
    )
