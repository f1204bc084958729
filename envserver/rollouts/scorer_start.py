"""Starts the processes of scorers: forked from a process that has imported the scorer's code, not
from the server, and without the caller's script and the server's own variables.
"""

from __future__ import annotations

import os
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver, popen_forkserver, resource_tracker, spawn, util
from multiprocessing.context import BaseContext, ForkServerContext, ForkServerProcess
from multiprocessing.process import BaseProcess
from typing import Any

from ..registry.interpreters import SETTINGS, InterpreterContext, interpreter_of
from ..sandbox.places import folder_for_sockets
from ..workers.linux import die_with_parent
from . import scorer_process


class _Popen(popen_forkserver.Popen):
    """Starts a process that does not import the caller's script.

    multiprocessing would import it into each process, and so run it again where it has no
    `if __name__ == "__main__"`. Scorers need nothing of it.
    """

    def _launch(self, process_obj: BaseProcess) -> None:
        with _without_script():
            super()._launch(process_obj)  # type: ignore[misc]  # not in typeshed


class _ScorerProcess(ForkServerProcess):
    @staticmethod
    def _Popen(process_obj: BaseProcess) -> _Popen:  # multiprocessing's name
        return _Popen(process_obj)

    def run(self) -> None:
        """Serves; ends at once when the server has ended, even killed, whatever it is doing."""
        _let_the_forkserver_end()
        die_with_parent(os.getppid(), signal.SIGKILL)
        super().run()


class _ScorerContext(ForkServerContext):
    Process = _ScorerProcess


def scorer_context(env_reference: str) -> BaseContext:
    """Returns the context that starts the scorers of an environment, in its interpreter.

    Not by forking the server: it has threads, and scorers must not see its memory.
    """
    if (own := interpreter_of(env_reference)) is not None:
        return InterpreterContext(own)
    context = _ScorerContext()
    context.set_forkserver_preload([scorer_process.__name__])
    _start_forkserver()
    return context


_launching = threading.Lock()


@contextmanager
def _without_script() -> Iterator[None]:
    """Removes the script (`init_main_from_...`) from the data that a new process gets."""
    with _launching:
        original = spawn.get_preparation_data

        def prepared(name: str) -> dict[str, Any]:
            data = original(name)
            return {key: value for key, value in data.items() if not key.startswith("init_main")}

        spawn.get_preparation_data = prepared
        try:
            yield
        finally:
            spawn.get_preparation_data = original


def _let_the_forkserver_end() -> None:
    """Gives up this process's end of the pipe by which each process keeps the forkserver alive.

    The server alone keeps it: else a scorer that hangs would outlive a killed server for ever.
    """
    nothing = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    os.dup2(nothing, forkserver._forkserver._forkserver_alive_fd, inheritable=False)  # type: ignore[attr-defined]  # not in typeshed
    os.close(nothing)


def _start_forkserver() -> None:
    """Starts the process that scorers are forked from, protected from Ctrl-C.

    A terminal sends Ctrl-C to all processes; the server decides how they react.
    """
    _place_its_socket()
    # First multiprocessing's helper: starting it unblocks the signal.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        with _without_settings():
            forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _without_settings() -> Iterator[None]:
    """Hides the server's own variables, its keys among them, from a process that starts within."""
    ours = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith(SETTINGS)}
    try:
        yield
    finally:
        os.environ.update(ours)


def _place_its_socket() -> None:
    """Makes multiprocessing choose its folder once, early, where a socket's path fits."""
    usual = tempfile.tempdir
    tempfile.tempdir = folder_for_sockets()
    try:
        util.get_temp_dir()
    finally:
        tempfile.tempdir = usual
