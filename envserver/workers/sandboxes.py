"""A sandbox on the server, as an agent in a worker uses it: `environment.Sandbox` over HTTP.

Each method is one request; one that is cancelled hangs up, and the server ends what it began. The
blocking form is the same for an agent that runs in a thread.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import msgspec
from envserver_records.errors import EnvserverError, SandboxLost
from envserver_records.records import ExecResult, SandboxLimits, SandboxSpec, SandboxUsage

from ..environment import Sandbox
from ..sandbox.requests import Exec, Open, Opened, Read, RunPython, Write

T = TypeVar("T")

Ask = Callable[[str, bytes], Awaitable[bytes]]
"""Posts a body to a path below the attempt's `sandbox/`; gives the body of a good answer."""

Wait = Callable[[Coroutine[Any, Any, Any]], Any]
"""Runs a coroutine on the worker's loop and waits for it in a thread."""


class Opening:
    """`async with` it for a sandbox. One that is entered and forgotten ends with the attempt.

    A class, for a generator that an agent forgets is finished by Python itself, at some later time.
    """

    def __init__(self, ask: Ask, spec: SandboxSpec | None) -> None:
        self._ask = ask
        self._spec = spec

    async def __aenter__(self) -> RemoteSandbox:
        self._sandbox = await open_remote(self._ask, self._spec)
        return self._sandbox

    async def __aexit__(self, *_: object) -> None:
        await self._sandbox.close()


class RemoteSandbox:
    """See `environment.Sandbox`. Made by `open_remote`."""

    def __init__(self, ask: Ask, opened: Opened) -> None:
        self.id = opened.id
        self.isolation = opened.isolation
        self._ask = ask
        self._closed = False

    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        cwd: str = "/work",
        env: Mapping[str, str] | None = None,
        limits: SandboxLimits | None = None,
    ) -> ExecResult:
        variables = None if env is None else dict(env)
        asked = Exec(argv=list(argv), stdin=stdin, cwd=cwd, env=variables, limits=limits)
        return await self._request("exec", asked, ExecResult)

    async def run_python(
        self,
        code: str,
        *,
        argv: Sequence[str] = (),
        stdin: bytes = b"",
        cwd: str = "/work",
        limits: SandboxLimits | None = None,
    ) -> ExecResult:
        asked = RunPython(code=code, argv=list(argv), stdin=stdin, cwd=cwd, limits=limits)
        return await self._request("python", asked, ExecResult)

    async def read(self, path: str, max_bytes: int = 1 << 20) -> bytes:
        return await self._request("read", Read(path=path, max_bytes=max_bytes), bytes)

    async def write(self, path: str, data: bytes) -> None:
        await self._request("write", Write(path=path, data=data), type(None))

    async def total(self) -> SandboxUsage:
        return await self._request("total", None, SandboxUsage)

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        # Nothing of it outlives the attempt: the server closes what could not be closed here.
        with suppress(EnvserverError):
            await self._ask(f"{self.id}/close", b"")

    async def _request(self, action: str, asked: Any, kind: type[T]) -> T:
        return await requested(self._ask, f"{self.id}/{action}", asked, kind)


async def open_remote(ask: Ask, spec: SandboxSpec | None) -> RemoteSandbox:
    """A sandbox of this attempt; raises like `Rollout.open_sandbox`."""
    return RemoteSandbox(ask, await requested(ask, "open", Open(spec), Opened))


async def requested(ask: Ask, path: str, asked: Any, kind: type[T]) -> T:
    """The answer to one request, of type `kind`.

    Raises:
        SandboxLost: it has another form.
        Exception: as `ask` does.
    """
    answer = await ask(path, msgspec.msgpack.encode(asked))
    try:
        return msgspec.msgpack.decode(answer, type=kind)
    except msgspec.DecodeError as error:
        raise SandboxLost(f"The server's answer about a sandbox is none: {error}") from error


class BlockingSandbox:
    """The methods of a `Sandbox`, for a thread: each returns when it is done."""

    def __init__(self, sandbox: Sandbox, wait: Wait) -> None:
        self.id = sandbox.id
        self.isolation = sandbox.isolation
        self._sandbox = sandbox
        self._wait = wait

    def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        cwd: str = "/work",
        env: dict[str, str] | None = None,
        limits: SandboxLimits | None = None,
    ) -> ExecResult:
        running = self._sandbox.exec(argv, stdin=stdin, cwd=cwd, env=env, limits=limits)
        result: ExecResult = self._wait(running)
        return result

    def run_python(
        self,
        code: str,
        *,
        argv: Sequence[str] = (),
        stdin: bytes = b"",
        cwd: str = "/work",
        limits: SandboxLimits | None = None,
    ) -> ExecResult:
        running = self._sandbox.run_python(code, argv=argv, stdin=stdin, cwd=cwd, limits=limits)
        result: ExecResult = self._wait(running)
        return result

    def read(self, path: str, max_bytes: int = 1 << 20) -> bytes:
        data: bytes = self._wait(self._sandbox.read(path, max_bytes))
        return data

    def write(self, path: str, data: bytes) -> None:
        self._wait(self._sandbox.write(path, data))

    def total(self) -> SandboxUsage:
        usage: SandboxUsage = self._wait(self._sandbox.total())
        return usage

    def close(self) -> None:
        self._wait(self._sandbox.close())


@contextmanager
def open_blocking(ask: Ask, spec: SandboxSpec | None, wait: Wait) -> Iterator[BlockingSandbox]:
    """A sandbox of this attempt, for a thread."""
    sandbox: RemoteSandbox = wait(open_remote(ask, spec))
    try:
        yield BlockingSandbox(sandbox, wait)
    finally:
        with suppress(EnvserverError):  # the attempt is over: the server closes it
            wait(sandbox.close())
