"""GET /metrics, and the HTTP request counters by route.

Each part of the server adds a source of metrics; all sources are read on each request. Requests
are counted by route template, so that ids in paths do not become labels.
"""

from __future__ import annotations

import asyncio
import platform
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Final

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.core import Metric
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .. import __version__
from ..telemetry.lag import LoopLag
from ..telemetry.numbers import SECONDS, Counts, Labelled, counter, gauge, histogram, info, single
from ..telemetry.process import Resources
from .health import Health

Source = Callable[[], Awaitable[Iterable[Metric]]]
"""Returns current metrics; runs on the event loop, so it must be fast."""

_METHODS: Final = frozenset({"GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"})


class Requests:
    """HTTP requests by route: number, status and duration."""

    def __init__(self) -> None:
        self.counts = Counts()
        self.seconds = Labelled(SECONDS)

    async def families(self) -> Iterable[Metric]:
        """Returns the metrics; a Source."""
        labels = ("method", "route", "status")
        requests = counter(
            "envserver_http_requests", "Requests answered, by route", labels, self.counts
        )
        seconds = histogram(
            "envserver_http_request_seconds",
            "Seconds from request to end of response, long polls included",
            ("route",),
            self.seconds,
        )
        return [requests, seconds]


class Metrics:
    """All metrics of a server. `requests` counts those of its API."""

    def __init__(self) -> None:
        self.requests = Requests()
        self._sources: list[Source] = [_build, Resources().families, self.requests.families]

    def add(self, source: Source) -> None:
        """Adds the metrics of `source`."""
        self._sources.append(source)

    def watch(self, lag: LoopLag, health: Health) -> None:
        """Adds the event loop's lag and the state of the parts."""

        async def families() -> Iterable[Metric]:
            ready = [((name,), float(one.state == "ready")) for name, one in health.parts.items()]
            return [
                histogram(
                    "envserver_loop_lag_seconds",
                    "Delay of a task that wakes every 50 ms",
                    (),
                    [((), lag.seconds)],
                ),
                gauge(
                    "envserver_loop_lag_p99_seconds",
                    "99th percentile of the delay over the last minute",
                    (),
                    single(lag.p99_seconds()),
                ),
                gauge("envserver_ready", "1 while every part works", (), single(health.ready)),
                gauge("envserver_part_ready", "1 while it is, as last seen", ("part",), ready),
            ]

        self.add(families)

    async def families(self) -> list[Metric]:
        """Returns all metrics as they are now."""
        return [family for source in self._sources for family in await source()]

    async def text(self) -> bytes:
        """Returns all metrics in the Prometheus text format."""
        return await asyncio.to_thread(generate_latest, _Read(await self.families()))


class _Read:
    """A registry over metrics that were already collected."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


async def _build() -> Iterable[Metric]:
    facts = {"version": __version__, "python": platform.python_version()}
    return [info("envserver_build", "Version and build of this server", facts)]


def metric_routes(metrics: Metrics) -> APIRouter:
    """Returns the route `/metrics`."""
    router = APIRouter(tags=["health"])

    @router.get("/metrics", response_class=PlainTextResponse)
    async def show() -> Response:
        """Returns counters, gauges and histograms in the Prometheus text format."""
        return Response(await metrics.text(), media_type=CONTENT_TYPE_LATEST)

    return router


class CountedRequests:
    """The outermost middleware: counts all requests."""

    def __init__(self, app: ASGIApp, requests: Requests) -> None:
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
            answered = str(status) if status else "none"
            self._requests.counts.add((method, route, answered))
            self._requests.seconds.add((route,), time.perf_counter() - started)
