"""Opens sandboxes at an address, and for scorers and `tasks` (`Environment.sandboxes`)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, TypeVar

from envserver_records.errors import SandboxError, SandboxUnavailable
from envserver_records.sandboxes import SandboxSpec

from ..sandbox_interface import Sandbox
from .maker import (
    ForeignAddress,
    GuardedSandbox,
    RemoteAddress,
    SandboxAddress,
    SandboxMaker,
    not_lost,
)

T = TypeVar("T")


def sandboxes_at(address: SandboxAddress) -> SandboxMaker:
    if isinstance(address, RemoteAddress):
        from .machines import Machines  # an HTTP client, which few scorers need

        return Machines(address)
    if isinstance(address, ForeignAddress):
        from .source import CustomSandboxes

        return CustomSandboxes(address.reference)
    from .client import SandboxClient

    return SandboxClient(address)


class WatchedSandboxes:
    """Sandboxes for scorers and `tasks`, in any event loop and thread: each has its own connection,
    and ends with the process.

    A failure of the sandbox is remembered, because a scorer may mistake it for a failure of the
    model: its score of that rollout does not count.
    """

    def __init__(self, address: SandboxAddress) -> None:
        self.address = address
        self.failure: SandboxError | None = None
        """The failure since this was last set to None. A sandbox that could not be made is forgiven
        when another one can; a sandbox that was lost is not."""

    @asynccontextmanager
    async def open(self, spec: SandboxSpec) -> AsyncIterator[Sandbox]:
        async with sandboxes_at(self.address) as maker, AsyncExitStack() as stack:
            sandbox = await self.watch(stack.enter_async_context(maker.open(spec)))
            if isinstance(self.failure, SandboxUnavailable):
                self.failure = None
            yield GuardedSandbox(sandbox, lambda request: self.watch(not_lost(request)))

    async def watch(self, request: Coroutine[Any, Any, T]) -> T:
        try:
            return await request
        except SandboxError as error:
            if self.failure is None or isinstance(self.failure, SandboxUnavailable):
                self.failure = error
            raise
