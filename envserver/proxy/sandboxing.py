"""Handles a worker's requests for sandboxes: limited in size and time, stopped with the attempt.

The proxy knows the attempt and its deadline; only the `SandboxHost` knows sandboxes. `POST
sandbox/...` takes and returns MessagePack; errors are JSON as everywhere. A failure that is not the
agent's fault is recorded before the agent sees it, since the agent may hide it.
"""

from __future__ import annotations

from typing import Protocol

from envserver_records.errors import SandboxError, SandboxUnavailable
from envserver_records.records import SandboxUsage

from .asgi import Interrupted, Interrupts, Receive, Scope, Send, read_body, send_bytes
from .attempts import ProxyAttempt, ended

PREFIX = "sandbox/"
_LAST_SECONDS = 5.0
"""Time after the deadline in which an attempt may still close its sandboxes."""


class SandboxHost(Protocol):
    """Owns the sandboxes of all running attempts."""

    @property
    def open(self) -> int:
        """Number of sandboxes that are open or waited for."""

    def most_bytes(self, path: str) -> int:
        """Returns the maximum body size in bytes of requests to `path`."""

    async def answer(self, attempt: ProxyAttempt, path: str, body: bytes) -> bytes:
        """Carries out one request; cancelling it cancels what it started."""

    def seal(self, attempt: ProxyAttempt) -> None:
        """Closes the attempt's sandboxes and refuses further ones."""

    async def settle(self, attempt: ProxyAttempt) -> SandboxUsage | None:
        """Waits, after `seal`, until all is gone; returns the usage, None without a sandbox."""


async def answer_about_sandboxes(
    host: SandboxHost | None,
    attempt: ProxyAttempt,
    path: str,
    scope: Scope,
    receive: Receive,
    send: Send,
) -> None:
    """Answers one request.

    Args:
        host: None if the environment declares no sandbox.
        path: the part after PREFIX.
    """
    if host is None:
        raise SandboxUnavailable(
            "This environment declares no sandbox.", hint="Set Environment.sandbox."
        )
    body = await read_body(scope, receive, host.most_bytes(path))
    if attempt.sealed:
        raise ended()
    try:
        answer = await _answer(host, attempt, path, body, receive)
    except Interrupted as interrupted:
        if interrupted.reason == "sealed":
            raise ended() from None
        if interrupted.reason == "time":
            raise attempt.reached("time", "The time of this rollout is used up.") from None
        raise
    except SandboxError as error:
        attempt.sandbox_failed(error)
        raise
    await send_bytes(send, 200, answer, b"application/msgpack")


async def _answer(
    host: SandboxHost, attempt: ProxyAttempt, path: str, body: bytes, receive: Receive
) -> bytes:
    interrupts = Interrupts(receive, max(0.0, attempt.seconds_left) + _LAST_SECONDS)
    attempt.working(interrupts)
    try:
        async with interrupts:
            return await host.answer(attempt, path, body)
    finally:
        attempt.done(interrupts)
