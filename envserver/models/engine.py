"""The interface between the proxy and whatever samples tokens, and two small engines."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from contextvars import ContextVar, Token
from typing import Any, Final, Protocol

import msgspec
from envserver_records.errors import EngineError, EngineRefused
from envserver_records.records import Message

from ..telemetry.numbers import SECONDS, Counts, Distribution, Labelled
from .replicas import Origin, State
from .routing import Standing


class ReplicaHealth(msgspec.Struct, frozen=True):
    """The health of one address of an engine.

    Args:
        seconds: how long its answer took.
        state: of the circuit breaker. closed: used; open: set aside; half_open: tested by one call
            at a time.
        calls, errors: calls that were answered, and that failed, since the start.
        seconds_p50, seconds_p95: until the answer of a call, or the first part of a streamed one.
        id, origin, rollouts, expires_at: see Replica; id "": an engine without replicas.
        standing: how it is used; `reason` says why it is not.
        follows: whether it has each policy version that is published for all engines.
        version: the version that it serves, if it does not; None: not known.
    """

    base_url: str
    healthy: bool
    seconds: float = 0.0
    reason: str = ""
    in_flight: int = 0
    limit: int = 0
    waiting: int = 0
    state: State = "closed"
    calls: int = 0
    errors: int = 0
    seconds_p50: float | None = None
    seconds_p95: float | None = None
    id: str = ""
    origin: Origin = "setting"
    standing: Standing = "used"
    follows: bool = True
    version: int | None = None
    rollouts: int = 0
    expires_at: float | None = None


class EngineRequest(msgspec.Struct, frozen=True):
    """One request to an engine.

    Args:
        rollout_id: requests of one go to the same replica while it is healthy and has slots.
        timeout_seconds: for the whole answer, retries included.
        form: a TypedDict of the fields that are read, see `Decoder.decode`; an engine may ignore
            it.
        echo: what `prompt_token_ids` in the answer are likely to be, as JSON. Where they are so,
            `connections.ECHOED` is in their place: to read a million bytes takes a millisecond.
    """

    path: str
    body: dict[str, Any]
    rollout_id: str
    timeout_seconds: float
    form: type | None = None
    echo: bytes = b""


class Engine(Protocol):
    """An OpenAI-compatible engine. Bodies and answers are decoded JSON, unvalidated.

    Every method raises only EngineError and its kinds: EngineUnavailable (no replica answers),
    EngineTimeout, EngineRefused (HTTP 4xx, with the engine's message), EngineGarbage (not JSON, not
    a stream of server-sent events, ended early). Each method retries what is safe to retry.
    """

    kind: str
    """"openai", "sim" or "played"."""
    exact: bool
    """Whether it returns token ids and logprobs."""

    async def __aenter__(self) -> Engine: ...

    async def __aexit__(self, *exc: object) -> None: ...

    async def model_name(self) -> str:
        """The name under which the engine serves the model (asked once)."""

    async def post(self, request: EngineRequest) -> dict[str, Any]: ...

    def stream(
        self, request: EngineRequest
    ) -> AbstractAsyncContextManager[AsyncIterator[dict[str, Any]]]:
        """Streams an answer's chunks; it ends normally only after the engine's `[DONE]`."""

    async def get(self, path: str) -> dict[str, Any]: ...

    async def health(self) -> list[ReplicaHealth]: ...

    def replicas(self) -> list[ReplicaHealth]:
        """The known state of each address without asking, as `health` does; `healthy`: not set
        aside."""


Json = dict[str, Any]

_MOST_PATHS: Final = 20


class Stopwatch:
    """The time that one request of an agent waited for anything but the proxy.

    A context manager: engine calls within it, and in tasks started there, count. `calls`: answers
    that it waited for.
    """

    __slots__ = ("_token", "calls", "seconds")

    def __init__(self) -> None:
        self.calls = 0
        self.seconds = 0.0
        self._token: Token[Stopwatch | None]

    def __enter__(self) -> Stopwatch:
        self._token = _stopwatch.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        _stopwatch.reset(self._token)


_stopwatch: ContextVar[Stopwatch | None] = ContextVar("envserver_stopwatch", default=None)


@contextmanager
def count_as_waiting() -> Iterator[None]:
    watch = _stopwatch.get()
    started = time.perf_counter()
    try:
        yield
    finally:
        if watch is not None:
            watch.seconds += time.perf_counter() - started


class MeasuredEngine:
    """Counts the calls of `engine`; bodies and answers pass unchanged.

    A call that its caller cancelled counts neither as a failure nor as a time. `seconds` is by
    path, to the answer's end; `errors` by kind; `in_flight` includes calls that wait for a slot.
    """

    def __init__(self, engine: Engine) -> None:
        self.kind = engine.kind
        self.exact = engine.exact
        self.seconds = Labelled(SECONDS, _MOST_PATHS)
        self.errors = Counts()
        self.in_flight = 0
        self._engine = engine

    async def __aenter__(self) -> MeasuredEngine:
        await self._engine.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._engine.__aexit__(*exc)

    async def model_name(self) -> str:
        return await self._engine.model_name()

    async def get(self, path: str) -> Json:
        return await self._engine.get(path)

    async def health(self) -> list[ReplicaHealth]:
        return await self._engine.health()

    def replicas(self) -> list[ReplicaHealth]:
        """The calls of a single replica that does not count them are counted here."""
        found = self._engine.replicas()
        if len(found) != 1 or found[0].calls or found[0].errors:
            return found
        return [self._with_counts(found[0])]

    def _with_counts(self, replica: ReplicaHealth) -> ReplicaHealth:
        together = Distribution(SECONDS)
        for seconds in self.seconds.values():
            together.counts = [a + b for a, b in zip(together.counts, seconds.counts, strict=True)]
        return msgspec.structs.replace(
            replica,
            in_flight=replica.in_flight or self.in_flight,
            calls=together.count,
            errors=int(sum(self.errors.values())),
            seconds_p50=together.quantile(0.5),
            seconds_p95=together.quantile(0.95),
        )

    async def post(self, request: EngineRequest) -> Json:
        with self._counted(request.path):
            return await self._engine.post(request)

    @asynccontextmanager
    async def stream(self, request: EngineRequest) -> AsyncIterator[AsyncIterator[Json]]:
        with self._counted(request.path):
            async with self._engine.stream(request) as chunks:
                yield chunks

    @contextmanager
    def _counted(self, path: str) -> Iterator[None]:
        started = time.perf_counter()
        self.in_flight += 1
        try:
            yield
        except EngineError as error:
            self.errors.add((error.kind,))
            raise
        else:
            self.seconds.add((path,), time.perf_counter() - started)
        finally:
            self.in_flight -= 1
            if (watch := _stopwatch.get()) is not None:
                watch.calls += 1
                watch.seconds += time.perf_counter() - started


MODEL = "played"
_CHAT = "/v1/chat/completions"
_TEXT = "/v1/completions"


class Asked(msgspec.Struct, frozen=True):
    """A request to the player, in OpenAI's format; `agent`: None if the environment declares no
    agents."""

    agent: str | None
    messages: list[Message]
    tools: list[dict[str, Any]]
    choice: Any = None


Player = Callable[[Asked], Awaitable[Message]]


class PlayedEngine:
    """Passes calls to the player of their rollout: an external client, without token ids, limited
    by the rollout's time alone."""

    kind = "played"
    exact = False

    def __init__(self) -> None:
        self._players: dict[str, Player] = {}

    @contextmanager
    def played_by(self, rollout_id: str, player: Player) -> Iterator[None]:
        self._players[rollout_id] = player
        try:
            yield
        finally:
            del self._players[rollout_id]

    async def __aenter__(self) -> PlayedEngine:
        return self

    async def __aexit__(self, *exc: object) -> None:
        return None

    async def model_name(self) -> str:
        return MODEL

    async def health(self) -> list[ReplicaHealth]:
        return self.replicas()

    def replicas(self) -> list[ReplicaHealth]:
        return [ReplicaHealth(MODEL, healthy=True)]

    async def get(self, path: str) -> dict[str, Any]:
        if path != "/v1/models":
            raise _refused(path)
        return {"object": "list", "data": [{"id": MODEL, "object": "model"}]}

    async def post(self, request: EngineRequest) -> dict[str, Any]:
        return await self._answer(request, "message")

    @asynccontextmanager
    async def stream(self, request: EngineRequest) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
        answer = await self._answer(request, "delta")

        async def chunks() -> AsyncIterator[dict[str, Any]]:
            yield {**answer, "object": f"{answer['object']}.chunk"}

        yield chunks()

    async def _answer(self, request: EngineRequest, kind: str) -> dict[str, Any]:
        """`kind`: the name of the message in a chat's choice."""
        rollout, _, agent = request.rollout_id.partition("/")
        body = request.body
        player = self._players.get(rollout)
        if player is None:
            raise EngineRefused("No client is set to act as the model of this rollout.", status=400)
        if body.get("n") not in (None, 1):
            raise EngineRefused("A client gives one answer as the model: n must be 1.", status=400)
        played = await player(
            Asked(
                agent=agent or None,
                messages=_messages(request.path, body),
                tools=body.get("tools") or [],
                choice=body.get("tool_choice"),
            )
        )
        calls, content = played.get("tool_calls"), played.get("content")
        message = {"role": "assistant", "content": content}
        if calls:
            message["tool_calls"] = calls
        is_chat = request.path == _CHAT
        return {
            "id": f"played-{uuid.uuid4().hex[:12]}",
            "object": "chat.completion" if is_chat else "text_completion",
            "created": int(time.time()),
            "model": body.get("model") or MODEL,
            "choices": [
                {
                    "index": 0,
                    **({kind: message} if is_chat else {"text": content or ""}),
                    "finish_reason": "tool_calls" if calls else "stop",
                }
            ],
            # A player says nothing of tokens.
            "usage": {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0},
        }


def _messages(path: str, body: dict[str, Any]) -> list[Message]:
    if path == _CHAT:
        return list(body.get("messages") or [])
    prompt = body.get("prompt")
    if path == _TEXT and isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    raise _refused(path)


def _refused(path: str) -> EngineRefused:
    return EngineRefused(
        f"The client that acts as the model answers chats and text prompts, not {path}.", status=404
    )
