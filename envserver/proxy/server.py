"""The proxy as an ASGI application: who may ask, which route answers, how errors look.

`/r/{key}/...` for one attempt or one guest; `/r/{key}/a/{agent}/v1/...` names the agent of an
attempt that has several (so does the header `x-agent`). The path may stand behind any prefix.
"""

from __future__ import annotations

import hmac
import secrets
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import structlog
from envserver_records.errors import (
    EnvserverError,
    InputError,
    LimitReached,
    NotFoundError,
    UsageError,
)
from envserver_records.records import SandboxUsage
from structlog.contextvars import bind_contextvars

from ..environment import Service
from ..models.engine import Engine
from ..models.measured import time_waiting
from ..telemetry.numbers import SHORT_SECONDS, Distribution
from .asgi import (
    AsgiApp,
    ClientGone,
    Interrupted,
    Receive,
    Scope,
    Send,
    header,
    read_body,
    send_json,
    send_nothing,
)
from .attempts import AttemptSpec, ProxyAttempt, ended
from .dialects import DIALECTS, DialectAdapter
from .endpoint import EngineEndpoint
from .gate import Gate
from .guest import generate, pass_through
from .request_handler import RequestHandler
from .retries import RetryMarks, digest_of
from .sandboxing import PREFIX, SandboxHost, answer_about_sandboxes
from .services import TOOLS_PREFIX, ServiceRouter
from .worker import rollout_body, take_actions, take_log, take_result

_REMEMBER_SEALED_SECONDS = 60.0
_HEALTH_SECONDS = 1.0
_NO_RETRY = ((b"x-should-retry", b"false"),)
_MAX_AGENT_NAME = 80
_MAX_ACTIONS_BYTES = 2 << 20
"""Of one batch of steps; workers send half as much."""
_ASKING = {path.removeprefix("v1/") for path in DIALECTS}

_CHAT = DIALECTS["v1/chat/completions"]

_log = structlog.get_logger("envserver.proxy")


class _WrongKey(UsageError):
    kind, status = "wrong_key", 401


class _WrongMethod(UsageError):
    kind, status = "method_not_allowed", 405


