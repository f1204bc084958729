"""`Environment.sandboxes`: what scorers and `tasks` open sandboxes with, from any event loop.

Each sandbox has a connection of its own, so it dies with the process, and whoever holds one may be
any thread with a loop. A failure of ours is remembered, for a scorer may take it for the model's:
what it then says of the rollout does not count.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from envserver_records.errors import SandboxError, SandboxLost, SandboxUnavailable
from envserver_records.records import ExecResult, SandboxLimits, SandboxSpec, SandboxUsage

from ..environment import Sandbox
from .client import SandboxClient

T = TypeVar("T")


class WatchedSandboxes:
    """See `environment.Sandboxes`.

    Args:
        address: of the service (`SandboxService.address`).
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self.failure: SandboxError | None = None
        """What failed since this was last unset. That none could be made is overcome by one that
        could; that one was lost is not."""

    @asynccontextmanager
    async def open(self, spec: SandboxSpec) -> AsyncIterator[Sandbox]:
        async with SandboxClient(self.address) as client:
            sandbox = await self.noted(client.create(spec))
            if isinstance(self.failure, SandboxUnavailable):
                self.failure = None
            try:
                yield _Watched(sandbox, self)
            finally:
                await sandbox.close()

    async def noted(self, request: Coroutine[Any, Any, T]) -> T:
        """Its result; a SandboxError is remembered on its way."""
        try:
            return await request
        except SandboxError as error:
            if self.failure is None or isinstance(self.failure, SandboxUnavailable):
                self.failure = error
            raise


class _Watched:
    """See `environment.Sandbox`."""

    def __init__(self, sandbox: Sandbox, watcher: WatchedSandboxes) -> None:
        self.id = sandbox.id
        self.isolation = sandbox.isolation
        self._sandbox = sandbox
        self._watcher = watcher

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
        running = self._sandbox.exec(argv, stdin=stdin, cwd=cwd, env=variables, limits=limits)
        return await self._watcher.noted(_ended(running))

    async def run_python(
        self,
        code: str,
        *,
        argv: Sequence[str] = (),
        stdin: bytes = b"",
        cwd: str = "/work",
        limits: SandboxLimits | None = None,
    ) -> ExecResult:
        running = self._sandbox.run_python(code, argv=argv, stdin=stdin, cwd=cwd, limits=limits)
        return await self._watcher.noted(_ended(running))

    async def read(self, path: str, max_bytes: int = 1 << 20) -> bytes:
        return await self._watcher.noted(self._sandbox.read(path, max_bytes))

    async def write(self, path: str, data: bytes) -> None:
        await self._watcher.noted(self._sandbox.write(path, data))

    async def total(self) -> SandboxUsage:
        return await self._watcher.noted(self._sandbox.total())

    async def close(self) -> None:
        await self._sandbox.close()


async def _ended(running: Coroutine[Any, Any, ExecResult]) -> ExecResult:
    """Its result, which is the program's.

    Raises:
        SandboxLost: it says nothing about the program.
    """
    result = await running
    if result.killed_by == "lost":
        raise SandboxLost("The sandbox lost the program that ran in it.")
    return result
