"""The application of `envserver view`: the page, and the routes for inspection over any groups.

Every route is a GET; only this machine's names are answered, so that no page of another site can
read anything.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Annotated, Any, Final

import httpx
from envserver_records.errors import EnvserverError, NotFoundError
from envserver_records.http_errors import authorization
from envserver_records.servers import AsyncServersClient
from fastapi import APIRouter, FastAPI, Query
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from ..dashboard import Dashboard
from ..http.access import rules_of
from ..http.answers import answer_errors, error_answer, json_answer
from ..http.middleware import KnownNames, KnownPages
from ..http.transfer import CompressedAnswers
from ..store.lookups import GroupLookups
from ..trainers.encoding import GroupEncoder
from ..trainers.groups import add_group_routes, add_rollout_routes, add_task_routes
from ..trainers.live import FailureLog, add_failure_routes
from ..trainers.live_events import Feed, add_event_routes
from ..trainers.routes import add_session_routes
from ..version import __version__
from .evaluations import ComparisonSearch, Evaluations

Source = Callable[[], dict[str, Any]]


def create_viewer(
    groups: GroupLookups,
    feed: Feed,
    source: Source,
    evaluations: Evaluations | None = None,
    failures: FailureLog | None = None,
) -> FastAPI:
    router = APIRouter()
    encoder = GroupEncoder(groups, most_bytes=0)  # a file may be replaced
    add_rollout_routes(router, groups)  # before that of groups, whose ids may have slashes
    add_group_routes(router, groups, encoder)
    add_task_routes(router, groups)
    add_event_routes(router, feed)
    add_session_routes(router, None)
    if failures is not None:
        add_failure_routes(router, failures)

    @router.get("/v1/source")
    async def get_source() -> Response:
        return json_answer({**source(), "version": __version__})

    @router.get("/v1/evaluations")
    async def get_evaluations() -> Response:
        return json_answer(await _there(evaluations).all())

    @router.get("/v1/comparison")
    async def get_comparison(wanted: Annotated[ComparisonSearch, Query()]) -> Response:
        return json_answer(await _there(evaluations).comparison(wanted))

    app = FastAPI(title="envserver view", version=__version__, docs_url=None, redoc_url=None)
    answer_errors(app)
    app.include_router(router)
    guard(app)
    return app


def guard(app: FastAPI) -> None:
    """Adds the page, and what protects the reader from pages of other sites."""
    app.add_middleware(CompressedAnswers)
    app.add_middleware(Dashboard)
    app.add_middleware(KnownPages, origins=())
    app.add_middleware(KnownNames, names=())


def _there(evaluations: Evaluations | None) -> Evaluations:
    if evaluations is None:
        raise NotFoundError(
            "There is no evaluation here.", hint="View a folder of `evaluate`, or several runs."
        )
    return evaluations


_PASSED: Final = ("accept", "accept-encoding", "last-event-id")
_RETURNED: Final = (
    *("content-type", "content-encoding", "cache-control", "retry-after", "vary"),
    "x-accel-buffering",
)
_CONNECT_SECONDS: Final = 10.0
_READ_SECONDS: Final = 60.0
"""Longer than a stream of events is silent."""


class ServerOutOfReach(EnvserverError):
    kind, status = "server_out_of_reach", 502


def create_relay(url: str, http: httpx.AsyncClient) -> FastAPI:
    app = FastAPI(title="envserver view", version=__version__, docs_url=None, redoc_url=None)
    answer_errors(app)

    router = APIRouter()
    add_session_routes(router, None)
    app.include_router(router)

    @app.get("/{path:path}")
    async def relay(path: str, request: Request) -> Response:
        if not _is_readable(f"/{path}"):
            return error_answer(f"/{path}", 404, "The resource does not exist.")
        return await _relayed(http, url, request)

    guard(app)
    return app


def client_of(url: str) -> httpx.AsyncClient:
    """Returns a client that follows no redirects: they could take the token to another host."""
    timeout = httpx.Timeout(_READ_SECONDS, connect=_CONNECT_SECONDS)
    return AsyncServersClient(url, headers=authorization(), timeout=timeout)


def _is_readable(path: str) -> bool:
    rule = rules_of(path).get("GET")
    is_for_readers = rule is not None and (rule.roles is None or "reader" in rule.roles)
    return path.startswith("/v1/") and is_for_readers and rule is not None and not rule.is_change


async def _relayed(http: httpx.AsyncClient, url: str, request: Request) -> Response:
    headers = {name: value for name in _PASSED if (value := request.headers.get(name))}
    raw = request.scope["raw_path"].decode("ascii")
    path = raw.lstrip("/") + (f"?{request.url.query}" if request.url.query else "")
    sent = http.build_request("GET", path, headers=headers)
    try:
        answer = await http.send(sent, stream=True)
    except httpx.TransportError as error:
        raise ServerOutOfReach(
            f"{url} does not answer: {error or type(error).__name__}."
        ) from error
    kept = {name: value for name in _RETURNED if (value := answer.headers.get(name))}
    if answer.status_code == httpx.codes.UNAUTHORIZED:
        await answer.aclose()
        raise ServerOutOfReach(
            f"{url} requires an access token.", hint="ENVSERVER_TOKEN holds it; then start again."
        )
    return StreamingResponse(
        _parts(answer), answer.status_code, kept, background=BackgroundTask(answer.aclose)
    )


async def _parts(answer: httpx.Response) -> AsyncIterator[bytes]:
    try:
        async for part in answer.aiter_raw():
            yield part
    except httpx.TransportError:
        return  # the browser sees a short answer, and asks again
