"""What makes sandboxes: the supervisor of this machine (`client.SandboxClient`), other machines
(`remote.machines.Machines`), or a user-supplied class (`foreign.ForeignSandboxes`).
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Protocol, Self

from envserver_records.sandboxes import ExecResult, SandboxSpec

from ..sandbox_interface import Sandbox
from .remote.address import ForeignAddress, RemoteAddress, SandboxAddress

if TYPE_CHECKING:
    from ..proxy.egress import Closable, OnConnection


class StartedProgram:
    """A program whose input and output are `stdio`; `result` says how it ended, once it has.

    Set `hung_up` when its output has ended: then it is about to end by itself.
    """

    def __init__(self, stdio: socket.socket) -> None:
        self.stdio = stdio
        self.hung_up = False
        self.result: ExecResult | None = None


class TalkingSandbox(Sandbox, Protocol):
    """A sandbox that supports interactive programs and proxied network access."""

    def start(
        self, argv: Sequence[str], *, env: Mapping[str, str], wall_seconds: float
    ) -> AbstractAsyncContextManager[StartedProgram]:
        """Starts an interactive program; kills it at the end of the block. Other requests wait
        until then.
        """

    async def lead_out(self, serve: OnConnection) -> Closable | None:
        """Serves connections of its programs, which from now on take `serve` for their HTTP proxy
        (HTTP_PROXY, HTTPS_PROXY), until the result is closed.

        Returns None if they have no network that could hold it.
        """


class SandboxMaker(Protocol):
    """Makes sandboxes while its async context is entered, in one event loop."""

    def open(self, spec: SandboxSpec) -> AbstractAsyncContextManager[TalkingSandbox]:
        """See `sandbox_interface.Sandboxes.open`."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *exception: object) -> None:
        """Ends all its sandboxes."""


def sandboxes_at(address: SandboxAddress) -> SandboxMaker:
    """Returns what makes sandboxes at `address`."""
    if isinstance(address, RemoteAddress):
        from .remote.machines import Machines  # an HTTP client, which few scorers need

        return Machines(address)
    if isinstance(address, ForeignAddress):
        from .foreign import ForeignSandboxes

        return ForeignSandboxes(address.reference)
    from .client import SandboxClient

    return SandboxClient(address)
