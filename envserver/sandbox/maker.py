"""What makes sandboxes: the supervisor of this machine (`client.SandboxClient`), other machines
(`machines.Machines`), or a user-supplied class (`source.CustomSandboxes`)."""

from __future__ import annotations

import functools
import socket
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

from envserver_records.errors import ConfigError, SandboxLost
from envserver_records.sandboxes import ExecResult, SandboxSpec

from ..sandbox_interface import Sandbox
from .requests import AskedSandbox, perform

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
    """A program that talks by `stdio`; `result` says how it ended, once it has.

    Set `hung_up` when its output has ended: then it is about to end by itself."""

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
        (HTTP_PROXY, HTTPS_PROXY), until the result is closed. None: they have no network for it."""


class SandboxMaker(Protocol):
    """Makes sandboxes while its async context is entered, in one event loop."""

    def open(self, spec: SandboxSpec) -> AbstractAsyncContextManager[InteractiveSandbox]:
        """See `sandbox_interface.Sandboxes.open`."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *exception: object) -> None:
        """Ends all its sandboxes."""


async def not_lost(request: Coroutine[Any, Any, T]) -> T:
    """Awaits `request`. Raises SandboxLost: its program was lost with the sandbox."""
    result = await request
    if isinstance(result, ExecResult) and result.killed_by == "lost":
        raise SandboxLost("The sandbox lost the program that ran in it.")
    return result


class GuardedSandbox(AskedSandbox):
    """Another sandbox, each request to which is awaited by `guard`."""

    def __init__(
        self, sandbox: Sandbox, guard: Callable[[Coroutine[Any, Any, Any]], Awaitable[Any]]
    ) -> None:
        self.id = sandbox.id
        self.isolation = sandbox.isolation
        self.sandbox = sandbox
        self.guard = guard

    async def ask(self, action: str, body: Any, kind: type[T]) -> T:
        answer: T = await self.guard(perform(self.sandbox, action, body))
        return answer

    async def close(self) -> None:
        await self.sandbox.close()
