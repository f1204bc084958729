"""The FastAPI application over one open store: native routes, the Atropos protocol, health.

The app's lifespan runs its background tasks (such as expiring leases). The caller owns the store,
which must be open before the first request and until after the last.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import structlog
from envserver_records.errors import StoreError
from fastapi import FastAPI

from .. import __version__
from ..dashboard import Dashboard
from ..formats.atropos import ScoreRange
from ..proxy.gate import Gate
from ..rollouts.capacity import Bounds
from ..settings.server import AlarmsConfig, RetentionConfig, ServerConfig
from ..store import GroupStore
from ..store.demand import Demand
from .access.middleware import Access, KnownNames, KnownPages
from .access.quotas import Strangers
from .access.sessions import Sessions, session_key
from .access.tokens import AccessTokens
from .atropos.routes import atropos_posts, atropos_routes
from .atropos.service import AtroposService
from .document import complete_document
from .engines import EngineBook, engine_list, engine_routes
from .health import Health, health_routes, store_probe
from .live import Live
from .live.engines import engine_rows
from .live.follower import Follower
from .live.routes import live_routes
from .metrics import CountedRequests, Metrics, metric_routes
from .native import native_routes
from .native.policy import HeldOutEvaluations, PolicyVersion
from .native.runs import FilterWarnings
from .native.session import Logins
from .problems import answer_errors
from .queue_limit import QueueLimit
from .recording import AlarmWatch, Recorder, remove_old
from .runners.metrics import RunnerMetrics, count_runners
from .runners.registry import RunnerRegistry
from .runners.routes import runner_beats, runner_posts, runner_routes
from .transfer import CompressedAnswers, DirectPosts, RequestBodies
from .weights import WeightPause, weight_routes

if TYPE_CHECKING:
    from ..models.fleet import Fleet
    from ..rollouts.episodes import Episodes
    from ..rollouts.ordered import Orders

log = structlog.get_logger(__name__)

_EXPIRY_SECONDS: Final = 0.5
_SMALL_BODIES: Final = {"/v1/session": 4096}
"""Bytes of bodies that anybody may send, by path."""


def create_api(
    store: GroupStore,
    *,
    settings: ServerConfig,
    status: Callable[[], dict[str, Any]] | None = None,
    on_policy_version: Callable[[int], None] | None = None,
    gate: Gate | None = None,
    metrics: Metrics | None = None,
    health: Health | None = None,
    include_messages: bool = True,
    score_range: ScoreRange = "unit",
    retention: RetentionConfig | None = None,
    runners: RunnerRegistry | None = None,
    orders: Orders | None = None,
    episodes: Episodes | None = None,
    alarms: AlarmWatch | None = None,
    live: Live | None = None,
    fleet: Fleet | None = None,
    evaluations: HeldOutEvaluations | None = None,
) -> FastAPI:
    """Builds the application.

    Args:
        store: must stay open while the app runs.
        settings: body limit, lease duration and other server settings.
        status: JSON-like facts for `GET /v1/status`; called on the event loop, so it must be fast.
        on_policy_version: called with the stored version, and each that a trainer publishes.
        metrics: metrics for `GET /metrics`; None: the route does not exist.
        health: parts that must be ready; None: only the store.
        gate: pauses model calls at the engine; None if this server has no engine.
        include_messages, score_range: how groups of local environments are sent to Atropos
            trainers.
        retention: which delivered groups are deleted from the store; None: none.
        runners: the registry of runners; None: a new one with the default capacity.
        orders: makes rollouts on demand; None: those routes do not exist.
        episodes: serves OpenEnv's protocol at /openenv/{environment}; None: it does not.
        alarms: says what is wrong; None: by the default thresholds, if there are metrics.
        live: what the parts of this server tell of; None: a new one, for the store alone.
        fleet: engines that come and go; None: those routes do not exist.
        evaluations: of a held-out split; None: those routes do not exist.
    """
    live = live or Live()
    runners = runners or RunnerRegistry(
        store,
        Demand(store, Bounds(most_groups=256, most_batches=3)),
        silent_after_seconds=settings.silent_after_seconds,
    )
    runners.tell = live.failures.told

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
        silent_after_seconds=settings.silent_after_seconds,
        minimums=runners.table.minimums,
        version=lambda: policy.version,
    )

    logins = _logins(settings.tokens_file) if settings.tokens_file is not None else None
    recorder = None
    if metrics is not None:
        alarms = alarms or AlarmWatch(AlarmsConfig())
        alarms.book.listeners.append(live.alarmed)
        metrics.add(alarms.families)
        recorder = Recorder(metrics, store, then=alarms.check, tell=live.sampled)
    follower = Follower(live, store)
    engines = EngineBook(fleet, store) if fleet is not None else None
    if fleet is not None and engines is not None:
        policy.tell_engines = engines.tell_version
        fleet.changed = lambda: runners.news.tell_engines(engine_list(fleet))

    def present() -> set[str]:
        joined = {one.env for one in runners.table.known.values()}
        return joined | atropos.environment_names() | set(orders.names if orders else ())

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
            settings=settings,
            joined=lambda: count_runners(runners),
            present=present,
            filters=FilterWarnings(store, policy, present),
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
        from .openenv import mount_openenv

        mount_openenv(app, episodes, settings.openenv_idle_seconds)
    if metrics is not None:
        metrics.add(RunnerMetrics(runners).families)
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


async def _expire_leases(store: GroupStore, atropos: AtroposService) -> None:
    """Requeues expired leases until cancelled; retries when the store fails."""
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
    """Reads the access tokens and the key of the page's logins."""
    tokens = AccessTokens(tokens_file)
    return Logins(tokens, Sessions(tokens, session_key(tokens_file)), Strangers())


def _store_only(store: GroupStore) -> Health:
    health = Health()
    health.found("store", store_probe(store))
    return health
