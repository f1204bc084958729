"""The proxy as an ASGI application: keys, routes and errors.

`/r/{key}/...` serves one attempt or one unrecorded client. `/r/{key}/a/{agent}/v1/...` names the
agent of an attempt that has several (so does the header `x-agent`). Any prefix may precede the
path.
"""

from __future__ import annotations

import asyncio
import secrets
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import structlog
from envserver_records.errors import (
    EnvserverError,
    InputError,
    LimitReached,
    NotFoundError,
    TooLargeError,
)
from envserver_records.records import SandboxUsage
from structlog.contextvars import bind_contextvars

from ..environment import Service
from ..models.engine import Engine, Stopwatch
from ..rollout_interface import FOREIGN_AGENT
from ..telemetry.numbers import SHORT_SECONDS, Distribution
from .asgi import (
    HANGUPS,
    HOLD,
    AsgiApp,
    ClientGone,
    Interrupted,
    Receive,
    Scope,
    Send,
    check_values,
    header,
    read_body,
    send_json,
    send_nothing,
)
from .attempts import AttemptSpec, ProxyAttempt, ended
from .bounds import AttemptBounds, Hold, InFlight, OverBound, Totals
from .call_task import AgentSession
from .dialects import DIALECTS, DialectAdapter
from .dialects.responses import find_response
from .egress import Egress
from .endpoint import EngineEndpoint
from .gate import Gate
from .hooks import HookFunctions, Hooks
from .recorded import RecordedRequests
from .request_handler import (
    RequestHandler,
    answer_lifespan,
    check_bearer,
    count_tokens,
    key_and_rest,
    require,
)
from .retries import RetryMarks, digest_of
from .services import PREFIX, TOOLS_PREFIX, SandboxHost, ServiceRouter, answer_about_sandboxes
from .unrecorded import generate, pass_through
from .worker import record_body, refuse_result, take_actions, take_log, take_result, take_rewards

SERVER: dict[str, Any] = {"object": "server", "name": "envserver"}
"""The answer to `GET /`, by which clients see that there is a server."""
MODELS, RESPONSES = "v1/models", "v1/responses/"


def model_list(name: str, max_model_len: int | None = None) -> dict[str, Any]:
    """Returns the list of the only model, as both OpenAI and Anthropic write it."""
    ends = {"has_more": False, "first_id": name, "last_id": name}
    return {"object": "list", "data": [_model(name, max_model_len)], **ends}


def model_at(path: str, name: str, max_model_len: int | None = None) -> dict[str, Any]:
    wanted = path.removeprefix(MODELS).removeprefix("/")
    if not wanted:
        return model_list(name, max_model_len)
    if wanted != name:
        raise NotFoundError(f"There is no model {wanted[:80]!r} here: the model is {name!r}.")
    return _model(name, max_model_len)


def response_at(attempt: ProxyAttempt, path: str) -> dict[str, Any]:
    wanted = path.removeprefix(RESPONSES)
    response = find_response(attempt.memory.get("responses", {}), wanted)
    if response is None:
        raise NotFoundError(f"There is no stored response {wanted[:80]!r} in this attempt.")
    return response


def _model(name: str, max_model_len: int | None) -> dict[str, Any]:
    model: dict[str, Any] = {"id": name, "object": "model", "created": 0, "owned_by": "envserver"}
    model |= {"type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"}
    if max_model_len is not None:
        model["max_model_len"] = max_model_len
    return model


