"""Requests of an attempt about its sandboxes: bounded, and ended with the attempt.

The proxy knows who asks and until when; what a sandbox is, only the `SandboxHost` knows. `POST
sandbox/...` takes and gives MessagePack; errors look as everywhere here. A failure that is not the
agent's fault is noted in the attempt before the agent is told, for it may hide it.
"""

from __future__ import annotations

from typing import Protocol

from envserver_records.errors import SandboxError, SandboxUnavailable
from envserver_records.records import SandboxUsage

from .asgi import Interrupted, Interrupts, Receive, Scope, Send, read_body, send_bytes
from .attempts import ProxyAttempt, ended

PREFIX = "sandbox/"
_LAST_SECONDS = 5.0
"""After its deadline an attempt may still close what it opened."""


class SandboxHost(Protocol):
    """Has the sandboxes of all attempts in flight."""

    @property
    def open(self) -> int:
        """Sandboxes that attempts have now, or wait for."""

    def most_bytes(self, path: str) -> int:
        """The largest body that a request to `path` may have."""

    async def answer(self, attempt: ProxyAttempt, path: str, body: bytes) -> bytes:
        """Carries out one request; when it is cancelled, so is what it began.

        Raises:
            InputError, LimitReached: the asker's fault.
            SandboxError: ours.
        """

    def seal(self, attempt: ProxyAttempt) -> None:
        """The attempt has ended: its sandboxes end now, and it gets no more."""

    async def settle(self, attempt: ProxyAttempt) -> SandboxUsage | None:
        """What its programs used, None where it had no sandbox; after `seal`, when all is gone."""


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
        host: None where the environment declares no sandbox.
        path: behind PREFIX.

    Raises:
        EnvserverError: to be told to the worker; nothing of an answer has left yet.
        ConflictError: the attempt is sealed.
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
