"""Chooses the machine for each sandbox: the one with the most free room of those that answer.

A process knows its machines once, whatever event loops it has: their load as they last told it, and
which of them do not answer. What is older than a second is asked for again before a choice.
"""

from __future__ import annotations

import asyncio
import functools
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Self

import aiohttp
import msgspec
import structlog
from envserver_records.backoff import Backoff
from envserver_records.errors import ConfigError, SandboxUnavailable
from envserver_records.records import SandboxSpec

from .address import RemoteAddress
from .messages import PATH, PIECE_BYTES, PROTOCOL, Load, MachineBusy
from .sandbox import MachineGone, MachineSandbox

_FRESH_SECONDS = 1.0
_CONNECT_SECONDS = 5.0
_LOAD_SECONDS = 3.0
_SET_ASIDE = Backoff(first_seconds=1.0, max_seconds=20.0, jitter=(0.5, 1.0))
_PAUSE = Backoff(first_seconds=0.2, max_seconds=2.0, jitter=(0.5, 1.0))
PATIENCE_SECONDS = 30.0
"""Seconds for which a sandbox is tried again while no machine can make it."""

_log = structlog.get_logger("envserver.sandbox")


class Machine:
    """What this process knows of one machine."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.load: Load | None = None
        self.problem = ""
        """Why it does not answer; "" if it does."""
        self.open = 0
        """Sandboxes of this process there, with those that are wanted."""
        self.counts: Counter[str] = Counter()
        """Sandboxes that were "opened" there, and machines that were "unreachable" or "lost"."""
        self._seen_at = -_FRESH_SECONDS
        self._open_when_seen = 0
        self._failures = 0
        self._aside_until = 0.0

    @property
    def is_fresh(self) -> bool:
        """Whether its load need not be asked for."""
        now = time.monotonic()
        return now - self._seen_at < _FRESH_SECONDS or now < self._aside_until

    @property
    def is_aside(self) -> bool:
        """Whether it did not answer lately."""
        return time.monotonic() < self._aside_until

    def answered(self, load: Load) -> None:
        """Records its load as it is now."""
        if self.problem:
            _log.info("sandbox_machine_is_back", machine=self.url)
        self.load, self.problem, self._failures = load, "", 0
        self._seen_at, self._aside_until = time.monotonic(), 0.0
        self._open_when_seen = self.open

    def failed(self, reason: str, count: str = "unreachable") -> None:
        """Records that it does not answer; it is set aside for some seconds."""
        self.counts[count] += 1
        if not self.problem:
            _log.warning("sandbox_machine_does_not_answer", machine=self.url, reason=reason)
        self.problem = reason
        self._failures += 1
        seconds = _SET_ASIDE.seconds(self._failures, random.random())
        self._aside_until = time.monotonic() + seconds

    @property
    def fullness(self) -> float:
        """Sandboxes that it has or is asked for, per place. Over 1: some wait."""
        if self.load is None:
            return 0.0
        new = max(0, self.open - self._open_when_seen)
        return (self.load.open + self.load.waiting + new) / max(1, self.load.sandboxes)


@functools.cache
def machines_at(urls: tuple[str, ...]) -> tuple[Machine, ...]:
    """Returns what this process knows of these machines."""
    return tuple(Machine(url) for url in urls)


class Machines:
    """Makes sandboxes on other machines; see `maker.SandboxMaker`."""

    def __init__(self, address: RemoteAddress) -> None:
        self._address = address
        self.known = machines_at(address.urls)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        tls = self._address.tls()
        token = self._address.token
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=True if tls is None else tls),
            headers={"authorization": f"Bearer {token}"} if token else {},
            timeout=aiohttp.ClientTimeout(total=None),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._session is not None
        await self._session.close()

    @asynccontextmanager
    async def open(self, spec: SandboxSpec) -> AsyncIterator[MachineSandbox]:
        """See `sandbox_interface.Sandboxes.open`. A machine that cannot make it leaves that to
        another one; what has begun on a machine stays there."""
        machine, sandbox = await self._made(spec)
        try:
            yield sandbox
        finally:
            machine.open -= 1
            await asyncio.shield(sandbox.close())

    async def _made(self, spec: SandboxSpec) -> tuple[Machine, MachineSandbox]:
        until = time.monotonic() + PATIENCE_SECONDS
        tried = 0
        while True:
            reasons = {}
            for machine in await self._in_order():
                try:
                    return machine, await self._made_on(machine, spec)
                except (MachineGone, MachineBusy) as error:
                    reasons[machine.url] = error.message
            tried += 1
            pause = _PAUSE.seconds(tried, random.random())
            if time.monotonic() + pause > until:
                reasons |= {one.url: one.problem for one in self.known if one.problem}
                told = "; ".join(f"{url}: {why}" for url, why in reasons.items())
                raise SandboxUnavailable(f"No sandbox machine can make a sandbox. {told}")
            await asyncio.sleep(pause)

    async def _made_on(self, machine: Machine, spec: SandboxSpec) -> MachineSandbox:
        assert self._session is not None
        machine.open += 1
        try:
            try:
                async with asyncio.timeout(_CONNECT_SECONDS):
                    socket = await self._session.ws_connect(
                        machine.url + PATH, max_msg_size=2 * PIECE_BYTES, heartbeat=20.0
                    )
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                machine.failed(_reason(error))
                raise MachineGone(_reason(error)) from error
            sandbox = MachineSandbox(
                socket, machine.url, lambda reason: machine.failed(reason, "lost")
            )
            try:
                opened = await sandbox.set_up(spec)
            except BaseException:
                await asyncio.shield(sandbox.close())
                raise
        except BaseException:
            machine.open -= 1
            raise
        machine.counts["opened"] += 1
        machine.answered(opened.load)
        return sandbox

    async def _in_order(self) -> Sequence[Machine]:
        """Returns the machines that answer, the emptiest first."""
        await self.look()
        able = [one for one in self.known if not one.is_aside and _takes(one)]
        return sorted(able, key=lambda one: (one.fullness, random.random()))

    async def look(self) -> None:
        """Asks those machines for their load of which it is not known."""
        await asyncio.gather(*(self._look(one) for one in self.known if not one.is_fresh))

    async def _look(self, machine: Machine) -> None:
        assert self._session is not None
        try:
            async with (
                asyncio.timeout(_LOAD_SECONDS),
                self._session.get(machine.url + PATH) as answer,
            ):
                body = await answer.read()
                if answer.status != 200:
                    machine.failed(_refusal(answer.status, body))
                    return
            load = msgspec.json.decode(body, type=Load)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            machine.failed(_reason(error))
        except msgspec.DecodeError:
            machine.failed("it is not a sandbox machine")
        else:
            if load.protocol == PROTOCOL:
                machine.answered(load)
            else:
                machine.failed("it runs another version of envserver")

    async def check(self) -> None:
        """Looks whether there is a machine that answers. Raises ConfigError: there is none."""
        await self.look()
        if all(one.problem for one in self.known):
            told = "; ".join(f"{one.url}: {one.problem}" for one in self.known)
            raise ConfigError(
                f"No sandbox machine answers. {told}.",
                hint="Start one: envserver sandboxes serve. Is the token right?",
            )

    async def watch(self) -> None:
        """Keeps the loads fresh, until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(_FRESH_SECONDS)


def _takes(machine: Machine) -> bool:
    return machine.load is None or not machine.load.draining


def _reason(error: Exception) -> str:
    if isinstance(error, aiohttp.WSServerHandshakeError):
        return _refusal(error.status, b"")
    if isinstance(error, aiohttp.ClientConnectorError):
        return f"it cannot be reached: {error.os_error.strerror or error.os_error}"
    if isinstance(error, TimeoutError):
        return "it does not answer in time"
    return str(error) or type(error).__name__


def _refusal(status: int, body: bytes) -> str:
    match status:
        case 401 | 403:
            return "it refuses the access token (its role must be `environment`)"
        case 404:
            return "it is not a sandbox machine"
    try:
        words: Any = msgspec.json.decode(body)["detail"]
    except (msgspec.DecodeError, KeyError, TypeError):
        words = ""
    return f"HTTP {status} {words}".strip()
