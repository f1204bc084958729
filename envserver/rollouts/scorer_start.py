"""Starts the processes of scorers: forked from a process that has imported the scorer's code, not
from the server, and without the caller's script and the server's own variables.

What holds: multiprocessing's own forkserver, start method and preloaded modules stay the caller's.
"""

from __future__ import annotations

import io
import os
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver, popen_forkserver, reduction, resource_tracker, util
from multiprocessing.context import (
    BaseContext,
    ForkServerContext,
    ForkServerProcess,
    set_spawning_popen,
)
from multiprocessing.process import BaseProcess
from pathlib import Path

from envserver_records.errors import ConfigError

from ..registry.interpreters import (
    SETTINGS,
    InterpreterContext,
    interpreter_of,
    preparation,
    start_method_stays,
)
from ..sandbox.places import folder_for_sockets
from . import scorer_process


class _Popen(popen_forkserver.Popen):
    """Starts one process; differs from its base class in the forkserver, and in `preparation`."""

    _fds: list[int]

    def _launch(self, process_obj: BaseProcess) -> None:
        data = io.BytesIO()
        set_spawning_popen(self)
        try:
            reduction.dump(preparation(process_obj.name), data)
            reduction.dump(process_obj, data)
        finally:
            set_spawning_popen(None)
        self.sentinel, pipe = _server.connect_to_new_process(self._fds)
        # By its end of this pipe the process sees that this one has ended.
        kept = os.dup(pipe)
        self.finalizer = util.Finalize(self, _close, (kept, self.sentinel))
        with os.fdopen(pipe, "wb") as file:
            file.write(data.getbuffer())
        self.pid = forkserver.read_signed(self.sentinel)


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


class _ScorerProcess(ForkServerProcess):
    @staticmethod
    def _Popen(process_obj: BaseProcess) -> _Popen:  # multiprocessing's name
        return _Popen(process_obj)


class _ScorerContext(ForkServerContext):
    Process = _ScorerProcess


def scorer_context(env_reference: str) -> BaseContext:
    """Returns the context that starts the scorers of an environment, in its interpreter.

    Not by forking the server: it has threads, and scorers must not see its memory.
    Raises ConfigError: no socket can be made anywhere.
    """
    if (own := interpreter_of(env_reference)) is not None:
        return InterpreterContext(own)
    _start_forkserver()
    return _ScorerContext()


def check_working_directory() -> None:
    """Raises ConfigError if the working directory is gone: no process can be started then."""
    try:
        Path.cwd()
    except FileNotFoundError:
        raise ConfigError(
            "The working directory of this process has been removed.",
            hint="Change to a folder that exists.",
        ) from None


def _forget_forkserver() -> None:
    """Takes another forkserver: a process that was forked cannot use that of its parent."""
    global _server
    _server = _own_forkserver()


def _own_forkserver() -> forkserver.ForkServer:
    own = forkserver.ForkServer()
    own.set_forkserver_preload([scorer_process.__name__])
    return own


_server = _own_forkserver()
os.register_at_fork(after_in_child=_forget_forkserver)


def _start_forkserver() -> None:
    """Starts the process that scorers are forked from, protected from Ctrl-C.

    A terminal sends Ctrl-C to all processes; the server decides how they react.
    """
    _place_its_socket()
    # First multiprocessing's helper: starting it unblocks the signal.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        with _without_settings(), start_method_stays():
            _server.ensure_running()
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
