"""Any OpenAI-compatible server, or several replicas of one, over HTTP.

In flow decoded request bodies, out flow decoded answers or chunks. What always holds: nothing but
EngineError and its kinds is raised; a call ends within its seconds; the key of the engine stands in
no message; a stream that ended normally was whole.

Sampling changes nothing in an engine, so a request whose answer did not arrive is sent again, to
another replica where there is one: after refused or broken connections, HTTP 408, 429 and 5xx. A
stream is sent again only before its first chunk.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, contextmanager, suppress
from typing import Any, TypeVar

import aiohttp
import orjson
from yarl import URL

from ..config import OpenAIConfig
from ..errors import (
    ConfigError,
    EngineError,
    EngineGarbage,
    EngineRefused,
    EngineTimeout,
    EngineUnavailable,
)
from .engine import ReplicaHealth
from .replicas import Replica, Replicas
from .sse import SseParser

T = TypeVar("T")

_CONNECT_SECONDS = 10.0
_HEALTH_SECONDS = 5.0
_IDLE_CONNECTION_SECONDS = 4.0
"""Below the five seconds after which uvicorn, and so vLLM, closes an idle connection: a request
would else now and then meet a connection that is just being closed."""
_MAX_ANSWER_BYTES = 512 * 1024 * 1024
_MAX_REFUSAL_BYTES = 64 * 1024
_MAX_WORDS = 600
_MAX_PAUSE_SECONDS = 5.0


class OpenAIEngine:
    """The engine at `config.base_url`; an async context manager that owns its connections.

    Args:
        config: its addresses may or may not end in `/v1`. `server_type` "vllm" means that token
            ids and logprobs can be asked for.
        tries: requests sent for one call, over all replicas.
        pause_seconds: before the first repetition on the same replica; doubles, with jitter.

    Raises:
        ConfigError: an address holds credentials.
    """

    kind = "openai"

    def __init__(
        self, config: OpenAIConfig, *, tries: int = 6, pause_seconds: float = 0.25
    ) -> None:
        self.exact = config.server_type == "vllm"
        self._key = config.api_key.get_secret_value()
        self._name = None if config.model_name == "default" else config.model_name
        self._name_lock = asyncio.Lock()
        self._timeout_seconds = config.timeout
        self._tries = tries
        self._pause_seconds = pause_seconds
        roots = list(dict.fromkeys(_root(address) for address in config.base_urls))
        self._replicas = Replicas(roots, config.num_max_requests_at_once)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> OpenAIEngine:
        headers = {"content-type": "application/json", "accept-encoding": "identity"}
        if self._key:
            headers["authorization"] = f"Bearer {self._key}"
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_CONNECTION_SECONDS),
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS),
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def model_name(self) -> str:
        """See Engine."""
        async with self._name_lock:
            if self._name is None:
                self._name = _first_model(await self.get("/v1/models"))
        return self._name

    async def get(self, path: str) -> dict[str, Any]:
        """See Engine."""

        async def once(replica: Replica, deadline: float) -> dict[str, Any]:
            return await self._exchange(replica, "GET", path, None, deadline)

        return await self._retrying(once, "", min(self._timeout_seconds, 30.0))

    async def post(
        self, path: str, body: dict[str, Any], *, rollout_id: str, timeout_seconds: float
    ) -> dict[str, Any]:
        """See Engine."""
        payload = orjson.dumps(body)

        async def once(replica: Replica, deadline: float) -> dict[str, Any]:
            return await self._exchange(replica, "POST", path, payload, deadline)

        return await self._retrying(once, rollout_id, timeout_seconds)

    @asynccontextmanager
    async def stream(
        self, path: str, body: dict[str, Any], *, rollout_id: str, timeout_seconds: float
    ) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
        """See Engine."""
        payload = orjson.dumps(body)
        deadline = self._deadline(timeout_seconds)

        async def once(
            replica: Replica, until: float
        ) -> tuple[AsyncExitStack, aiohttp.ClientResponse]:
            async with AsyncExitStack() as stack:
                opening = self._response(replica, "POST", path, payload, until)
                response = await stack.enter_async_context(opening)
                if "text/event-stream" not in response.headers.get("content-type", ""):
                    self._decode(await _body(replica, response, until))
                    raise EngineGarbage("The engine answered a streamed request without a stream.")
                return stack.pop_all(), response

        stack, response = await self._retrying(once, rollout_id, timeout_seconds)
        async with stack, aclosing(self._chunks(response, deadline)) as chunks:
            yield chunks

    async def health(self) -> list[ReplicaHealth]:
        """See Engine. Asks every replica for its models; five seconds at most."""
        return await asyncio.gather(*(self._health_of(replica) for replica in self._replicas.all))

    async def _health_of(self, replica: Replica) -> ReplicaHealth:
        started = time.monotonic()
        deadline = self._deadline(_HEALTH_SECONDS)
        try:
            await self._exchange(replica, "GET", "/v1/models", None, deadline)
        except _TryAgain as again:
            return ReplicaHealth(replica.url, False, reason=again.error.message)
        except EngineError as error:
            return ReplicaHealth(replica.url, False, reason=error.message)
        return ReplicaHealth(replica.url, True, seconds=time.monotonic() - started)

    def _deadline(self, timeout_seconds: float) -> float:
        return asyncio.get_running_loop().time() + min(timeout_seconds, self._timeout_seconds)

    async def _retrying(
        self,
        once: Callable[[Replica, float], Awaitable[T]],
        rollout_id: str,
        timeout_seconds: float,
    ) -> T:
        """`once` on one replica after the other until it gives something, or gives up for good."""
        now = asyncio.get_running_loop().time
        deadline = self._deadline(timeout_seconds)
        tried: list[Replica] = []
        error: EngineError = EngineTimeout("No time is left for a model call.")
        for number in range(self._tries):
            replica = self._replicas.pick(rollout_id, tried)
            try:
                return await once(replica, deadline)
            except _TryAgain as again:
                error = again.error
                tried.append(replica)
                pause = self._pause(number, again, tried)
            if number + 1 == self._tries or now() + pause >= deadline:
                break
            await asyncio.sleep(pause)
        raise error

    def _pause(self, number: int, again: _TryAgain, tried: list[Replica]) -> float:
        if self._replicas.other_usable(tried):
            return 0.0
        backoff = self._pause_seconds * 2.0**number * random.uniform(0.5, 1.5)
        return min(_MAX_PAUSE_SECONDS, max(backoff, again.wait_seconds))

    async def _exchange(
        self, replica: Replica, method: str, path: str, payload: bytes | None, deadline: float
    ) -> dict[str, Any]:
        async with self._response(replica, method, path, payload, deadline) as response:
            return self._decode(await _body(replica, response, deadline))

    @asynccontextmanager
    async def _response(
        self, replica: Replica, method: str, path: str, payload: bytes | None, deadline: float
    ) -> AsyncGenerator[aiohttp.ClientResponse]:
        """The open answer, with status 2xx, to one request; holds a slot of the replica.

        Raises:
            _TryAgain: another request may do better.
            EngineError: it may not.
        """
        if self._session is None:
            raise EngineUnavailable("The engine's connections are closed.")
        async with AsyncExitStack() as stack:
            with _typed(replica):
                # Health checks and the like (GET) do not wait behind the calls in flight.
                if method == "POST":
                    await _in_time(deadline, stack.enter_async_context(replica.slots))
                replica.begin()
                stack.callback(replica.abandoned)
                sending = self._session.request(
                    method, replica.url + path, data=payload, allow_redirects=False
                )
                response = await _in_time(deadline, stack.enter_async_context(sending))
                replica.answered()
                if not 200 <= response.status < 300:
                    words = self._words(await _in_time(deadline, _beginning(response)))
                    raise _refusal(response, words)
            yield response

    async def _chunks(
        self, response: aiohttp.ClientResponse, deadline: float
    ) -> AsyncGenerator[dict[str, Any]]:
        parser = SseParser()
        ended = False
        while not ended:
            try:
                data = await _in_time(deadline, response.content.readany())
            except TimeoutError:
                raise EngineTimeout("The engine did not end its stream in time.") from None
            except (aiohttp.ClientError, ConnectionError):
                data = b""
            ended = not data
            for event in parser.feed(data) if data else parser.close():
                if event == b"[DONE]":
                    await _drain(response)
                    return
                if event:
                    yield self._decode(event)
        raise EngineGarbage("The engine's stream ended before its [DONE].")

    def _decode(self, data: bytes) -> dict[str, Any]:
        """`data` as a JSON object that is no error.

        Raises:
            EngineGarbage: no JSON object.
            EngineRefused, EngineError: an error in an answer whose HTTP status says otherwise.
        """
        try:
            answer = orjson.loads(data)
        except orjson.JSONDecodeError:
            words = self._words(data[:_MAX_REFUSAL_BYTES])
            raise EngineGarbage(f"The engine's answer is no JSON: {words}") from None
        if not isinstance(answer, dict):
            raise EngineGarbage("The engine's answer is no JSON object.")
        error = answer.get("error")
        if error or answer.get("object") == "error":
            facts = error if isinstance(error, dict) else answer
            status = facts.get("code")
            if isinstance(status, int) and _is_refusal(status):
                raise _refused(status, self._words(data))
            raise EngineError(f"The engine failed: {self._words(data)}")
        return answer

    def _words(self, data: bytes) -> str:
        """What the engine says in the body of an error, short and without its key."""
        words = _error_message(data)
        if self._key:
            words = words.replace(self._key, "***")
        return words if len(words) <= _MAX_WORDS else words[:_MAX_WORDS] + "…"


class _TryAgain(Exception):
    """The request failed with `error`, and may be sent again after `wait_seconds`."""

    def __init__(self, error: EngineError, wait_seconds: float = 0.0) -> None:
        super().__init__(error.message)
        self.error = error
        self.wait_seconds = wait_seconds


@contextmanager
def _typed(replica: Replica) -> Iterator[None]:
    """Turns what aiohttp raises into `_TryAgain` and EngineErrors."""
    try:
        yield
    except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
        replica.unreachable()
        reason = "no connection in time" if isinstance(error, TimeoutError) else _reason(error)
        message = f"The engine at {replica.url} takes no connections: {reason}."
        raise _TryAgain(EngineUnavailable(message, base_url=replica.url)) from None
    except (aiohttp.ClientPayloadError, aiohttp.ServerDisconnectedError, ConnectionError):
        raise _TryAgain(
            EngineGarbage(f"The engine at {replica.url} closed the connection before its answer.")
        ) from None
    except TimeoutError:
        raise EngineTimeout("The engine did not answer in time.", base_url=replica.url) from None
    except aiohttp.ClientError as error:
        raise EngineGarbage(
            f"The engine at {replica.url} does not speak HTTP: {type(error).__name__}."
        ) from None


def _reason(error: aiohttp.ClientConnectorError) -> str:
    return error.os_error.strerror or type(error.os_error).__name__


async def _in_time(deadline: float, work: Awaitable[T]) -> T:
    async with asyncio.timeout_at(deadline):
        return await work


async def _body(replica: Replica, response: aiohttp.ClientResponse, deadline: float) -> bytes:
    """The whole body.

    Raises:
        _TryAgain: it was cut off.
        EngineGarbage: it is over the limit.
    """
    parts: list[bytes] = []
    size = 0
    with _typed(replica):
        async with asyncio.timeout_at(deadline):
            async for part in response.content.iter_any():
                parts.append(part)
                size += len(part)
                if size > _MAX_ANSWER_BYTES:
                    raise EngineGarbage(f"The engine's answer is over {_MAX_ANSWER_BYTES} bytes.")
    return b"".join(parts)


async def _beginning(response: aiohttp.ClientResponse) -> bytes:
    """Enough of the body of an error."""
    data = b""
    async for part in response.content.iter_any():
        data += part
        if len(data) > _MAX_REFUSAL_BYTES:
            break
    return data


async def _drain(response: aiohttp.ClientResponse) -> None:
    """Reads the end of the body behind `[DONE]`, so that the connection can be used again."""
    with suppress(TimeoutError, aiohttp.ClientError, ConnectionError):
        await _in_time(asyncio.get_running_loop().time() + 0.1, response.content.readany())


def _is_refusal(status: int) -> bool:
    return 300 <= status < 500 and status not in (408, 429)


def _refused(status: int, words: str) -> EngineRefused:
    hints = {
        401: "Set openai.api_key.",
        403: "Set openai.api_key.",
        404: "Check openai.base_url and openai.model_name.",
    }
    message = f"The engine refused the request (HTTP {status}): {words}"
    return EngineRefused(message, hint=hints.get(status, ""), status=status)


def _refusal(response: aiohttp.ClientResponse, words: str) -> Exception:
    status = response.status
    if _is_refusal(status):
        return _refused(status, words)
    kind = EngineError if status == 500 else EngineUnavailable
    wait = response.headers.get("retry-after", "")
    return _TryAgain(
        kind(f"The engine failed (HTTP {status}): {words}", status=status),
        float(wait) if wait.isdecimal() else 0.0,
    )


def _error_message(data: bytes) -> str:
    """The message in the body of an error, in one of the shapes that servers use."""
    try:
        body = orjson.loads(data)
    except orjson.JSONDecodeError:
        return data.decode(errors="replace").strip() or "(no words)"
    if isinstance(body, dict):
        error = body.get("error", body)
        if isinstance(error, dict):
            error = error.get("message") or error.get("detail") or error
        body = error
    return body if isinstance(body, str) else orjson.dumps(body).decode()


def _first_model(answer: dict[str, Any]) -> str:
    try:
        name = answer["data"][0]["id"]
    except (KeyError, IndexError, TypeError):
        name = None
    if not isinstance(name, str):
        raise EngineGarbage("The engine lists no model.", hint="Set openai.model_name.")
    return name


def _root(address: str) -> str:
    """`address` in the one form that paths are put behind: no `/v1`, no slash at the end."""
    url = URL(address)
    if url.user or url.password:
        # They would stand in every message that names the address.
        raise ConfigError(
            "An address in openai.base_url holds credentials.",
            hint="Put the key into openai.api_key.",
        )
    return str(url).rstrip("/").removesuffix("/v1").rstrip("/")
