"""A sandbox on the server, used by an agent in a worker: the `Sandbox` interface over HTTP.

Each method is one request. A cancelled request hangs up, and the server ends what it started.
"""

from __future__ import annotations

from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any, TypeVar

import msgspec
from envserver_records.errors import EnvserverError, SandboxLost
from envserver_records.sandboxes import ExecResult, SandboxLimits, SandboxSpec, SandboxUsage

from ..sandbox.requests import Exec, Open, Opened, Read, Received, RunPython, Send, Start, Write
from ..sandbox_interface import BlockingSandbox

T = TypeVar("T")

Post = Callable[[str, bytes], Awaitable[bytes]]
"""Posts a body to a path below the attempt's `sandbox/`; returns the body of a good answer."""

Wait = Callable[[Coroutine[Any, Any, Any]], Any]
"""Runs a coroutine on the worker's event loop and waits for it in a thread."""


class RemoteOpening:
    """An async context manager that opens a sandbox. One that is never left ends with the attempt.

    It is a class because Python would finish a forgotten generator at some later time.
    """

    def __init__(self, post: Post, spec: SandboxSpec | None) -> None:
        self._post = post
        self._spec = spec

    async def __aenter__(self) -> RemoteSandbox:
        self._sandbox = await open_remote(self._post, self._spec)
        return self._sandbox

    async def __aexit__(self, *_: object) -> None:
        await self._sandbox.close()


class RemoteSandbox:
    """See `sandbox_interface.Sandbox`. Made by `open_remote`."""

    def __init__(self, post: Post, opened: Opened) -> None:
        self.id = opened.id
        self.isolation = opened.isolation
        self._post = post
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
        body = Exec(argv=list(argv), stdin=stdin, cwd=cwd, env=variables, limits=limits)
        return await self._request("exec", body, ExecResult)

    async def run_python(
        self,
        code: str,
        *,
        argv: Sequence[str] = (),
        stdin: bytes = b"",
        cwd: str = "/work",
        limits: SandboxLimits | None = None,
    ) -> ExecResult:
        body = RunPython(code=code, argv=list(argv), stdin=stdin, cwd=cwd, limits=limits)
        return await self._request("python", body, ExecResult)

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
        # The server closes at the end of the attempt what could not be closed here.
        with suppress(EnvserverError):
            await self._post(f"{self.id}/close", b"")

    async def _request(self, action: str, body: Any, kind: type[T]) -> T:
        return await _answer(self._post, f"{self.id}/{action}", body, kind)


async def open_remote(post: Post, spec: SandboxSpec | None) -> RemoteSandbox:
    """Opens a sandbox of this attempt; raises like `Rollout.open_sandbox`."""
    return RemoteSandbox(post, await _answer(post, "open", Open(spec), Opened))


class RemoteProgram:
    """See `sandbox_interface.RunningProgram`. Made by `open_program`."""

    def __init__(self, post: Post, sandbox_id: str) -> None:
        self.result: ExecResult | None = None
        self._post = post
        self._id = sandbox_id

    async def send(self, data: bytes) -> None:
        await _answer(self._post, f"{self._id}/send", Send(data=data), type(None))

    async def receive(self) -> bytes:
        received = await _answer(self._post, f"{self._id}/receive", None, Received)
        self.result = received.result
        return received.data


@asynccontextmanager
async def open_program(
    post: Post, argv: Sequence[str], env: Mapping[str, str], spec: SandboxSpec | None
) -> AsyncIterator[RemoteProgram]:
    """Runs a program in a sandbox of its own; raises like `Rollout.open_program`."""
    sandbox = await open_remote(post, spec)
    try:
        start = Start(argv=list(argv), env=dict(env))
        await _answer(post, f"{sandbox.id}/start", start, type(None))
        yield RemoteProgram(post, sandbox.id)
    finally:
        await sandbox.close()


@contextmanager
def open_blocking(post: Post, spec: SandboxSpec | None, wait: Wait) -> Iterator[BlockingSandbox]:
    """Opens a sandbox of this attempt for code in a thread."""
    sandbox: RemoteSandbox = wait(open_remote(post, spec))
    try:
        yield BlockingSandbox(sandbox, wait)
    finally:
        with suppress(EnvserverError):  # the attempt is over: the server closes it
            wait(sandbox.close())


async def _answer(post: Post, path: str, body: Any, kind: type[T]) -> T:
    """Sends one request and decodes its answer as `kind`."""
    answer = await post(path, msgspec.msgpack.encode(body))
    try:
        return msgspec.msgpack.decode(answer, type=kind)
    except msgspec.DecodeError as error:
        raise SandboxLost(f"The server's answer about a sandbox is not valid: {error}") from error
