"""The native routes under /v1, and logins of the page."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import structlog
from envserver_records.errors import UsageError
from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from ..http.access import AccessTokens, Sessions, Token, is_own_page, may_read
from ..http.answers import json_answer, route
from ..http.middleware import Forbidden, Strangers, Unauthorized
from ..http.requests import read_body
from ..runners.registry import RunnerRegistry
from ..settings.section import Described
from ..settings.server import ServerConfig
from ..store import Store
from ..telemetry.alarms import AlarmBook
from .atropos_service import AtroposService
from .bodies import Body
from .groups import add_group_routes, add_rollout_routes, add_task_routes
from .leasing import FilterWarnings, Leasing
from .policy import HeldOutEvaluations, PolicyVersion, add_evaluation_routes, add_policy_routes
from .runs import SetAside, add_lease_routes, add_run_routes
from .status import (
    Recorder,
    add_alarm_routes,
    add_estimate_routes,
    add_series_routes,
    add_source_routes,
    add_status_routes,
)

if TYPE_CHECKING:
    from ..rollouts.ordered import Orders


log = structlog.get_logger(__name__)

_NO_STORE: Final = {"cache-control": "no-store"}


class SessionRequest(Body):
    """A login."""

    token: str = Field(max_length=512)
    """An access token whose role may read: reader, trainer or admin."""


class SessionAnswer(Described):
    needs_login: bool
    """Whether this client must log in, or send an access token, to read anything."""
    role: str | None
    """The client's role; null if it is not logged in, or if the server has no access tokens."""
    name: str | None
    """Name of its access token."""


class NotJson(UsageError):
    kind, status = "not_json", 415


class Logins:
    def __init__(self, tokens: AccessTokens, sessions: Sessions, strangers: Strangers) -> None:
        self.tokens = tokens
        self.sessions = sessions
        self.strangers = strangers

    def log_in(self, text: str, address: str) -> Token:
        token = self.tokens.find(text.strip())
        if token is None:
            self.strangers.failed(address)
            raise Unauthorized("This access token is not valid.")
        if not may_read(token):
            raise Forbidden(
                f"A token of the role {token.role} may not read.",
                hint="envserver token create --role reader --name NAME",
            )
        log.info("login", client=token.name, address=address)
        return token


def add_session_routes(router: APIRouter, logins: Logins | None) -> None:
    @router.get("/v1/session", **route(SessionAnswer, what="Who asks."))
    async def get_session(request: Request) -> Response:
        """Returns whether this client must log in, and as whom it is logged in."""
        if logins is None:
            return _answer(None, needs_login=False)
        token = logins.sessions.reader(request.scope)
        return _answer(token, needs_login=token is None)

    @router.post("/v1/session", **route(SessionAnswer, 415, body=SessionRequest, what="Logged in."))
    async def log_in(request: Request) -> Response:
        """Logs the page in: sets a cookie with which it reads, and nothing else. Only for a page
        of this server; programs send their access token with each request."""
        if logins is None:
            return _answer(None, needs_login=False)
        if not is_own_page(request.scope):
            raise Forbidden(
                "Only a page of this server can log in.",
                hint="Browsers tell where a request comes from over HTTPS and to this machine "
                "only: use HTTPS, or an SSH tunnel.",
            )
        if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
            raise NotJson("A login must be JSON.")
        wanted = await read_body(request, SessionRequest)
        token = logins.log_in(wanted.token, request.client.host if request.client else "")
        answer = _answer(token.model_copy(update={"role": "reader"}), needs_login=False)
        answer.headers["set-cookie"] = logins.sessions.cookie(token, request.scope)
        return answer

    @router.delete("/v1/session", **route(status=204))
    async def log_out(request: Request) -> Response:
        """Logs the page out: its browser forgets the cookie."""
        headers = dict(_NO_STORE)
        if logins is not None:
            headers["set-cookie"] = logins.sessions.no_cookie(request.scope)
        return Response(status_code=204, headers=headers)


def _answer(token: Token | None, *, needs_login: bool) -> Response:
    role, name = (token.role, token.name) if token is not None else (None, None)
    body = {"needs_login": needs_login, "role": role, "name": name}
    return json_answer(body, headers=dict(_NO_STORE))


def native_routes(
    store: Store,
    atropos: AtroposService,
    policy: PolicyVersion,
    runners: RunnerRegistry,
    *,
    settings: ServerConfig,
    status: Callable[[], dict[str, Any]] | None,
    orders: Orders | None,
    recorder: Recorder | None,
    logins: Logins | None,
    alarms: AlarmBook | None,
    set_aside: SetAside,
    evaluations: HeldOutEvaluations | None,
) -> APIRouter:
    """Returns all native routes; parts that are None have none. `set_aside`: called with groups
    that a trainer cannot use, and its reason."""

    def present() -> set[str]:
        joined = {runner.env for runner in runners.table.known.values()}
        return joined | atropos.environment_names() | set(orders.names if orders else ())

    def evaluated() -> bool:
        return evaluations is not None and bool(evaluations.listed())

    router = APIRouter(tags=["native"])
    leasing = Leasing(store, atropos, policy, FilterWarnings(store, policy, present), settings)
    add_run_routes(router, store, leasing)
    add_lease_routes(router, store, leasing, set_aside)
    add_rollout_routes(router, store)  # before that of groups, whose ids may have slashes
    add_group_routes(router, store, leasing.encoder)
    add_task_routes(router, store)
    add_estimate_routes(router, store)
    add_policy_routes(router, policy)
    add_status_routes(router, store, atropos, policy, runners.table.count, status)
    add_session_routes(router, logins)
    add_source_routes(router, present, makes_rollouts=orders is not None, evaluated=evaluated)
    if evaluations is not None:
        add_evaluation_routes(router, evaluations)
    if recorder is not None:
        add_series_routes(router, recorder)
    if alarms is not None:
        add_alarm_routes(router, alarms)
    if orders is not None:
        from .on_demand import add_on_demand_routes

        add_on_demand_routes(router, orders, store, leasing.encoder)
    return router
