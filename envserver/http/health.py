"""Liveness (`/healthz`), readiness (`/readyz`) and metrics (`/metrics`).

A server is ready when no part (store, disk, engine, workers, scorers) is starting or down and it is
not shutting down. A full disk is limited, not down: only the leases and acks of trainers make
space, and a server that is not ready gets no requests in many places."""

from __future__ import annotations

import asyncio
import platform
import time
from collections.abc import Awaitable, Callable
from itertools import chain
from types import SimpleNamespace
from typing import Any, Final, Literal, cast

import msgspec
import structlog
from envserver_records.errors import EnvserverError, StoreFull
from fastapi import APIRouter
from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import Metric
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..models.engine import Engine
from ..store import Store
from ..telemetry.measures import Meter, Reading, families
from ..telemetry.process import LoopLag, resource_numbers
from ..version import __version__
from .answers import error_answer, json_answer

PartState = Literal["starting", "ready", "limited", "down", "draining"]
_WORKING: Final = ("ready", "limited")
Probe = Callable[[], Awaitable[str]]
"""Checks a part: returns "" if it is healthy, else why not; may raise EnvserverError instead."""

PROBE_SECONDS: Final = 2.0
"""A part whose probe takes longer is down."""
WATCH_SECONDS: Final = 5.0

_log = structlog.get_logger("envserver.health")


class Part(msgspec.Struct):
    """One part; `since`: when its state began, in seconds since the epoch."""

    state: PartState
    since: float
    reason: str = ""


