"""What a follower answers with: its own health and metrics, and the leader's answers.

In: requests of trainers, environments, joiners and people. Out: answers as if the leader had been
asked. What a follower does itself, so that the leader need not: TLS, limits of connections, heads
and bodies, refusing unknown tokens, inflating posts, compressing answers, the page's files.
"""

from __future__ import annotations

from functools import partial

from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from ...dashboard import Dashboard
from ...server_config import ServerConfig
from ...store.leadership import Leadership
from ...telemetry.lag import LoopLag
from ..access.middleware import Access, KnownNames
from ..access.quotas import Strangers
from ..access.tokens import AccessTokens
from ..health import Health, health_routes
from ..metrics import CountedRequests, Metrics, metric_routes
from ..transfer import CompressedAnswers, RequestBodies, accepts
from .facts import leads_metric, role
from .link import LeaderLink
from .passing import COMPRESSED, PassedOn


def follower_app(
    leadership: Leadership, link: LeaderLink, settings: ServerConfig, lag: LoopLag
) -> ASGIApp:
    """Builds the application. Raises ConfigError: the tokens file cannot be used."""
    health = Health(lag)
    health.role = partial(role, leadership)
    health.found("leader", link.probe)
    metrics = Metrics()
    metrics.watch(lag, health)
    metrics.add(partial(leads_metric, leadership))
    app: ASGIApp = _routes(health, metrics, link, settings)
    if settings.tokens_file is not None:
        tokens, strangers = AccessTokens(settings.tokens_file), Strangers()
        app = Access(app, tokens, None, strangers, settings.quota)
    app = Dashboard(app)
    if settings.tokens_file is None:
        app = KnownNames(app, settings.allowed_hosts)
    return CountedRequests(app, metrics.requests)


def _routes(health: Health, metrics: Metrics, link: LeaderLink, settings: ServerConfig) -> FastAPI:
    app = FastAPI(openapi_url=None)
    app.include_router(health_routes(health))
    app.include_router(metric_routes(metrics))
    passed = PassedOn(link)
    bodies = RequestBodies(passed, max_body_bytes=settings.max_body_bytes, smaller={})
    app.mount("/", CompressedAnswers(_Plain(passed, bodies)))
    return app


class _Plain:
    """Lets the leader get and send plain bodies; what need not be inflated is streamed."""

    def __init__(self, streamed: ASGIApp, inflated: ASGIApp) -> None:
        self._streamed = streamed
        self._inflated = inflated

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._streamed(scope, receive, send)
            return
        headers = Headers(scope=scope)
        scope[COMPRESSED] = accepts(headers, "gzip")
        codings = "zstd" if accepts(headers, "zstd") else "identity"
        kept = [(name, value) for name, value in scope["headers"] if name != b"accept-encoding"]
        scope["headers"] = [*kept, (b"accept-encoding", codings.encode())]
        packed = "gzip" in headers.get("content-encoding", "").lower()
        await (self._inflated if packed else self._streamed)(scope, receive, send)