PLAYED = "played:"
"""The endpoint of agents that a client acts for (`AgentRoute.endpoint`); not an agent's name."""
_REMEMBER_SEALED_SECONDS = 60.0
_HEALTH_SECONDS = 1.0
_NO_RETRY = ((b"x-should-retry", b"false"),)
_RETRY_SOON = ((b"x-should-retry", b"true"), (b"retry-after", b"1"))
_UNRECORDED = AttemptBounds(
    max_connections=2**30, max_request_mb=2**30, max_requests_per_second=2**30
)
_MAX_AGENT_NAME = 80
_DIGEST_ON_LOOP_BYTES = 1 << 20
_MAX_ACTIONS_BYTES = 2 << 20
"""Limit of one batch of steps; workers send half as much."""
_MAX_REWARDS_BYTES = 2 << 20
_ASKING = {path.removeprefix("v1/") for path in DIALECTS}
_POSTED = {*DIALECTS, "v1/messages/count_tokens", "result", "log", "actions", "rewards"}

_CHAT = DIALECTS["v1/chat/completions"]

_log = structlog.get_logger("envserver.proxy")


class Proxy:
    """The endpoint of all running attempts.

    Args:
        engine: must be open while the proxy is used; the proxy neither opens nor closes it.
        endpoint: how attempts' calls reach the engine; default: through its chat API only.
        endpoints: those of agents with their own engine or model, by `AgentRoute.endpoint`.
        max_body_bytes: limit of a request, as sent and inflated.
        clock: seconds; used only to forget sealed keys.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        endpoint: EngineEndpoint | None = None,
        endpoints: Mapping[str, EngineEndpoint] | None = None,
        played: EngineEndpoint | None = None,
        sandboxes: SandboxHost | None = None,
        services: Mapping[str, Service] | None = None,
        hooks: HookFunctions | None = None,
        egress: Egress | None = None,
        max_body_bytes: int = 64 * 1024 * 1024,
        bounds: AttemptBounds | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._endpoint = endpoint or EngineEndpoint(engine)
        self._endpoints = {**(endpoints or {}), "": self._endpoint}
        self.own_endpoints: Mapping[str, EngineEndpoint] = dict(endpoints or {})
        if played is not None:
            self._endpoints[PLAYED] = played
        self._sandboxes = sandboxes
        self.services = ServiceRouter({} if services is None else services)
        self.egress = egress
        self._hooks = None if hooks is None else Hooks(hooks, self.services)
        self.bounds = bounds or AttemptBounds()
        self._max_body_bytes = min(max_body_bytes, self.bounds.max_bytes)
        self.totals = Totals.of(self.bounds)
        self._strangers = InFlight(self.bounds, self.totals)
        self._unrecorded_in_flight = InFlight(_UNRECORDED, Totals.of(_UNRECORDED))
        self._clock = clock
        self._attempts: dict[str, ProxyAttempt] = {}
        self._unrecorded: set[str] = set()
        # Weak: a record is large, and its runner holds it as long as it is needed.
        self._sealed: dict[str, weakref.ref[ProxyAttempt]] = {}
        self._sealed_at: deque[tuple[float, str]] = deque()
        self._health = (-_HEALTH_SECONDS, False)
        self.added_seconds = Distribution(SHORT_SECONDS)
        """Seconds of each call with a whole answer that were not spent waiting for the engine."""

    @property
    def policy_version(self) -> int:
        """The policy version that the trainer published last; -1 if unknown."""
        return self._endpoint.policy_version

    def publish_version(self, version: int) -> None:
        for endpoint in self._endpoints.values():
            endpoint.policy_version = version

    def engine_described(self) -> dict[str, Any]:
        """Describes how the engines are called; `agents` has those of agents with their own."""
        others = {name: endpoint.described() for name, endpoint in self.own_endpoints.items()}
        return {**self._endpoint.described(), **({"agents": others} if others else {})}

    def engine_identity(self) -> dict[str, Any]:
        """Returns what the engines say of themselves and of their models, for the record."""
        others = {name: endpoint.identity() for name, endpoint in self.own_endpoints.items()}
        return {**self._endpoint.identity(), **({"agents": others} if others else {})}

    @property
    def open_sandboxes(self) -> int:
        return self._sandboxes.open if self._sandboxes is not None else 0

    @property
    def gate(self) -> Gate:
        return self._endpoint.gate

    def open(self, spec: AttemptSpec) -> ProxyAttempt:
        # In hex: a command line takes a key that begins with a dash for a flag.
        attempt = ProxyAttempt(secrets.token_hex(16), spec)
        if spec.harness is not None:
            attempt.flags.add(FOREIGN_AGENT)
        attempt.in_flight = InFlight(
            self.bounds, self.totals, rollout_id=spec.rollout_id, flags=attempt.flags
        )
        attempt.recorded = RecordedRequests(attempt.in_flight)
        self._attempts[attempt.key] = attempt
        for endpoint, routing_key in self._routes(spec):
            endpoint.begun(routing_key)
        return attempt

    def _routes(self, spec: AttemptSpec) -> Iterator[tuple[EngineEndpoint, str]]:
        for agent in spec.agents or (None,):
            endpoint = self._endpoints.get(spec.route(agent).endpoint)
            if endpoint is not None:
                yield endpoint, spec.routing_key(agent)

    def seal(self, attempt: ProxyAttempt) -> None:
        """Ends an attempt: its requests are stopped, later ones get 409 (404 after a minute)."""
        attempt.seal()
        self.services.seal(attempt)
        if self._sandboxes is not None:
            self._sandboxes.seal(attempt)
        if self._attempts.pop(attempt.key, None) is not None:
            for endpoint, routing_key in self._routes(attempt.spec):
                endpoint.ended(routing_key)
            self._sealed[attempt.key] = weakref.ref(attempt)
            self._sealed_at.append((self._clock(), attempt.key))
            if attempt.log_lines_dropped:
                lines, rollout_id = attempt.log_lines_dropped, attempt.spec.rollout_id
                _log.warning("log_lines_dropped", rollout_id=rollout_id, lines=lines)
        self._forget()

    async def settle(self, attempt: ProxyAttempt) -> SandboxUsage | None:
        """Waits until nothing of a sealed attempt runs; returns its sandbox usage, if any."""
        await self.services.settle(attempt)
        if self.egress is not None:
            await self.egress.settle(attempt)
        return await self._sandboxes.settle(attempt) if self._sandboxes is not None else None

    def open_unrecorded(self) -> str:
        """Returns a key for a foreign environment, without limits or recording."""
        key = secrets.token_hex(24)
        self._unrecorded.add(key)
        return key

    def running(self) -> dict[str, ProxyAttempt]:
        return {attempt.spec.rollout_id: attempt for attempt in self._attempts.values()}

    async def attempt_of(self, key: str) -> ProxyAttempt | None:
        attempt = self._attempts.get(key)
        if attempt is None:
            await self._strangers.admit()
        return attempt

    def in_flight(self, path: str) -> InFlight | None:
        """Returns what the owner of the key in `path` has in flight; None for an unknown key."""
        key = key_and_rest(path)[0]
        if key in self._unrecorded:
            return self._unrecorded_in_flight
        attempt = self._attempts.get(key)
        return attempt.in_flight if attempt is not None else None

    def asgi(self) -> AsgiApp:
        # A plain function: uvicorn mistakes a bound method for an ASGI 2 application.
        async def proxy(scope: Scope, receive: Receive, send: Send) -> None:
            await self._app(scope, receive, send)

        return proxy

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await answer_lifespan(receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1000})
            return
        try:
            await self._route(scope, receive, send)
        except (ClientGone, Interrupted):
            return
        except EnvserverError as error:
            await send_json(send, *error_answer(scope["path"], error))

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        key, path = key_and_rest(scope["path"])
        attempt = self._attempts.get(key)
        if attempt is None and key not in self._unrecorded:
            self._forget()
            await self._strangers.admit()
            if key in self._sealed:
                self._late(self._sealed[key](), path)
                raise ended()
            raise NotFoundError("There is nothing at this address.")
        in_flight = self._unrecorded_in_flight
        if attempt is not None:
            spec, in_flight = attempt.spec, attempt.in_flight
            bind_contextvars(rollout_id=spec.rollout_id, group_id=spec.group_id)
            check_bearer(scope, key)
            if path != "result" or attempt.posted:  # the only result is never too much
                await in_flight.admit()
        with Hold(in_flight) as scope[HOLD]:
            if attempt is not None:
                await self._attempt_route(scope, attempt, path, receive, send)
            else:
                # Foreign environments have a setting for the address, but often send another key.
                await self._unrecorded_route(scope, key, path, receive, send)

    async def _attempt_route(
        self, scope: Scope, attempt: ProxyAttempt, path: str, receive: Receive, send: Send
    ) -> None:
        agent = header(scope, b"x-agent") or None
        if path.startswith("a/"):
            agent, _, path = path[2:].partition("/")
        agent = attempt.spec.agent(agent and agent[:_MAX_AGENT_NAME])
        method = scope["method"]
        if path in _POSTED or path.startswith((PREFIX, TOOLS_PREFIX)):
            require(method, "POST")
        match path:
            case _ if path in DIALECTS:
                await self._ask(scope, attempt, path, agent, receive, send)
            case _ if path.startswith(PREFIX):
                path = path.removeprefix(PREFIX)
                await answer_about_sandboxes(self._sandboxes, attempt, path, scope, receive, send)
            case _ if path.startswith(TOOLS_PREFIX):
                name = path.removeprefix(TOOLS_PREFIX)
                await self.services.answer(attempt, name, scope, receive, send)
            case _ if f"{path}/".startswith(f"{MODELS}/"):
                require(method, "GET")
                length = await self._context(attempt, agent)
                model = attempt.spec.route(agent).model
                await send_json(send, 200, model_at(path, model, length))
            case _ if path.startswith(RESPONSES) and method == "GET":
                await send_json(send, 200, response_at(attempt, path))
            case "" | "v1" if method in ("GET", "HEAD"):
                await send_json(send, 200, SERVER)
            case "v1/messages/count_tokens":
                body = await read_body(scope, receive, self._max_body_bytes)
                count = await count_tokens(self._session(attempt, agent), body)
                await send_json(send, 200, count)
            case "health":
                require(method, "GET")
                await self._send_health(send)
            case "record":
                require(method, "GET")
                context = await self._context(attempt, agent)
                await send_json(send, 200, record_body(attempt) | {"context": context})
            case "result":
                await self._take_result(attempt, scope, receive)
                await send_nothing(send)
            case "log":
                take_log(attempt, await read_body(scope, receive, self._max_body_bytes))
                await send_nothing(send)
            case "actions":
                body = await read_body(scope, receive, _MAX_ACTIONS_BYTES)
                with attempt.in_flight.reading():
                    take_actions(attempt, body)
                await send_nothing(send)
            case "rewards":
                take_rewards(attempt, await read_body(scope, receive, _MAX_REWARDS_BYTES))
                await send_nothing(send)
            case _:
                # An unrecorded endpoint must not give tokens to an attempt.
                path = path[:80]
                if attempt.log_budget.take(len(path), time.monotonic()):
                    _log.warning("foreign_endpoint", rollout_id=attempt.spec.rollout_id, path=path)
                raise NotFoundError(f"/{path} is not offered here.")

    async def _context(self, attempt: ProxyAttempt, agent: str | None) -> int | None:
        """The tokens of a prompt and its answer together, at most; None: unknown."""
        length = await self._session(attempt, agent).endpoint.max_model_len()
        most = attempt.spec.limits.max_row_tokens
        if length is None or most is None or not attempt.spec.route(agent).trained:
            return length
        return min(length, most)

    async def _take_result(self, attempt: ProxyAttempt, scope: Scope, receive: Receive) -> None:
        try:
            body = await read_body(scope, receive, self._max_body_bytes)
            check_values(body)
        except TooLargeError:
            refuse_result(attempt)
            raise
        take_result(attempt, body)

    async def _ask(
        self,
        scope: Scope,
        attempt: ProxyAttempt,
        path: str,
        agent: str | None,
        receive: Receive,
        send: Send,
    ) -> None:
        began = time.perf_counter()
        body = await read_body(scope, receive, self._max_body_bytes)
        digest = partial(digest_of, path, agent, body)
        large = len(body) > _DIGEST_ON_LOOP_BYTES
        marks = RetryMarks(scope, await asyncio.to_thread(digest) if large else digest())
        hangups = scope.get("extensions", {}).get(HANGUPS)
        session = self._session(attempt, agent)
        request = RequestHandler(session, DIALECTS[path], receive, send, hangups)
        with Stopwatch() as watch:
            await request.answer(body, marks)
        if watch.calls and not request.is_streamed:
            self.added_seconds.add(max(0.0, time.perf_counter() - began - watch.seconds))

    def _session(self, attempt: ProxyAttempt, agent: str | None) -> AgentSession:
        endpoint = self._endpoints[attempt.spec.route(agent).endpoint]
        return AgentSession(endpoint, attempt, agent, self._hooks)

    def _late(self, attempt: ProxyAttempt | None, path: str) -> None:
        """Counts a model call after the end of its attempt, if the record still exists."""
        if attempt is not None and path.rpartition("v1/")[2] in _ASKING:
            attempt.late_calls += 1
            if attempt.late_calls == 1:
                _log.warning("call_after_seal", rollout_id=attempt.spec.rollout_id, path=path[:80])

    async def _unrecorded_route(
        self, scope: Scope, key: str, path: str, receive: Receive, send: Send
    ) -> None:
        method = scope["method"]
        match path:
            case "v1/chat/completions" | "v1/completions":
                require(method, "POST")
                body = await read_body(scope, receive, self._max_body_bytes)
                await pass_through(self._engine, key, f"/{path}", body, receive, send)
            case "generate":
                require(method, "POST")
                body = await read_body(scope, receive, self._max_body_bytes)
                await generate(self._engine, key, body, receive, send)
            case "v1/models":
                require(method, "GET")
                await send_json(send, 200, model_list(await self._engine.model_name()))
            case "health":
                require(method, "GET")
                await self._send_health(send)
            case _:
                raise NotFoundError(f"/{path[:80]} is not offered here.")

    async def _send_health(self, send: Send) -> None:
        """Sends 200 if a replica answers. Checks at most once a second, since clients poll this."""
        asked_at, healthy = self._health
        if self._clock() - asked_at >= _HEALTH_SECONDS:
            healthy = any(replica.healthy for replica in await self._engine.health())
            self._health = (self._clock(), healthy)
        await send_json(send, 200 if healthy else 503, {"healthy": healthy})

    def _forget(self) -> None:
        oldest = self._clock() - _REMEMBER_SEALED_SECONDS
        while self._sealed_at and self._sealed_at[0][0] <= oldest:
            self._sealed.pop(self._sealed_at.popleft()[1], None)


def error_answer(
    path: str, error: EnvserverError
) -> tuple[int, dict[str, Any], tuple[tuple[bytes, bytes], ...]]:
    headers = _RETRY_SOON if isinstance(error, OverBound) else _NO_RETRY
    return _status(error), _api_of(path).error(error), headers


def _status(error: EnvserverError) -> int:
    """Returns 400 for a rollout's limit, too: unlike at a rate limit, clients must not retry."""
    return 400 if isinstance(error, InputError | LimitReached) else error.status


def _api_of(path: str) -> DialectAdapter:
    route = f"v1/{path.rpartition('/v1/')[2]}/"
    return next(
        (dialect for known, dialect in DIALECTS.items() if route.startswith(f"{known}/")), _CHAT
    )
