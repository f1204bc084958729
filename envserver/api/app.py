"""The FastAPI application over one open store: all routes, all middleware, background tasks. The
caller owns the store, which must be open before the first request and until after the last."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import structlog
from envserver_records.errors import StoreError, UsageError
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from ..dashboard import Dashboard
from ..formats.atropos import ScoreRange
from ..http.access import AccessTokens, Sessions, rules_of, session_key
from ..http.answers import MEANINGS, PROBLEM, Problem, answer_errors, is_native
from ..http.health import (
    STORE_IS_SILENT,
    CountedRequests,
    Health,
    Metrics,
    health_routes,
    metric_routes,
    store_probe,
)
from ..http.middleware import Access, KnownNames, KnownPages, Strangers
from ..http.requests import Json, fill_schemas, schema_later
from ..http.transfer import CompressedAnswers, DirectPosts, Endpoint, RequestBodies
from ..proxy.gate import Gate
from ..rollouts.policy import Bounds
from ..runners.registry import (
    RunnerRegistry,
    runner_beats,
    runner_numbers,
    runner_posts,
    runner_routes,
)
from ..settings.section import describe_fields
from ..settings.server import AlarmsConfig, RetentionConfig, ServerConfig
from ..store import Store
from ..store.demand import Demand
from ..trainers.atropos_routes import atropos_posts, atropos_routes
from ..trainers.atropos_service import AtroposService
from ..trainers.bodies import StreamRequest
from ..trainers.engines import EngineBook, engine_list, engine_routes
from ..trainers.groups import GroupFilter, GroupSearch
from ..trainers.live import Follower, Live, engine_rows, live_routes
from ..trainers.policy import HeldOutEvaluations, PolicyVersion, WeightPause, weight_routes
from ..trainers.routes import Logins, native_routes
from ..trainers.status import AlarmWatch, Recorder, remove_old
from ..version import __version__

if TYPE_CHECKING:
    from ..models.fleet import Fleet
    from ..rollouts.episodes import Episodes
    from ..rollouts.ordered import Orders


_LOOK_SECONDS: Final = 0.25
_RETRY_SECONDS: Final = 5


class QueueFull(UsageError):
    """Too much waits for a run; `detail["retry_after_seconds"]` says when to retry."""

    kind, status = "queue_full", 429


class QueueLimit:
    """See `ServerConfig.max_waiting_groups` and `max_waiting_gb`."""

    def __init__(self, store: Store, settings: ServerConfig) -> None:
        self._store = store
        self._most_groups = settings.max_waiting_groups
        self._most_bytes = settings.max_waiting_gb * 1e9
        self._bytes = 0
        self._looked_at = -_LOOK_SECONDS

    def limited(self, endpoints: Mapping[str, Endpoint]) -> dict[str, Endpoint]:
        return {path: self._limited(endpoint) for path, endpoint in endpoints.items()}

    def _limited(self, endpoint: Endpoint) -> Endpoint:
        async def answer(request: Request) -> Response:
            await self._check()
            return await endpoint(request)

        answer.__doc__ = endpoint.__doc__  # for the OpenAPI document
        return answer

    async def _check(self) -> None:
        groups = self._store.most_waiting()
        if groups >= self._most_groups:
            raise self._full(f"{groups} groups", "max_waiting_groups", self._most_groups)
        now = time.monotonic()
        if now >= self._looked_at + _LOOK_SECONDS:
            self._looked_at = now
            # What waits is a part of what is kept, whose size is known without a query.
            is_close = self._store.stored_bytes >= self._most_bytes
            self._bytes = await self._store.most_waiting_bytes() if is_close else 0
        if self._bytes >= self._most_bytes:
            raise self._full(
                f"Groups of {self._bytes / 1e9:.3g} GB", "max_waiting_gb", self._most_bytes / 1e9
            )

    def _full(self, waiting: str, setting: str, most: float) -> QueueFull:
        return QueueFull(
            f"{waiting} wait for a run, and --server.{setting} is {most:g}: nothing was stored.",
            hint="Retry once trainers have leased some groups, or close runs that lease nothing.",
            retry_after_seconds=_RETRY_SECONDS,
        )


_ALWAYS: Final = (400, 401, 403, 408, 413, 414, 421, 429, 431, 500, 503)
"""Answers of the middleware and of the connection, to any request: a GET may have a body, too."""
_OF_BODIES: Final = (422, 507)
_OF_CHANGES: Final = (507,)
_PROBLEM: Final = {"content": {PROBLEM: {"schema": schema_later(Problem)}}}
_DETAIL: Final = {
    "content": {
        "application/json": {
            "schema": {"type": "object", "properties": {"detail": {}}, "required": ["detail"]}
        }
    }
}
_QUERIES: Final = (StreamRequest, GroupFilter, GroupSearch)
"""Models whose fields are parameters of a query."""
_PLAIN: Final = {"text/plain": {"schema": {"type": "string"}}}


def complete_document(app: FastAPI) -> None:
    described: Callable[[], Json] = app.openapi
    made: list[Json] = []

    def openapi() -> Json:
        if not made:
            for model in _QUERIES:
                describe_fields(model)
            made.append(completed(described()))
        return made[0]

    app.openapi = openapi  # type: ignore[method-assign]


def completed(document: Json) -> Json:
    """Adds to `document` the errors of every route, and fills in the schemas of bodies."""
    for path, operations in document["paths"].items():
        error = _PROBLEM if is_native(path) else _DETAIL
        rules = rules_of(path)
        for method, operation in operations.items():
            own = {int(status) for status in operation["responses"]}
            more = {*_ALWAYS, *(_OF_BODIES if "requestBody" in operation else ())}
            rule = rules.get(method.upper())
            if method != "get" or (rule is not None and rule.is_change):
                more.update(_OF_CHANGES)
            for status in sorted(more - own):
                operation["responses"][str(status)] = {"description": MEANINGS[status], **error}
            for status in own:
                if status >= 400:
                    operation["responses"][str(status)].setdefault("content", error["content"])
            if not is_native(path):  # a body that is not gzip, as atroposlib's server answers it
                content = operation["responses"]["400"]["content"]
                operation["responses"]["400"]["content"] = {**content, **_PLAIN}
    components = document.setdefault("components", {})
    components["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
    document["security"] = [{}, {"token": []}]  # where access tokens are required
    schemas = components.setdefault("schemas", {})
    fill_schemas(document["paths"], schemas)
    return document


log = structlog.get_logger(__name__)

_EXPIRY_SECONDS: Final = 0.5
_SMALL_BODIES: Final = {"/v1/session": 4096}
"""Bytes of bodies that need no token, by path."""


def create_api(
    store: Store,
    *,
    settings: ServerConfig,
    status: Callable[[], dict[str, Any]] | None = None,
    on_policy_version: Callable[[int], None] | None = None,
    gate: Gate | None = None,
    metrics: Metrics | None = None,
    health: Health | None = None,
    include_messages: bool = True,
    score_range: ScoreRange = "unit",
    longest_row: int = 0,
    retention: RetentionConfig | None = None,
    runners: RunnerRegistry | None = None,
    orders: Orders | None = None,
    episodes: Episodes | None = None,
    alarms: AlarmWatch | None = None,
    live: Live | None = None,
    fleet: Fleet | None = None,
    evaluations: HeldOutEvaluations | None = None,
) -> FastAPI:
    """Builds the application; parts that are None have no routes.

    Args:
        status: JSON-like facts for `GET /v1/status`; called on the event loop, so it must be fast.
        on_policy_version: called with the stored version, and each that a trainer publishes.
        health: parts that must be ready; None: only the store.
        include_messages, score_range: how groups of local environments are sent to Atropos
            trainers.
        longest_row: tokens that a row of theirs may have.
        retention: which delivered groups are deleted from the store; None: none.
        runners: None: a new registry with the default capacity.
        alarms: None: by the default thresholds, if there are metrics.
        evaluations: of a held-out split.
    """
    live = live or Live()
    runners = runners or RunnerRegistry(
        store,
        Demand(store, Bounds(most_groups=256, most_batches=3)),
        silent_after_seconds=settings.silent_after_seconds,
    )
    runners.tell = live.failures.reported

    def publish(version: int) -> None:
        live.feed.publish("policy", {"version": version, "time": time.time()})
        runners.news.publish(version)
        if on_policy_version is not None:
            on_policy_version(version)

    policy = PolicyVersion(store, publish)
    pausing = None if gate is None else WeightPause(store, gate, runners)
    atropos = AtroposService(
        store,
        lease_seconds=settings.lease_seconds,
        include_messages=include_messages,
        score_range=score_range,
        longest_row=longest_row,
        silent_after_seconds=settings.silent_after_seconds,
        minimums=runners.table.minimums,
        version=lambda: policy.version,
    )

    logins = _logins(settings.tokens_file) if settings.tokens_file is not None else None
    recorder = None
    if metrics is not None:
        alarms = alarms or AlarmWatch(AlarmsConfig())
        alarms.book.listeners.append(live.alarmed)
        metrics.add(alarms.read)
        recorder = Recorder(metrics, store, then=alarms.check, tell=live.sampled)
    follower = Follower(live, store)
    engines = EngineBook(fleet, store) if fleet is not None else None
    if fleet is not None and engines is not None:
        policy.tell_engines = engines.tell_version
        fleet.changed = lambda: runners.news.tell_engines(engine_list(fleet))

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await atropos.load()
        await runners.load()
        await policy.load()
        if pausing is not None:
            await pausing.load()
        if engines is not None:
            await engines.load()
        await follower.load()
        upkeep = [
            asyncio.create_task(_expire_leases(store, atropos), name="lease-expiry"),
            asyncio.create_task(runners.news.run(), name="runners"),
            asyncio.create_task(follower.run(), name="live-events"),
        ]
        if retention is not None:
            upkeep.append(asyncio.create_task(remove_old(store, retention), name="retention"))
        if recorder is not None:
            upkeep.append(asyncio.create_task(recorder.run(), name="recorder"))
        try:
            yield
        finally:
            for task in upkeep:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task

    app = FastAPI(
        title="envserver", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None
    )
    complete_document(app)
    answer_errors(app)
    limit = QueueLimit(store, settings)
    wire_posts = limit.limited(atropos_posts(atropos))
    routers = [  # tried in order: the first are called most often
        atropos_routes(atropos, wire_posts),
        runner_routes(runners, settings.max_body_bytes),
        native_routes(
            store,
            atropos,
            policy,
            runners,
            settings=settings,
            set_aside=live.failures.set_aside,
            status=status,
            orders=orders,
            recorder=recorder,
            logins=logins,
            alarms=None if alarms is None else alarms.book,
            evaluations=evaluations,
        ),
        live_routes(live, store, lambda: policy.version, follower.look),
        health_routes(health or _store_only(store)),
    ]
    if engines is not None:
        routers.append(engine_routes(engines, lambda: engine_rows(live.engines)))
    if episodes is not None:
        from ..trainers.openenv import mount_openenv

        mount_openenv(app, episodes, settings.openenv_idle_seconds)
    if metrics is not None:
        metrics.add(partial(runner_numbers, runners))
        routers.append(metric_routes(metrics))
    if pausing is not None:
        routers.append(weight_routes(pausing, policy, evaluations))
    for router in routers:  # include_router would build each route twice
        app.router.routes += router.routes
    posts = wire_posts | limit.limited(runner_posts(runners, settings.max_body_bytes))
    app.add_middleware(DirectPosts, endpoints=posts | runner_beats(runners))
    app.add_middleware(RequestBodies, max_body_bytes=settings.max_body_bytes, smaller=_SMALL_BODIES)
    app.add_middleware(CompressedAnswers)
    if logins is not None:
        app.add_middleware(
            Access,
            tokens=logins.tokens,
            sessions=logins.sessions,
            strangers=logins.strangers,
            quota=settings.quota,
        )
    app.add_middleware(Dashboard)
    app.add_middleware(KnownPages, origins=settings.allowed_origins)
    if logins is None:
        app.add_middleware(KnownNames, names=settings.allowed_hosts)
    if metrics is not None:
        app.add_middleware(CountedRequests, requests=metrics.requests)
    return app


async def _expire_leases(store: Store, atropos: AtroposService) -> None:
    while True:
        await asyncio.sleep(_EXPIRY_SECONDS)
        try:
            expired = await store.expire()
        except StoreError as error:
            log.error("expiry_failed", error=str(error))
            continue
        if expired:
            log.warning("leases_expired", leases=expired)
            atropos.store_changed()


def _logins(tokens_file: Path) -> Logins:
    tokens = AccessTokens(tokens_file)
    return Logins(tokens, Sessions(tokens, session_key(tokens_file)), Strangers())


def _store_only(store: Store) -> Health:
    health = Health()
    health.found("store", store_probe(store), silent=STORE_IS_SILENT)
    return health
