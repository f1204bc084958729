"""Whether the process lives (`/healthz`) and can do its work (`/readyz`).

The server consists of parts (the store, the engine, workers, scorers), each of which is starting,
ready or down; one that can be asked is asked whenever somebody wants to know. Ready means: every
part is, and nobody told the server to end. Not ready is 503 with problem details that name the
parts that are missing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Final, Literal

import msgspec
import structlog
from envserver_records.errors import EnvserverError
from fastapi import APIRouter
from starlette.responses import Response

from ..models.engine import Engine
from ..store import GroupStore
from ..telemetry.lag import LoopLag
from .native.answers import json_answer
from .problems import error_answer

PartState = Literal["starting", "ready", "down", "draining"]
Probe = Callable[[], Awaitable[str]]
"""Asks a part: "" when it is well, else why it is not; an EnvserverError says the same."""

PROBE_SECONDS: Final = 2.0
"""A part that takes longer to answer is down."""
WATCH_SECONDS: Final = 5.0

_log = structlog.get_logger("envserver.health")


class Part(msgspec.Struct):
    """One part; `since`: when its state began, in seconds since the epoch."""

    state: PartState
    since: float
    reason: str = ""


class Health:
    """The parts of one server. A new one has none, and is ready.

    Args:
        lag: of the event loop, where it is measured.
    """

    def __init__(self, lag: LoopLag | None = None) -> None:
        self.parts: dict[str, Part] = {}
        self.lag = lag
        self._probes: dict[str, Probe] = {}
        self._started_at = time.time()
        self._asking: asyncio.Task[None] | None = None

    def expect(self, part: str) -> None:
        """`part` is starting."""
        self._set(part, "starting")

    def found(self, part: str, probe: Probe | None = None) -> None:
        """`part` is ready, as far as is known; `probe` asks it from now on."""
        if probe is None:
            self._set(part, "ready")
        else:
            self._probes[part] = probe
            self.parts.setdefault(part, Part("starting", time.time()))

    def drain(self) -> None:
        """The server ends its work, and is not ready again."""
        self._set("server", "draining", "it was told to stop")

    @property
    def ready(self) -> bool:
        """As last seen."""
        return all(part.state == "ready" for part in self.parts.values())

    async def refresh(self) -> None:
        """Asks every part that can be asked; who comes meanwhile shares the answer."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask_all())
        await asyncio.shield(self._asking)

    async def watch(self) -> None:
        """Keeps what is known up to date, until cancelled."""
        while True:
            await self.refresh()
            await asyncio.sleep(WATCH_SECONDS)

    def live_body(self) -> dict[str, object]:
        """What `/healthz` says."""
        body: dict[str, object] = {
            "status": "ok",
            "uptime_seconds": round(time.time() - self._started_at, 3),
        }
        if self.lag is not None:
            body["tick_age_seconds"] = round(self.lag.tick_age_seconds, 4)
            body["loop_lag_p99_seconds"] = round(self.lag.p99_seconds(), 4)
        return body

    def missing(self) -> str:
        """Which parts are not ready, and why, in words; "" when all are."""
        words = []
        for name, part in self.parts.items():
            if part.state != "ready":
                words.append(f"{name} is {part.state}{f' ({part.reason})' if part.reason else ''}")
        return "; ".join(words)

    async def _ask_all(self) -> None:
        await asyncio.gather(*(self._ask(part, probe) for part, probe in self._probes.items()))

    async def _ask(self, part: str, probe: Probe) -> None:
        try:
            async with asyncio.timeout(PROBE_SECONDS):
                reason = await probe()
        except TimeoutError:
            reason = f"no answer within {PROBE_SECONDS:g} seconds"
        except EnvserverError as error:
            reason = error.message
        except Exception as error:  # noqa: BLE001 (a part that cannot be asked is not well)
            reason = f"asking it broke: {type(error).__name__}"
            _log.exception("probe_broke", part=part)
        self._set(part, "down" if reason else "ready", reason)

    def _set(self, name: str, state: PartState, reason: str = "") -> None:
        before = self.parts.get(name)
        if before is not None and before.state == state:
            before.reason = reason
            return
        self.parts[name] = Part(state, time.time(), reason)
        if state == "down":
            _log.warning("part_is_down", part=name, reason=reason)
        elif before is not None and before.state == "down":
            _log.info("part_is_back", part=name)


def store_probe(store: GroupStore) -> Probe:
    """Asks the store for something small."""

    async def probe() -> str:
        await store.get_value("policy_version")
        return ""

    return probe


def engine_probe(engine: Engine) -> Probe:
    """Asks every address of the engine whether it lives; one is enough."""

    async def probe() -> str:
        replicas = await engine.health()
        if not replicas or any(one.healthy for one in replicas):
            return ""
        return "; ".join(dict.fromkeys(one.reason or "it does not answer" for one in replicas))

    return probe


def health_routes(health: Health) -> APIRouter:
    """`/healthz` and `/readyz`."""
    router = APIRouter(tags=["health"])

    @router.get("/healthz")
    async def healthz() -> Response:
        """The process answers; how late its event loop is."""
        return json_answer(health.live_body())

    @router.get("/readyz")
    async def readyz() -> Response:
        """Every part is ready; else 503, and which are not."""
        await health.refresh()
        parts = {name: msgspec.structs.asdict(part) for name, part in health.parts.items()}
        missing = health.missing()
        if missing:
            message = f"Not ready: {missing}."
            return error_answer("/readyz", 503, message, kind="not_ready", parts=parts)
        return json_answer({"status": "ok", "parts": parts})

    return router
