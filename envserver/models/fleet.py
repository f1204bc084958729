"""Engines that come and go while a server runs.

They are registered by POST /v1/engines, a watched file or the server that a runner has joined. Each
gets calls only once `check` found it to be the same engine as the others, and while its weights are
current. An engine that went away is checked again, and its version must be reported again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from contextvars import Context
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal
from urllib.parse import urlsplit

import msgspec
import structlog
from envserver_records.errors import (
    ConfigError,
    ConflictError,
    EngineError,
    EngineRefused,
    EngineUnavailable,
    InputError,
    NotFoundError,
    StoreFull,
)
from envserver_records.waiting import Backoff, cancel_and_wait

from ..settings.config import EnginesConfig
from ..settings.section import check_url
from ..settings.server import is_loopback
from .openai import OpenAIEngine, root_of
from .replicas import Origin, Registration, Replica, replica_id

Check = Callable[[Replica], Coroutine[Any, Any, None]]
"""Raises ConfigError: it is another engine than the others, or not exact; EngineError: it does not
answer, or refuses."""

MOST_ENGINES: Final = 1024
_AGAIN: Final = Backoff(first_seconds=0.5, max_seconds=30.0)
_LONGEST_SLEEP_SECONDS: Final = 1.0
_LOOK_SECONDS: Final = 0.02

_log = structlog.get_logger("envserver.engine")


class Fleet:
    """The engines of `engine` that come and go; use within the engine's context.

    Args:
        confirm: `check` with one request, for an engine that was admitted.
        changed: called after each change that others should know.
    """

    def __init__(self, engine: OpenAIEngine, check: Check, confirm: Check | None = None) -> None:
        self.addresses = engine.addresses
        self.changed: Callable[[], None] = lambda: None
        self._engine = engine
        self._routes = engine.routes
        self._check = check
        self._confirm = confirm or check
        self._confirming: dict[Replica, asyncio.Task[None]] = {}
        self._checks: dict[Replica, asyncio.Task[None]] = {}
        self._expiry: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Fleet:
        self._expiry = asyncio.create_task(self._expire(), name="engines that expire")
        self._engine.confirm = self.confirm
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._engine.confirm = None
        tasks = (*self._checks.values(), *self._confirming.values(), self._expiry)
        await cancel_and_wait(*filter(None, tasks))

    async def model_name(self) -> str:
        return await self._engine.model_name()

    @property
    def replicas(self) -> list[Replica]:
        return list(self._routes.all)

    def named(self, name: str) -> Replica:
        engine_id = replica_id(name.rstrip("/").removesuffix("/v1").rstrip("/"))
        for replica in self._routes.all:
            if replica.id in (name, engine_id):
                return replica
        raise NotFoundError(
            f"There is no engine {name[:100]!r}.", hint="GET /v1/engines lists them."
        )

    def at(self, url: str) -> Replica | None:
        engine_id = replica_id(root_of(url))
        return next((each for each in self._routes.all if each.id == engine_id), None)

    def registrations(self) -> list[Registration]:
        """What the store keeps: registered engines and reported versions."""
        return [
            _registration(replica)
            for replica in self._routes.all
            if replica.origin == "registered"
            or replica.version is not None
            or replica.draining
            or replica.paused
        ]

    def shared(self) -> list[Registration]:
        """The engines that runners on other machines may call: checked, with a known version.

        An address of this machine in the settings would be another engine there.
        """
        return [
            _registration(replica)
            for replica in self._routes.all
            if replica.admitted
            and (replica.follows or self._routes.version_of(replica) is not None)
            and (
                replica.origin != "setting" or not is_loopback(urlsplit(replica.url).hostname or "")
            )
        ]

    @property
    def doubts(self) -> bool:
        """Whether an engine that the server named went away, so that its version is in doubt."""
        return any(not each.is_sure for each in self._routes.all if each.origin == "server")

    def restore(self, stored: Iterable[Registration]) -> None:
        """Registers the store's engines again after a start of the server."""
        for entry in stored:
            replica = self.at(entry.url)
            if replica is None:
                is_over = entry.expires_at is not None and entry.expires_at <= time.time()
                if entry.origin != "registered" or is_over:
                    continue
                replica = self._add(entry.url, "registered")
            replica.version, replica.follows = entry.version, entry.follows
            replica.draining, replica.paused = entry.draining, entry.paused
            replica.tells = entry.version is not None and entry.ttl_seconds is not None
            if entry.ttl_seconds is not None:
                replica.ttl_seconds, replica.expires_at = entry.ttl_seconds, entry.expires_at
        self._routes.changed()

    def register(
        self,
        url: str,
        *,
        origin: Origin = "registered",
        version: int | None = None,
        ttl_seconds: float | None = None,
    ) -> tuple[Replica, bool]:
        """Registers the engine at `url`, or takes this as its heartbeat; returns if it is new."""
        replica = self.at(url)
        is_new = replica is None
        if replica is None:
            if len(self._routes.all) >= MOST_ENGINES:
                raise StoreFull(f"No more than {MOST_ENGINES} engines can be registered.")
            replica = self._add(url, origin)
            # An engine that is there before the first version has each that is published.
            replica.follows = version is None and self._routes.version() < 0
        if ttl_seconds is not None and replica.origin != "setting":
            replica.ttl_seconds = ttl_seconds
            replica.expires_at = time.time() + ttl_seconds
        if version is not None:
            replica.tells = ttl_seconds is not None
            self.tell_version(replica, version)
        self.changed()
        return replica, is_new

    def tell_version(self, replica: Replica, version: int) -> None:
        """The version may be lower than before, as after a restart."""
        if (replica.version, replica.is_sure) != (version, True):
            _log.info("engine_version", base_url=replica.url, version=version)
        replica.version, replica.is_sure = version, True
        self._changed()

    def drain(self, replica: Replica) -> None:
        """Gives `replica` no new rollouts; current ones stay until they end."""
        replica.draining = True
        self._changed()

    async def pause(
        self, replica: Replica, in_flight: Literal["drain", "keep", "abort"], timeout_seconds: float
    ) -> bool:
        """Sends `replica` no more calls until `resume`; other replicas get them.

        `in_flight` is for the calls that are there, see `proxy.gate`; aborted ones are sent to
        another replica. Returns whether no call is there (always with "keep"); False after the
        timeout.
        """
        replica.paused = True
        replica.give_up_requests(sent=in_flight == "abort")
        self._changed()
        if in_flight == "keep":
            return True
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_seconds):
                while replica.slots.used:
                    await asyncio.sleep(_LOOK_SECONDS)
        return not replica.slots.used

    def resume(self, replica: Replica) -> None:
        replica.paused = replica.draining = False
        self._changed()

    def remove(self, replica: Replica) -> None:
        if replica.origin == "setting":
            raise ConflictError(
                "openai.base_url names this engine, so it cannot be removed.",
                hint="Drain it: POST /v1/engines/ID/drain.",
            )
        self._remove(replica, "removed")

    def sync(self, origin: Origin, wanted: Sequence[Registration]) -> None:
        ids = {replica_id(root_of(entry.url)) for entry in wanted}
        for replica in self.replicas:
            if replica.origin == origin and replica.id not in ids:
                self._remove(replica, "no longer listed")
        for entry in wanted:
            try:
                self._sync(origin, entry)
            except (ConfigError, StoreFull) as error:
                _log.warning("engine_not_registered", origin=origin, reason=error.message)

    def _sync(self, origin: Origin, wanted: Registration) -> None:
        replica = self.at(wanted.url)
        if replica is None:
            replica, _ = self.register(wanted.url, origin=origin)
        if origin == "server":  # which knows more of it than its address
            replica.follows = wanted.follows
            replica.draining, replica.paused = wanted.draining, wanted.paused
            if wanted.paused:
                replica.give_up_requests(sent=False)
        is_doubtful = not replica.is_sure and origin == "server"
        if wanted.version is not None and (wanted.version != replica.version or is_doubtful):
            self.tell_version(replica, wanted.version)
        self._routes.changed()

    async def checked(self, replica: Replica, seconds: float) -> None:
        """Waits until `replica` is admitted, refused, or has failed one check."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not (replica.admitted or replica.refusal) and replica in self._routes.all:
                    await self._routes.wait_for_change()

    async def confirm(self, replica: Replica) -> None:
        """Checks whether an admitted engine is still the same; callers share one check.

        One that is not gets no calls until it is the same again.
        """
        if replica not in self._confirming:
            # Not in the context of a call, where what samples is noted.
            task = asyncio.create_task(self._confirm(replica), context=Context())
            self._confirming[replica] = task
            task.add_done_callback(partial(self._confirmed, replica))
        try:
            await asyncio.shield(self._confirming[replica])
        except (ConfigError, EngineRefused) as error:
            if replica.admitted:
                replica.admitted = False
                self._refuse(replica, error)
                self._look_at(replica)
            raise

    def _confirmed(self, replica: Replica, task: asyncio.Task[None]) -> None:
        del self._confirming[replica]
        if not task.cancelled():
            task.exception()  # retrieved here because all callers may have been cancelled

    async def confirm_home(self, rollout_id: str) -> None:
        if (replica := self._routes.home(rollout_id)) is not None:
            await self.confirm(replica)

    def _add(self, url: str, origin: Origin) -> Replica:
        if origin != "registered":
            self.addresses.trust(url)
        replica = self._engine.add(url, origin, gets_key=self.addresses.gets_key(url))
        _log.info("engine_registered", base_url=replica.url, origin=origin)
        replica.on_lost = lambda: self._lost(replica)
        self._look_at(replica)
        return replica

    def _remove(self, replica: Replica, why: str) -> None:
        if (checking := self._checks.pop(replica, None)) is not None:
            checking.cancel()
        self._engine.remove(replica)
        _log.info("engine_gone", base_url=replica.url, why=why)
        self.changed()

    def _lost(self, replica: Replica) -> None:
        """Checks an engine that went away: another may come back at its address."""
        if replica.admitted and replica.origin != "setting":
            replica.admitted, replica.refusal = False, ""
            self.changed()
            self._look_at(replica)

    def _look_at(self, replica: Replica) -> None:
        if replica not in self._checks and replica in self._routes.all:
            work = self._admit(replica)
            self._checks[replica] = asyncio.create_task(work, name=f"check {replica.url}")

    async def _admit(self, replica: Replica) -> None:
        tried = 0
        while not replica.admitted:
            losses = replica.losses
            try:
                await self._check(replica)
            except (ConfigError, EngineError) as error:
                self._refuse(replica, error)
            else:
                if losses == replica.losses:
                    self._admitted(replica)
                    return
            tried += 1
            await asyncio.sleep(_AGAIN.seconds(tried))

    def _admitted(self, replica: Replica) -> None:
        replica.admitted, replica.refusal, replica.is_refused = True, "", False
        replica.checked(True)
        _log.info("engine_admitted", base_url=replica.url)
        self._checks.pop(replica, None)
        self._changed()

    def _refuse(self, replica: Replica, error: ConfigError | EngineError) -> None:
        is_refused = not isinstance(error, EngineUnavailable)
        if (replica.refusal, replica.is_refused) != (str(error), is_refused):
            _log.warning("engine_not_admitted", base_url=replica.url, reason=str(error))
        replica.refusal, replica.is_refused = str(error), is_refused
        self._routes.changed()

    def _changed(self) -> None:
        self._routes.changed()
        self.changed()

    async def _expire(self) -> None:
        while True:
            now = time.time()
            wait = _LONGEST_SLEEP_SECONDS
            for replica in self.replicas:
                if replica.expires_at is None:
                    continue
                if replica.expires_at <= now:
                    self._remove(replica, "no heartbeat within its ttl")
                else:
                    wait = min(wait, replica.expires_at - now)
            await asyncio.sleep(max(wait, _LOOK_SECONDS))


def _registration(replica: Replica) -> Registration:
    return msgspec.convert(replica, Registration, from_attributes=True)


_MOST_BYTES: Final = 1_000_000
_BETWEEN_READS_SECONDS: Final = 0.2


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    url: str
    version: int | None = None


_LINE: Final = msgspec.json.Decoder(_Line)


@asynccontextmanager
async def discovering(fleet: Fleet, config: EnginesConfig) -> AsyncIterator[None]:
    """Reads `engines.file` before the block begins, and repeatedly while it runs.

    A file that cannot be read, or is being written, changes nothing and is logged once.
    """
    if (file := config.file) is None:
        yield
        return
    problem = await _sync_with(fleet, file, "")

    async def repeat(problem: str) -> None:
        while True:
            await asyncio.sleep(config.poll_seconds)
            problem = await _sync_with(fleet, file, problem)

    task = asyncio.create_task(repeat(problem), name="file engines")
    try:
        yield
    finally:
        await cancel_and_wait(task)


async def _sync_with(fleet: Fleet, file: Path, last_problem: str) -> str:
    """Reads the list once and updates the fleet; returns why it could not be read, or ""."""
    try:
        fleet.sync("file", await _whole_list(file))
    except InputError as error:
        if str(error) != last_problem:
            _log.warning("engines_not_listed", origin="file", reason=str(error))
        return str(error)
    return ""


async def _whole_list(path: Path) -> list[Registration]:
    """Reads the list twice and raises if the reads differ: it may be half written."""
    listed = await asyncio.to_thread(read_list, path)
    await asyncio.sleep(_BETWEEN_READS_SECONDS)
    if await asyncio.to_thread(read_list, path) != listed:
        raise InputError(f"{path} has just changed; it is read again.")
    return listed


def read_list(path: Path) -> list[Registration]:
    """A line is an address, or a JSON object with `url` and `version`; empty lines and those that
    begin with # are skipped."""
    try:
        with path.open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}.") from error
    if len(data) > _MOST_BYTES:
        raise InputError(f"{path} has over {_MOST_BYTES} bytes.")
    listed: dict[str, Registration] = {}
    for number, raw in enumerate(data.decode(errors="replace").splitlines(), 1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        try:
            entry = _LINE.decode(line) if line.startswith("{") else _Line(line)
            check_url(entry.url)
            root_of(entry.url)
        except (ConfigError, msgspec.DecodeError, ValueError) as error:
            raise InputError(f"{path}, line {number}: {error}.", place=f"line {number}") from error
        listed[entry.url] = Registration(url=entry.url, version=entry.version)
    return list(listed.values())
