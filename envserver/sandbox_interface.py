"""The definition of a sandbox, and its blocking form.

`sandbox/requests.py` has its methods as requests, which are sent by `sandbox/client.py` (over the
supervisor's socket), `sandbox/machines.py` (to another machine), `sandbox/maker.py` (guarded) and
`workers/run.py` (over HTTP, in a worker). `BlockingSandbox` derives its methods, with their types,
from `Sandbox`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from envserver_records.sandboxes import ExecResult, SandboxLimits, SandboxSpec, SandboxUsage

P = ParamSpec("P")
T = TypeVar("T")


class Sandbox(Protocol):
    """Runs programs that a model wrote: without network, away from the server's files, limited.

    Programs run one after the other; when one ends, everything it started is killed. Files that
    they write below /work stay until `close`. A program that fails or exceeds its limits is a
    result, not an exception.

    Raises (every method):
        SandboxError: the sandbox itself failed or is closed. Do not catch it: the rollout is
            retried.
    """

    id: str
    isolation: str
    """The backend: "namespace", "bubblewrap", "landlock", "docker" or "unsafe-local"."""

    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        cwd: str = "/work",
        env: dict[str, str] | None = None,
        limits: SandboxLimits | None = None,
    ) -> ExecResult:
        """Runs a program, found by PATH. A program that cannot be started exits with 127.

        Args:
            stdin: the program's input, at most `input_kb` of the sandbox's limits.
            env: variables added to the sandbox's own.
            limits: limits for this program; values above the sandbox's own are cut down to them.

        Raises:
            InputError: `stdin` is too large.
        """

    async def run_python(
        self,
        code: str,
        *,
        argv: Sequence[str] = (),
        stdin: bytes = b"",
        cwd: str = "/work",
        limits: SandboxLimits | None = None,
    ) -> ExecResult:
        """Runs `code` like `python -I -c code`, forked from a warm interpreter (milliseconds).

        The modules of the spec's `preload` are already imported. Raises like `exec`.
        """

    async def read(self, path: str, max_bytes: int = 1 << 20) -> bytes:
        """Returns the first `max_bytes` of a regular file; relative paths are below /work.

        Raises:
            InputError: the file does not exist or cannot be read.
        """

    async def write(self, path: str, data: bytes) -> None:
        """Replaces a file and creates its parent folders. Raises like `read`."""

    async def total(self) -> SandboxUsage:
        """Returns the resource usage of all programs so far."""

    async def close(self) -> None:
        """Ends the sandbox and waits until all its processes are gone. May be called twice."""


class RunningProgram(Protocol):
    """An interactive program in a sandbox: talk to it over its standard input and output."""

    result: ExecResult | None
    """How it ended; None until `receive` has returned b""."""

    async def send(self, data: bytes) -> None:
        """Sends input, at most `input_kb` of the sandbox's limits at once; waits while the program
        does not take it."""

    async def receive(self) -> bytes:
        """Returns the next output as soon as there is any; b"" when the program has ended."""


class Programs(Protocol):
    """Starts interactive programs: a `Rollout`, which documents it."""

    def open_program(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        spec: SandboxSpec | None = None,
    ) -> AbstractAsyncContextManager[RunningProgram]:
        """See `Rollout.open_program`."""


def _blocking(
    method: Callable[Concatenate[Sandbox, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[BlockingSandbox, P], T]:
    """Derives a method of `BlockingSandbox` from the method of `Sandbox`."""

    @functools.wraps(method)
    def call(self: BlockingSandbox, /, *args: P.args, **kwargs: P.kwargs) -> T:
        result: T = self.wait(getattr(self.sandbox, method.__name__)(*args, **kwargs))
        return result

    return call


class BlockingSandbox:
    """A `Sandbox` for code in a thread: the same methods, each returns when it is done.

    Args:
        wait: runs a coroutine on the event loop and waits for it in this thread.
    """

    def __init__(self, sandbox: Sandbox, wait: Callable[[Coroutine[Any, Any, Any]], Any]) -> None:
        self.id = sandbox.id
        self.isolation = sandbox.isolation
        self.sandbox = sandbox
        self.wait = wait

    exec = _blocking(Sandbox.exec)
    run_python = _blocking(Sandbox.run_python)
    read = _blocking(Sandbox.read)
    write = _blocking(Sandbox.write)
    total = _blocking(Sandbox.total)
    close = _blocking(Sandbox.close)


class Sandboxes(Protocol):
    """Opens sandboxes: `async with sandboxes.open(SandboxSpec()) as sandbox: ...`."""

    def open(self, spec: SandboxSpec) -> AbstractAsyncContextManager[Sandbox]:
        """Opens a fresh sandbox and closes it at the end of the block.

        Raises:
            SandboxError: no sandbox can be made now.
            InputError: a file or the archive of the spec cannot be unpacked or does not fit.
        """