class Health:
    """The parts of a server. Without parts it is ready. `lag`: event loop lag, if measured."""

    def __init__(self, lag: LoopLag | None = None) -> None:
        self.parts: dict[str, Part] = {}
        self.lag = lag
        self.role: Callable[[], dict[str, object]] = dict
        """Returns what the answers add: whether this server leads or follows, and who leads."""
        self._probes: dict[str, tuple[Probe, PartState, str]] = {}
        self._started_at = time.time()
        self._asking: asyncio.Task[None] | None = None

    def expect(self, part: str) -> None:
        self._set(part, "starting")

    def found(
        self,
        part: str,
        probe: Probe | None = None,
        *,
        failing: PartState = "down",
        silent: str = f"no answer within {PROBE_SECONDS:g} seconds",
    ) -> None:
        """Marks `part` as ready or, with a `probe`, lets the probe decide from now on. `failing`:
        its state while the probe gives a reason; `silent`: the reason if the probe does not answer.
        """
        if probe is None:
            self._set(part, "ready")
        else:
            self._probes[part] = (probe, failing, silent)
            self.parts.setdefault(part, Part("starting", time.time()))

    def drain(self) -> None:
        self._set("server", "draining", "it is stopping")

    @property
    def ready(self) -> bool:
        return all(part.state in _WORKING for part in self.parts.values())

    @property
    def status(self) -> str:
        is_limited = any(part.state == "limited" for part in self.parts.values())
        return "limited" if is_limited else "ok"

    async def refresh(self) -> None:
        """Runs all probes; concurrent callers share the result."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask_all())
        await asyncio.shield(self._asking)

    async def watch(self) -> None:
        while True:
            await self.refresh()
            await asyncio.sleep(WATCH_SECONDS)

    def live_body(self) -> dict[str, object]:
        body: dict[str, object] = {
            "status": "ok",
            "uptime_seconds": round(time.time() - self._started_at, 3),
        }
        if self.lag is not None:
            body["tick_age_seconds"] = round(self.lag.tick_age_seconds, 4)
            body["loop_lag_p99_seconds"] = round(self.lag.p99_seconds(), 4)
        return body

    def missing(self) -> str:
        """Describes which parts are not ready, and why; "" if all are ready."""
        return "; ".join(
            f"{name} is {part.state}{f' ({part.reason})' if part.reason else ''}"
            for name, part in self.parts.items()
            if part.state not in _WORKING
        )

    async def _ask_all(self) -> None:
        await asyncio.gather(*(self._ask(part, *probe) for part, probe in self._probes.items()))

    async def _ask(self, part: str, probe: Probe, failing: PartState, silent: str) -> None:
        try:
            async with asyncio.timeout(PROBE_SECONDS):
                reason = await probe()
        except TimeoutError:
            reason = silent
        except EnvserverError as error:
            reason = error.message
        except Exception as error:  # noqa: BLE001 (a part that cannot be asked is not well)
            reason = f"checking it failed: {type(error).__name__}"
            _log.exception("probe_failed", part=part)
        self._set(part, failing if reason else "ready", reason)

    def _set(self, name: str, state: PartState, reason: str = "") -> None:
        before = self.parts.get(name)
        if before is not None and before.state == state:
            before.reason = reason
            return
        self.parts[name] = Part(state, time.time(), reason)
        if state in ("down", "limited"):
            _log.warning(f"part_is_{state}", part=name, reason=reason)
        elif before is not None and before.state in ("down", "limited"):
            _log.info("part_is_back", part=name)


STORE_IS_SILENT: Final = (
    "it cannot be written: another program locks it, or its disk does not answer"
)


def store_probe(store: Store) -> Probe:
    """Returns a probe that writes to the store. `disk_probe` reports a full disk."""

    async def probe() -> str:
        try:
            await store.touch()
        except StoreFull as error:
            return "" if store.disk_problem else error.message
        return ""

    return probe


def disk_probe(store: Store) -> Probe:
    async def probe() -> str:
        return store.disk_problem

    return probe


def engine_probe(engine: Engine) -> Probe:
    """Returns a probe of the engine, which is healthy if at least one replica answers. A server
    whose engines are registered is healthy without any: otherwise a load balancer would let no
    request through that registers one."""

    async def probe() -> str:
        replicas = await engine.health()
        is_registered = not any(replica.origin == "setting" for replica in replicas)
        if is_registered or any(replica.healthy for replica in replicas):
            return ""
        return "; ".join(
            dict.fromkeys(replica.reason or "it does not answer" for replica in replicas)
        )

    return probe


def health_routes(health: Health) -> APIRouter:
    router = APIRouter(tags=["health"])

    @router.get("/healthz")
    async def healthz() -> Response:
        """Answers if the process is alive; reports the lag of its event loop."""
        return json_answer(health.live_body())

    @router.get("/readyz")
    async def readyz() -> Response:
        """Answers 200 if every part is ready, else 503 with the parts that are not."""
        await health.refresh()
        parts = {name: msgspec.structs.asdict(part) for name, part in health.parts.items()}
        missing = health.missing()
        if missing:
            message = f"Not ready: {missing}."
            more: dict[str, Any] = {"parts": parts, **health.role()}
            return error_answer("/readyz", 503, message, kind="not_ready", **more)
        return json_answer({"status": health.status, "parts": parts, **health.role()})

    return router


# Each part of the server adds a source of metrics; all sources are read on each request. Requests
# are counted by route template, so that ids in paths do not become labels.

Source = Callable[[], Awaitable[Reading]]
"""Returns current numbers; runs on the event loop, so it must be fast."""

_METHODS: Final = frozenset({"GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"})


class Metrics:
    """`requests`: counted by `CountedRequests`."""

    def __init__(self) -> None:
        self.requests = Meter("http_requests", "http_request_seconds")
        self._process = ProcessCollector(registry=None)
        self._sources: list[Source] = [_build, resource_numbers, self.requests.read]

    def add(self, *sources: Source) -> None:
        self._sources += sources

    def watch(self, lag: LoopLag, health: Health) -> None:
        async def read() -> Reading:
            return {
                "loop_lag_seconds": lag.seconds,
                "loop_lag_p99_seconds": lag.p99_seconds(),
                "ready": health.ready,
                "part_ready": {name: part.state == "ready" for name, part in health.parts.items()},
            }

        self.add(read)

    async def families(self) -> list[Metric]:
        readings = [await source() for source in self._sources]
        process = await asyncio.to_thread(self._process.collect)
        return [*process, *chain.from_iterable(map(families, readings))]

    async def text(self) -> bytes:
        collected = await self.families()
        registry = cast(CollectorRegistry, SimpleNamespace(collect=lambda: collected))
        return await asyncio.to_thread(generate_latest, registry)


async def _build() -> Reading:
    return {"build_info": {(__version__, platform.python_version()): 1.0}}


def metric_routes(metrics: Metrics) -> APIRouter:
    router = APIRouter(tags=["health"])

    @router.get("/metrics", response_class=PlainTextResponse)
    async def show() -> Response:
        """Returns counters, gauges and histograms in the Prometheus text format."""
        return Response(await metrics.text(), media_type=CONTENT_TYPE_LATEST)

    return router


class CountedRequests:
    def __init__(self, app: ASGIApp, requests: Meter) -> None:
        self._app = app
        self._requests = requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = 0
        started = time.perf_counter()

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, counted)
        finally:
            route = getattr(scope.get("route"), "path", "unmatched")
            method = scope["method"] if scope["method"] in _METHODS else "other"
            self._requests.add("http_requests", method, route, str(status or "none"))
            seconds = time.perf_counter() - started
            self._requests.add("http_request_seconds", route, value=seconds)
