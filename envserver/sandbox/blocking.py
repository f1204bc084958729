"""Sandboxes without asyncio, for code that is not asynchronous (a data set's loader)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Self

from anyio.from_thread import BlockingPortal, start_blocking_portal
from envserver_records.records import ExecResult, SandboxLimits, SandboxSpec, SandboxUsage

from .client import ConnectedSandbox, SandboxClient


class BlockingSandboxes:
    """A `SandboxClient` on an event loop in a thread of its own. `with` it.

    Args:
        address: path of the supervisor's socket.
    """

    def __init__(self, address: str) -> None:
        self._address = address

    def __enter__(self) -> Self:
        self._starting = start_blocking_portal()
        self._portal = self._starting.__enter__()
        self._client = SandboxClient(self._address)
        return self

    def __exit__(self, *_: object) -> None:
        self._portal.call(self._client.aclose)
        self._starting.__exit__(None, None, None)

    @contextmanager
    def open(self, spec: SandboxSpec) -> Iterator[BlockingSandbox]:
        """See `environment.Sandboxes.open`."""
        sandbox = self._portal.call(self._client.create, spec)
        try:
            yield BlockingSandbox(self._portal, sandbox)
        finally:
            self._portal.call(sandbox.close)


class BlockingSandbox:
    """See `environment.Sandbox`; every method returns when it is done."""

    def __init__(self, portal: BlockingPortal, sandbox: ConnectedSandbox) -> None:
        self._portal = portal
        self._sandbox = sandbox
        self.id = sandbox.id
        self.isolation = sandbox.isolation

    def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        cwd: str = "/work",
        env: dict[str, str] | None = None,
        limits: SandboxLimits | None = None,
    ) -> ExecResult:
        run = partial(self._sandbox.exec, argv, stdin=stdin, cwd=cwd, env=env, limits=limits)
        return self._portal.call(run)

    def run_python(
        self,
        code: str,
        *,
        argv: Sequence[str] = (),
        stdin: bytes = b"",
        cwd: str = "/work",
        limits: SandboxLimits | None = None,
    ) -> ExecResult:
        run = partial(
            self._sandbox.run_python, code, argv=argv, stdin=stdin, cwd=cwd, limits=limits
        )
        return self._portal.call(run)

    def read(self, path: str, max_bytes: int = 1 << 20) -> bytes:
        return self._portal.call(self._sandbox.read, path, max_bytes)

    def write(self, path: str, data: bytes) -> None:
        self._portal.call(self._sandbox.write, path, data)

    def total(self) -> SandboxUsage:
        return self._portal.call(self._sandbox.total)