class Proxy:
    """The endpoint of all attempts in flight.

    Args:
        engine: open as long as the proxy is used; the proxy neither opens nor closes it.
        source: how attempts' calls are asked of it; unset: through its chat API only.
        sources: those of agents that are asked elsewhere or otherwise, by `Seat.source`.
        sandboxes: has those that agents may open; unset: none.
        services: what the environment does for its agents; unset: nothing.
        max_body_bytes: of a request, as sent and inflated.
        clock: seconds; only for how long sealed keys are remembered.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        endpoint: EngineEndpoint | None = None,
        endpoints: Mapping[str, EngineEndpoint] | None = None,
        sandboxes: SandboxHost | None = None,
        services: Mapping[str, Service] | None = None,
        max_body_bytes: int = 64 * 1024 * 1024,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._endpoint = endpoint or EngineEndpoint(engine)
        self._endpoints = {**(endpoints or {}), "": self._endpoint}
        self._sandboxes = sandboxes
        self._services = ServiceRouter(services or {})
        self._max_body_bytes = max_body_bytes
        self._clock = clock
        self._attempts: dict[str, ProxyAttempt] = {}
        self._guests: set[str] = set()
        # Its record is large, and whoever ran it holds it as long as it is needed.
        self._sealed: dict[str, weakref.ref[ProxyAttempt]] = {}
        self._sealed_at: deque[tuple[float, str]] = deque()
        self._health = (-_HEALTH_SECONDS, False)
        self.added_seconds = Distribution(SHORT_SECONDS)
        """Of calls that were answered whole: the time that was not the engine's."""

    @property
    def policy_version(self) -> int:
        """The version that the engine serves now, as its trainer says; -1: unknown."""
        return self._endpoint.policy_version

    def publish_version(self, version: int) -> None:
        """The engine serves `version` of the policy from now on."""
        for endpoint in self._endpoints.values():
            endpoint.policy_version = version

    def engine_described(self) -> dict[str, Any]:
        """How the engine is asked, for people; empty until it answered once. `agents`: likewise of
        those that are asked elsewhere."""
        others = {name: one.described() for name, one in self._endpoints.items() if name}
        return {**self._endpoint.described(), **({"agents": others} if others else {})}

    @property
    def services(self) -> ServiceRouter:
        """Where agents ask for the environment's services."""
        return self._services

    @property
    def open_sandboxes(self) -> int:
        """That attempts have now, or wait for."""
        return self._sandboxes.open if self._sandboxes is not None else 0

    @property
    def gate(self) -> Gate:
        """Before which the attempts' calls wait while the engine's weights change."""
        return self._endpoint.gate

    def open(self, spec: AttemptSpec) -> ProxyAttempt:
        """A new attempt, under a key that cannot be guessed."""
        attempt = ProxyAttempt(secrets.token_urlsafe(24), spec)
        self._attempts[attempt.key] = attempt
        return attempt

    def seal(self, attempt: ProxyAttempt) -> None:
        """Ends an attempt: requests in flight end, later ones get 409 (after a minute 404)."""
        attempt.seal()
        if self._sandboxes is not None:
            self._sandboxes.seal(attempt)
        if self._attempts.pop(attempt.key, None) is not None:
            self._sealed[attempt.key] = weakref.ref(attempt)
            self._sealed_at.append((self._clock(), attempt.key))
        self._forget()

    async def settle(self, attempt: ProxyAttempt) -> SandboxUsage | None:
        """Returns when nothing of a sealed attempt runs any more: what its programs used in
        sandboxes, None where it had none.
        """
        return await self._sandboxes.settle(attempt) if self._sandboxes is not None else None

    def open_guest(self) -> str:
        """A key for a foreign environment: no limits, nothing recorded."""
        key = secrets.token_urlsafe(24)
        self._guests.add(key)
        return key

    def asgi(self) -> AsgiApp:
        """The application, for `/r/`."""

        # A plain function: uvicorn takes a bound method for an application of the old ASGI 2.
        async def proxy(scope: Scope, receive: Receive, send: Send) -> None:
            await self._app(scope, receive, send)

        return proxy

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1000})
            return
        try:
            await self._route(scope, receive, send)
        except (ClientGone, Interrupted):
            return
        except EnvserverError as error:
            dialect = _api_of(scope["path"])
            await send_json(send, _status(error), dialect.error(error), _NO_RETRY)

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        key, _, path = scope["path"].partition("/r/")[2].partition("/")
        attempt = self._attempts.get(key)
        if attempt is None and key not in self._guests:
            self._forget()
            if key in self._sealed:
                self._late(self._sealed[key](), path)
                raise ended()
            raise NotFoundError("There is nothing under this address.")
        if attempt is not None:
            spec = attempt.spec
            bind_contextvars(rollout_id=spec.rollout_id, group_id=spec.group_id)
        if attempt is None:
            # Environments of others have a setting for the address, and often a key of their own.
            await self._guest_route(scope, key, path, receive, send)
        else:
            _check_bearer(scope, key)
            await self._attempt_route(scope, attempt, path, receive, send)

    async def _attempt_route(
        self, scope: Scope, attempt: ProxyAttempt, path: str, receive: Receive, send: Send
    ) -> None:
        agent = header(scope, b"x-agent") or None
        if path.startswith("a/"):
            agent, _, path = path[2:].partition("/")
        agent = attempt.spec.agent(agent and agent[:_MAX_AGENT_NAME])
        method = scope["method"]
        if path in DIALECTS:
            _require(method, "POST")
            await self._ask(scope, attempt, path, agent, receive, send)
            return
        if path.startswith(PREFIX):
            _require(method, "POST")
            path = path.removeprefix(PREFIX)
            await answer_about_sandboxes(self._sandboxes, attempt, path, scope, receive, send)
            return
        if path.startswith(TOOLS_PREFIX):
            _require(method, "POST")
            name = path.removeprefix(TOOLS_PREFIX)
            await self._services.answer(attempt, name, scope, receive, send)
            return
        match path:
            case "v1/models":
                _require(method, "GET")
                await send_json(send, 200, _models(attempt.spec.route(agent).model))
            case "health":
                _require(method, "GET")
                await self._send_health(send)
            case "rollout":
                _require(method, "GET")
                await send_json(send, 200, rollout_body(attempt))
            case "result":
                _require(method, "POST")
                take_result(attempt, await read_body(scope, receive, self._max_body_bytes))
                await send_nothing(send)
            case "log":
                _require(method, "POST")
                take_log(attempt, await read_body(scope, receive, self._max_body_bytes))
                await send_nothing(send)
            case "actions":
                _require(method, "POST")
                take_actions(attempt, await read_body(scope, receive, _MAX_ACTIONS_BYTES))
                await send_nothing(send)
            case _:
                # An endpoint that is not recorded must not give tokens to an attempt.
                path = path[:80]
                _log.warning("foreign_endpoint", rollout_id=attempt.spec.rollout_id, path=path)
                raise NotFoundError(f"/{path} is not offered here.")

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
        marks = RetryMarks(scope, digest_of(path, agent, body))
        endpoint = self._endpoints[attempt.spec.route(agent).endpoint]
        request = RequestHandler(endpoint, attempt, DIALECTS[path], agent, receive, send)
        with time_waiting() as watch:
            await request.answer(body, marks)
        if watch.calls and not request.is_streamed:
            self.added_seconds.add(max(0.0, time.perf_counter() - began - watch.seconds))

    def _late(self, attempt: ProxyAttempt | None, path: str) -> None:
        """Notes a model call that came after the end of its attempt; None: that is long over."""
        if attempt is not None and path.rpartition("v1/")[2] in _ASKING:
            attempt.late_calls += 1
            _log.warning("call_after_seal", rollout_id=attempt.spec.rollout_id, path=path[:80])

    async def _guest_route(
        self, scope: Scope, key: str, path: str, receive: Receive, send: Send
    ) -> None:
        method = scope["method"]
        match path:
            case "v1/chat/completions" | "v1/completions":
                _require(method, "POST")
                body = await read_body(scope, receive, self._max_body_bytes)
                await pass_through(self._engine, key, f"/{path}", body, receive, send)
            case "generate":
                _require(method, "POST")
                body = await read_body(scope, receive, self._max_body_bytes)
                await generate(self._engine, key, body, receive, send)
            case "v1/models":
                _require(method, "GET")
                await send_json(send, 200, _models(await self._engine.model_name()))
            case "health":
                _require(method, "GET")
                await self._send_health(send)
            case _:
                raise NotFoundError(f"/{path[:80]} is not offered here.")

    async def _send_health(self, send: Send) -> None:
        """200 when some replica answers. Asked at most once a second: clients poll this."""
        asked_at, healthy = self._health
        if self._clock() - asked_at >= _HEALTH_SECONDS:
            healthy = any(replica.healthy for replica in await self._engine.health())
            self._health = (self._clock(), healthy)
        await send_json(send, 200 if healthy else 503, {"healthy": healthy})

    def _forget(self) -> None:
        """Forgets the keys that were sealed a minute ago."""
        oldest = self._clock() - _REMEMBER_SEALED_SECONDS
        while self._sealed_at and self._sealed_at[0][0] <= oldest:
            self._sealed.pop(self._sealed_at.popleft()[1], None)


