"""What makes sandboxes: the supervisor of this machine (`client.SandboxClient`), other machines
(`machines.Machines`), or a user-supplied class (`source.CustomSandboxes`).
"""

from __future__ import annotations

import asyncio
import functools
import socket
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

from envserver_records.errors import ConfigError, InputError, SandboxLost
from envserver_records.sandboxes import ExecResult, SandboxSpec

from ..sandbox_interface import Sandbox
from .requests import Received

if TYPE_CHECKING:
    import ssl

    from ..proxy.egress import Closable, OnConnection

T = TypeVar("T")


@dataclass(frozen=True)
class RemoteAddress:
    """Sandbox machines. `token` is never shown; `ca_certs`, `certfile`: files for TLS, see
    `SandboxConfig`."""

    urls: tuple[str, ...]
    token: str = field(default="", repr=False)
    ca_certs: str = ""
    certfile: str = ""

    @functools.cache  # noqa: B019 - a process has few addresses
    def tls(self) -> ssl.SSLContext | None:
        """None: the TLS settings of this machine."""
        if not self.ca_certs and not self.certfile:
            return None
        import ssl

        try:
            context = ssl.create_default_context(cafile=self.ca_certs or None)
            if self.certfile:
                context.load_cert_chain(self.certfile)
        except OSError as error:
            raise ConfigError(
                f"--sandbox.remote_ca_certs or --sandbox.remote_certfile cannot be read: {error}."
            ) from error
        return context


@dataclass(frozen=True)
class ForeignAddress:
    """A user-supplied class; `reference`: package.module:Class, or /path/to/file.py:Class."""

    reference: str


SandboxAddress = str | RemoteAddress | ForeignAddress
"""A path: the socket of a supervisor on this machine."""


class StartedProgram:
    """A program whose input and output are `stdio`; `result` says how it ended, once it has.

    Set `hung_up` when its output has ended: then it is about to end by itself.
    """

    def __init__(self, stdio: socket.socket) -> None:
        self.stdio = stdio
        self.hung_up = False
        self.result: ExecResult | None = None


class InteractiveSandbox(Sandbox, Protocol):
    """A sandbox that supports interactive programs and proxied network access."""

    def start(
        self, argv: Sequence[str], *, env: Mapping[str, str], wall_seconds: float
    ) -> AbstractAsyncContextManager[StartedProgram]:
        """Starts an interactive program; kills it at the end of the block. Other requests wait
        until then."""

    async def lead_out(self, serve: OnConnection) -> Closable | None:
        """Serves connections of its programs, which from now on take `serve` for their HTTP proxy
        (HTTP_PROXY, HTTPS_PROXY), until the result is closed.

        Returns None if they have no network that could hold it.
        """


class SandboxMaker(Protocol):
    """Makes sandboxes while its async context is entered, in one event loop."""

    def open(self, spec: SandboxSpec) -> AbstractAsyncContextManager[InteractiveSandbox]:
        """See `sandbox_interface.Sandboxes.open`."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *exception: object) -> None:
        """Ends all its sandboxes."""


_PIECE_BYTES = 1 << 16


class InteractiveProgram:
    """`live` is its whole life, in a task of its own; the rest is for requests."""

    def __init__(
        self,
        sandbox: InteractiveSandbox,
        argv: Sequence[str],
        env: Mapping[str, str],
        seconds: float,
    ) -> None:
        self._sandbox = sandbox
        self._argv = argv
        self._env = env
        self._seconds = seconds
        self._streams: asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter]]
        self._streams = asyncio.get_running_loop().create_future()
        self._reading = asyncio.Lock()
        self._over = asyncio.Event()
        self._hung_up = False
        self._result: asyncio.Future[ExecResult] = asyncio.get_running_loop().create_future()

    async def live(self) -> None:
        """Runs the program until it ends, or this task is cancelled."""
        try:
            async with self._sandbox.start(
                self._argv, env=self._env, wall_seconds=self._seconds
            ) as program:
                streams = await asyncio.open_unix_connection(sock=program.stdio)
                self._streams.set_result(streams)
                try:
                    await self._over.wait()
                    program.hung_up = self._hung_up
                finally:
                    streams[1].close()
            assert program.result is not None
            self._result.set_result(program.result)
        except BaseException as error:
            for waited in (self._streams, self._result):
                if not waited.done():
                    cause = error if isinstance(error, Exception) else InputError("It was ended.")
                    waited.set_exception(cause)
                    waited.exception()  # mark as retrieved: there may be no waiter
            raise

    async def started(self) -> None:
        """Waits until the program is ready; raises as `InteractiveSandbox.start`."""
        await asyncio.shield(self._streams)

    async def send(self, data: bytes) -> None:
        """What a program that has ended does not take is dropped."""
        _, writer = await asyncio.shield(self._streams)
        try:
            writer.write(data)
            await writer.drain()
        except (ConnectionError, RuntimeError):
            return

    async def receive(self) -> Received:
        reader, _ = await asyncio.shield(self._streams)
        async with self._reading:
            try:
                data = await reader.read(_PIECE_BYTES)
            except ConnectionError:
                data = b""
        if data:
            return Received(data)
        self._hung_up = True
        return Received(result=await self.end())

    async def end(self) -> ExecResult:
        """Ends the program, unless it has ended or is about to; returns how it ended."""
        self._over.set()
        return await asyncio.shield(self._result)


async def not_lost(request: Coroutine[Any, Any, T]) -> T:
    """Awaits `request`. Raises SandboxLost: its program was lost with the sandbox."""
    result = await request
    if isinstance(result, ExecResult) and result.killed_by == "lost":
        raise SandboxLost("The sandbox lost the program that ran in it.")
    return result
