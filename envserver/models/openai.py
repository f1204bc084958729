"""Any OpenAI-compatible server, or several replicas of one, over HTTP.

Invariants: only EngineError and its subclasses are raised; a call ends within its timeout; no
message holds the engine's key; a stream that ended normally was complete.

Sampling changes nothing in an engine, so a request without an answer is sent again, to another
replica if there is one: after refused or broken connections, HTTP 408, 429 and 5xx, and when its
replica hangs. After garbage (or an error with a success status) it is sent again only to another
replica. A stream is sent again only before its first chunk.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress
from http import HTTPStatus
from typing import Any

import msgspec
import orjson
from envserver_records.errors import (
    ConfigError,
    EngineError,
    EngineGarbage,
    EngineRefused,
    EngineTimeout,
    EngineUnavailable,
)
from envserver_records.waiting import Backoff, cancel_and_wait
from yarl import URL

from ..settings.config import OpenAIConfig
from .connections import (
    Connections,
    Decoder,
    EngineAddresses,
    RetryableError,
    SseParser,
    first_model,
    read_by,
    whole,
)
from .engine import EngineRequest, ReplicaHealth
from .http_client import HttpError, Response
from .replicas import Origin, Replica, ReplicaRequest, read_load
from .routing import Replicas, Routing, late, versions_noted

_LONGEST_PAUSE_SECONDS = 30.0
_MISSES = 3
"""Missed checks in a row after which its calls are given up."""
_MAX_METRICS_BYTES = 16 * 1024 * 1024


Json = dict[str, Any]

_GET_SECONDS = 120.0


class OpenAIEngine:
    """The engine at `config.base_url`.

    Args:
        config: `server_type` "vllm" means that token ids and logprobs can be requested.
        tries: requests sent for one call, over all replicas.
        pause_seconds: before the first repetition on the same replica; doubles, with jitter.
    """

    kind = "openai"

    def __init__(
        self,
        config: OpenAIConfig,
        *,
        tries: int = 6,
        pause_seconds: float = 0.25,
        check_seconds: float = 5.0,
        measure_seconds: float = 1.0,
        routing: Routing = "prefix",
        max_lag: int = 0,
        addresses: EngineAddresses | None = None,
    ) -> None:
        self.exact = config.server_type == "vllm"
        self.addresses = addresses or EngineAddresses((), config.base_urls)
        key = config.api_key.get_secret_value()
        self._name = None if config.model_name == "default" else config.model_name
        self._name_lock = asyncio.Lock()
        self.confirm: Callable[[Replica], Awaitable[None]] | None = None
        """Checks that a replica is still the same engine; raises ConfigError or EngineError."""
        self._timeout_seconds = config.timeout
        self._check_seconds = check_seconds
        self._measure_seconds = measure_seconds
        self._watching: dict[Replica, list[asyncio.Task[None]]] = {}
        roots = list(dict.fromkeys(root_of(address) for address in config.base_urls))
        self.routes = Replicas(
            roots,
            config.num_max_requests_at_once,
            routing=routing,
            max_lag=max_lag,
            tries=tries,
            pause_seconds=pause_seconds,
        )
        self._decoder = Decoder(key)
        self._connections = Connections(key, self._decoder, self.addresses)

    async def __aenter__(self) -> OpenAIEngine:
        await self._connections.__aenter__()
        for replica in self.routes.all:
            self._watch(replica)
        return self

    async def __aexit__(self, *exc: object) -> None:
        tasks = [task for each in self._watching.values() for task in each]
        self._watching.clear()
        try:
            for end in await cancel_and_wait(*tasks):
                if end is not None and not isinstance(end, asyncio.CancelledError):
                    raise end
        finally:
            await self._connections.__aexit__(*exc)

    async def model_name(self) -> str:
        async with self._name_lock:
            if self._name is None:
                self._name = first_model(await self.get("/v1/models"))
        return self._name

    async def get(self, path: str) -> Json:
        async def once(request: ReplicaRequest) -> Json:
            return await self._get(request.replica, path)

        return await self.routes.until_answered(once, "", self._deadline(_GET_SECONDS))

    async def post(self, request: EngineRequest) -> Json:
        body, payload = request.body, orjson.dumps(request.body)

        async def once(sent: ReplicaRequest) -> Json:
            try:
                async with self._sent(sent, request.path, payload) as response:
                    answer = await self._answer(response, request.form, request.echo)
            except EngineRefused as error:
                await self._refused(sent.replica, body, error)
                raise
            await self._confirmed(sent.replica, response, body, answer)
            if sent.was_lost:
                raise RetryableError(_restarted(sent.replica), "busy")
            return answer

        deadline = self._deadline(request.timeout_seconds)
        return await self.routes.until_answered(once, request.rollout_id, deadline)

    @asynccontextmanager
    async def stream(self, request: EngineRequest) -> AsyncIterator[AsyncIterator[Json]]:
        body, payload = request.body, orjson.dumps(request.body)
        deadline = self._deadline(request.timeout_seconds)

        async def once(sent: ReplicaRequest) -> tuple[AsyncExitStack, AsyncGenerator[Json]]:
            try:
                async with AsyncExitStack() as stack:
                    response = await stack.enter_async_context(
                        self._sent(sent, request.path, payload)
                    )
                    if "text/event-stream" not in response.headers.get("content-type", "").lower():
                        await self._answer(response)
                        raise EngineGarbage(
                            "The engine returned a non-streaming response to a streaming request."
                        )
                    chunks = self._chunks(sent.replica, response, deadline, request)
                    first = await anext(chunks, None)
                    await self._confirmed(sent.replica, response, body, first or {})
                    return stack.pop_all(), self._handed_out(sent, first, chunks)
            except EngineRefused as error:
                await self._refused(sent.replica, body, error)
                raise

        stack, chunks = await self.routes.until_answered(once, request.rollout_id, deadline)
        try:
            async with aclosing(chunks):
                yield chunks
        finally:
            await stack.aclose()

    async def health(self) -> list[ReplicaHealth]:
        """Asks every replica for its models, for at most `check_seconds`."""
        return await asyncio.gather(*(self._health_of(replica) for replica in self.routes.all))

    def replicas(self) -> list[ReplicaHealth]:
        return [self._known(replica) for replica in self.routes.all]

    def _known(self, replica: Replica) -> ReplicaHealth:
        standing, reason = self.routes.standing(replica)
        follows = replica.follows and replica.version is None
        return ReplicaHealth(
            replica.url,
            healthy=replica.state == "closed" and standing in ("used", "draining"),
            reason=reason,
            in_flight=replica.slots.used,
            limit=replica.slots.limit,
            waiting=replica.slots.waiting,
            state=replica.state,
            calls=replica.seconds.count,
            errors=replica.errors,
            seconds_p50=replica.seconds.quantile(0.5),
            seconds_p95=replica.seconds.quantile(0.95),
            id=replica.id,
            origin=replica.origin,
            standing=standing,
            follows=follows,
            version=None if follows else self.routes.version_of(replica),
            rollouts=replica.rollouts,
            expires_at=replica.expires_at,
        )

    def add(self, url: str, origin: Origin, *, gets_key: bool) -> Replica:
        """Adds a replica, which gets no calls before it is admitted."""
        replica = self.routes.add(root_of(url), origin)
        replica.gets_key = gets_key
        self._watch(replica)
        return replica

    def remove(self, replica: Replica) -> None:
        self.routes.remove(replica)
        for task in self._watching.pop(replica, ()):
            task.cancel()

    async def _health_of(self, replica: Replica) -> ReplicaHealth:
        started = time.monotonic()
        reason = ""
        try:
            async with asyncio.timeout_at(self._deadline(self._check_seconds)):
                await self._get(replica, "/v1/models")
        except TimeoutError:
            reason = late(replica, self._check_seconds).message
        except RetryableError as retryable:
            reason = retryable.error.message
        except EngineError as error:
            reason = error.message
        return msgspec.structs.replace(
            self._known(replica),
            healthy=not reason,
            seconds=0.0 if reason else time.monotonic() - started,
            reason=reason or replica.reason,
        )

    def _deadline(self, timeout_seconds: float) -> float:
        return asyncio.get_running_loop().time() + min(timeout_seconds, self._timeout_seconds)

    @asynccontextmanager
    async def _sent(
        self, request: ReplicaRequest, path: str, payload: bytes
    ) -> AsyncGenerator[Response]:
        """Sends one call; yields its open answer with status 2xx while holding a slot."""
        replica = request.replica
        async with replica.slots:
            request.sent()
            opened = self._connections.open(replica, "POST", path, payload)
            versions = versions_noted(path)
            if versions is not None:
                versions.first = versions.last = replica.version
            try:
                async with opened as response:
                    await self._check(replica, response)
                    yield response
            finally:
                # A version published during the call counts as a change, even the first.
                if versions is not None and replica.version is not None:
                    versions.last = replica.version

    async def _check(self, replica: Replica, response: Response) -> None:
        """See `Connections.check`. Behind a redirect there may soon be an engine again."""
        try:
            await self._connections.check(replica, response)
        except EngineUnavailable as redirect:
            raise RetryableError(redirect) from None

    async def _answer(
        self, response: Response, form: type | None = None, echo: bytes = b""
    ) -> Json:
        """What is not an object comes from something else, such as a load balancer: a retry may
        succeed."""
        data = await whole(response)
        try:
            return self._decoder.decode(data, form, echo)
        except EngineGarbage as error:
            if data.lstrip().startswith(b"{"):
                raise
            raise RetryableError(error) from None

    async def _confirmed(
        self, replica: Replica, response: Response, body: Json, answer: Json
    ) -> None:
        """Holds an answer back until its engine is known to be the same as before, if connections
        were interrupted or the model's name or fingerprint changed."""
        generation = response.connection.generation
        served = f"{answer.get('model')} {answer.get('system_fingerprint')}"
        known = replica.served[str(body.get("model"))]
        is_same = not answer.get("model") or not known or served in known
        if not is_same or replica.generation != generation:
            await self._confirm(replica)
        replica.generation = generation
        if answer.get("model"):
            known.add(served)

    async def _confirm(self, replica: Replica) -> None:
        if self.confirm is None:
            return
        try:
            await self.confirm(replica)
        except (ConfigError, EngineRefused) as error:
            message = f"The engine at {replica.url} has changed: {error.message}"
            changed = EngineUnavailable(message, hint=error.hint, base_url=replica.url)
            raise RetryableError(changed, "busy") from None
        except EngineError as error:
            raise RetryableError(error) from None

    async def _refused(self, replica: Replica, body: Json, error: EngineRefused) -> None:
        """Adds the names of the engine's models to its HTTP 404. An engine that had the model
        before may be another one now."""
        if error.detail.get("status") != HTTPStatus.NOT_FOUND:
            return
        with suppress(TimeoutError, RetryableError, EngineError):  # the refusal itself is shown
            async with asyncio.timeout_at(self._deadline(self._check_seconds)):
                answer = await self._get(replica, "/v1/models")
            hint = self._decoder.models_hint(str(body.get("model", "")), answer)
            error.hint = hint or error.hint
        if replica.served[str(body.get("model"))]:
            await self._confirm(replica)

    async def _get(self, replica: Replica, path: str) -> Json:
        # Health checks and the like do not wait for a slot.
        async with self._connections.open(replica, "GET", path) as response:
            if path == "/v1/models":  # every engine has them; others may be missing in any way
                await self._check(replica, response)
                return await self._answer(response)
            await self._connections.check(replica, response)
            return self._decoder.decode(await whole(response))

    async def _chunks(
        self, replica: Replica, response: Response, deadline: float, request: EngineRequest
    ) -> AsyncGenerator[Json]:
        parser = SseParser()
        ended = False
        with read_by(deadline, response, replica):
            while not ended:
                data = await response.read()
                ended = not data
                for text in parser.feed(data) if data else parser.close():
                    event = text.strip()
                    if event == b"[DONE]":
                        await _drain(response)
                        return
                    if event:
                        yield self._decoder.decode(event, request.form, request.echo)
        raise RetryableError(EngineGarbage("The engine's stream ended before its [DONE]."))

    async def _handed_out(
        self, request: ReplicaRequest, first: Json | None, rest: AsyncGenerator[Json]
    ) -> AsyncGenerator[Json]:
        """Yields the chunks of a stream that is no longer retried: its consumer has seen some."""
        replica = request.replica
        error: EngineError
        async with aclosing(rest):
            try:
                if first is not None:
                    yield first
                async for chunk in rest:
                    replica.heard()
                    yield chunk
                if not request.was_lost:
                    return
                error = _restarted(replica)
            except TimeoutError:
                request.timed_out()
                raise EngineTimeout("The engine did not end its stream in time.") from None
            except RetryableError as retryable:
                error = retryable.error
            except EngineError as failed:
                error = failed
        request.failed(error.message)
        raise error

    # Background checks. Health: every `check_seconds`, at once after a failed call, with growing
    # pauses while a replica is unhealthy; an only replica is not checked while it is well, as there
    # is no choice. Load, from its metrics: every `measure_seconds` while it has calls in flight.
    #
    # A process that is gone breaks its connections; one that hangs keeps them and answers nothing.
    # So calls at a replica that missed several checks in a row, without any other sign of life, are
    # stopped and sent to another one.

    def _watch(self, replica: Replica) -> None:
        self._watching[replica] = [
            asyncio.create_task(work, name=f"watch {replica.url}")
            for work in (self._check_health(replica), self._measure(replica))
        ]

    async def _check_health(self, replica: Replica) -> None:
        misses = 0
        missing_since = 0.0
        while True:
            is_alone = replica.origin == "setting" and len(self.routes.all) == 1
            if replica.state != "closed" or not is_alone:
                began = replica.clock()
                miss, lost = await self._miss(replica)
                if miss and not lost:
                    replica.lost()
                if not miss or replica.heard_at >= began:
                    misses = 0
                    replica.checked(True)
                else:
                    missing_since = missing_since if misses else began
                    misses += 1
                    replica.checked(False, miss)
                is_hanging = misses >= _MISSES and lost and replica.heard_at < missing_since
                if is_hanging and self.routes.other_usable([replica]):
                    replica.give_up_requests()
            await self._pause(replica, misses)

    async def _miss(self, replica: Replica) -> tuple[str, bool]:
        """Why its check failed ("" if not), and whether its calls may be lost.

        A server without `/health` that answers so is healthy. One that accepts no connections may
        still answer its current calls, as servers do that shut down in order.
        """
        try:
            status, _ = await self._read(replica, "/health")
        except TimeoutError:
            return "no answer to its health check in time", True
        except RetryableError as retryable:
            return retryable.error.message, retryable.fault != "refused"
        except EngineError as error:
            return error.message, True
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            return f"its health check returned HTTP {status}", True
        return "", False

    async def _pause(self, replica: Replica, misses: int) -> None:
        """Waits until the next check, which a failed call brings forward."""
        replica.suspected.clear()
        spread = random.uniform(0.8, 1.2)
        if misses:
            backoff = Backoff(self._check_seconds / 5, _LONGEST_PAUSE_SECONDS)
            await asyncio.sleep(backoff.seconds(misses) * spread)
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(self._check_seconds * spread):
                await replica.suspected.wait()
            # Calls fail in bursts; one check is enough for all of them.
            await asyncio.sleep(self._check_seconds / 50)

    async def _measure(self, replica: Replica) -> None:
        while True:
            await asyncio.sleep(self._measure_seconds)
            if not replica.slots.used:
                continue
            try:
                status, text = await self._read(replica, "/metrics")
            except (TimeoutError, RetryableError, EngineError):
                continue  # `_check_health` looks after that
            if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
                continue
            load = read_load(text.decode(errors="replace"))
            replica.slots.observe(load)
            if load is None:
                await asyncio.sleep(_LONGEST_PAUSE_SECONDS)

    async def _read(self, replica: Replica, path: str) -> tuple[int, bytes]:
        async with asyncio.timeout(self._check_seconds):
            async with self._connections.open(replica, "GET", path) as response:
                return response.status, await whole(response, _MAX_METRICS_BYTES)


def _restarted(replica: Replica) -> EngineUnavailable:
    """For a replica that went away during the call: which weights sampled is unknown."""
    message = f"The engine at {replica.url} was restarted during the call."
    return EngineUnavailable(message, base_url=replica.url)


async def _drain(response: Response) -> None:
    """Waits for the end of the body after `[DONE]`, so that the connection can be reused."""
    if not response.complete:
        with suppress(TimeoutError, HttpError):
            async with asyncio.timeout(0.1):
                await response.read()


def root_of(address: str) -> str:
    try:
        url = URL(address)
    except ValueError as error:
        raise ConfigError(f"{address[:100]!r} is not the address of an engine: {error}") from None
    if url.user or url.password:
        # They would appear in every message that names the address.
        raise ConfigError(
            "The address of an engine must not hold credentials.",
            hint="Put the key into openai.api_key.",
        )
    return str(url).rstrip("/").removesuffix("/v1").rstrip("/")