def _status(error: EnvserverError) -> int:
    """As the APIs that agents speak have it: 400 for what cannot be asked.

    The limit of a rollout is no rate limit either: clients must not wait and try again.
    """
    return 400 if isinstance(error, InputError | LimitReached) else error.status


def _api_of(path: str) -> DialectAdapter:
    """The dialect in whose form the client expects errors, also of what lies below its path."""
    asked = f"v1/{path.rpartition('/v1/')[2]}/"
    return next(
        (dialect for known, dialect in DIALECTS.items() if asked.startswith(f"{known}/")), _CHAT
    )


def _check_bearer(scope: Scope, key: str) -> None:
    """
    Raises:
        _WrongKey: the client sends a key, and it is not that of the path.
    """
    scheme, _, token = header(scope, b"authorization").partition(" ")
    bearer = token.strip() if scheme.lower() == "bearer" else scheme
    for sent in (bearer, header(scope, b"x-api-key")):
        if sent and not hmac.compare_digest(sent.encode(), key.encode()):
            raise _WrongKey("The key that was sent does not belong to this address.")


def _require(method: str, wanted: str) -> None:
    if method != wanted:
        raise _WrongMethod(f"Use {wanted} here, not {method[:20]}.")


def _models(name: str) -> dict[str, object]:
    model = {"id": name, "object": "model", "created": 0, "owned_by": "envserver"}
    return {"object": "list", "data": [model]}


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
