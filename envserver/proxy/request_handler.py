"""Handles one model request of an agent, from its body to the last byte of its answer.

Limits are taken before the engine is called; calls are committed before the agent can know that its
answer is complete (the ends of a streamed answer are held back until then). If a stream ends early,
what was sampled is recorded as broken. After a seal, and if the engine failed before it sent
anything, nothing is recorded.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from envserver_records.errors import EngineTimeout, EnvserverError, NotFoundError, UsageError

from .asgi import (
    Hangups,
    Interrupted,
    Interrupts,
    Receive,
    Scope,
    Send,
    check_nesting,
    end_events,
    header,
    parse_object,
    parse_unchecked,
    send_events,
    send_json,
    start_events,
)
from .attempts import ended
from .body import admit_images, read_request
from .call_task import AgentSession, CallTask
from .dialects import DIALECTS, DialectAdapter, EventWriter
from .dialects.base import ModelRequest
from .dialects.chat import CHECKED
from .engine_answer import chunks_of
from .recorded import KeptRequest
from .retries import RetryMarks, may_be_side

KEEP_ALIVE_SECONDS = 10.0
"""Interval of keep-alive comments to a client that waits for a stream."""
_KEEP_ALIVE = b": keep-alive\n\n"
_SLOW_CLIENT_SECONDS = 5.0
"""Time after the deadline in which an agent may still read its answer."""
_CLOCK_ERROR_SECONDS = 0.05


class RequestHandler:
    """One request; call `answer`."""

    def __init__(
        self,
        session: AgentSession,
        dialect: DialectAdapter,
        receive: Receive,
        send: Send,
        hangups: Hangups | None,
    ) -> None:
        self._session = session
        self._endpoint, self._attempt, self._agent, _ = session
        self._dialect = dialect
        self._receive = receive
        self._send = send
        self._hangups = hangups
        self._memory = session.attempt.memory.setdefault(dialect.name, {})
        self._begun = False
        self._writer: EventWriter | None = None

    @property
    def is_streamed(self) -> bool:
        return self._writer is not None

    async def answer(self, body: bytes, marks: RetryMarks) -> None:
        """Answers the request; raises EnvserverError for the agent before any part is sent."""
        with self._attempt.in_flight.reading():
            parsed = parse_unchecked(body)
            known = self._attempt.recorded.recall(parsed) if self._dialect.name == "chat" else 0
            if known:  # the messages of earlier requests are checked
                check_nesting({**parsed, "messages": parsed["messages"][known:]})
            else:
                check_nesting(parsed, body)
            if self._dialect.name == "chat":
                self._memory[CHECKED] = known
            request = read_request(self._dialect, parsed, self._memory, self._endpoint.tokens)
        await admit_images(request.messages, self._endpoint.tokens, self._attempt.in_flight)
        request.may_be_side = may_be_side(request, of_program=marks.of_program)
        if request.stream:
            self._writer = self._dialect.writer(request, self._memory)
        retries = self._attempt.retries
        while (earlier := retries.find(marks)) is not None:
            await earlier.begun.wait()
            if earlier.task is not None:
                earlier.join()
                await self._guarded(earlier, again=True)
                return
        self._attempt.asked(self._agent, request)
        self._attempt.take_turn(self._agent, side=request.may_be_side)
        kept = self._kept(request)
        record, call_task = self._attempt.recorded, CallTask(self._session, request, marks.digest)

        def end(_: object = None) -> None:
            record.end(kept, recorded=bool(call_task.calls))

        retries.begin(marks, call_task)
        try:
            await self._guarded(call_task, again=False)
        finally:
            if call_task.task is None:
                end()
            else:  # it may go on without this request
                call_task.task.add_done_callback(end)

    def _kept(self, request: ModelRequest) -> KeptRequest:
        """Takes the request's space in the record, or gives its turn back."""
        try:
            with self._attempt.in_flight.reading(), self._attempt.recording(self._agent):
                return self._attempt.recorded.take(request)
        except EnvserverError:
            self._attempt.return_turn(self._agent, side=request.may_be_side)
            raise

    async def _guarded(self, call_task: CallTask, *, again: bool) -> None:
        """Answers with `call_task`; an early end is recorded and reported to the agent."""
        try:
            await self._answer_with(call_task, again=again)
        except Interrupted as interrupted:
            await self._interrupted(call_task, interrupted)
        except EnvserverError as error:
            await self._fail(error)
        finally:
            call_task.leave()

    async def _answer_with(self, call_task: CallTask, *, again: bool) -> None:
        seconds = self._attempt.seconds_left + _SLOW_CLIENT_SECONDS
        interrupts = Interrupts(self._receive, seconds, self._hangups)
        with self._attempt.working(interrupts):
            async with interrupts:
                if not again:
                    await call_task.begin()
                if call_task.task is None:
                    await self._relay(call_task, interrupts)
                else:
                    answer = await self._waited_for(call_task.task)
                    interrupts.stop_watching()
                    await self._tell(call_task.request, answer)
                call_task.delivered(again=again)

    async def _waited_for(self, task: asyncio.Task[dict[str, Any]]) -> dict[str, Any]:
        async with self._pulse():
            await _ended(task)
        if task.cancelled():
            raise ended()
        return task.result()

    async def _tell(self, request: ModelRequest, answer: dict[str, Any]) -> None:
        writer = self._writer
        if writer is None:
            self._begun = True
            await send_json(self._send, 200, self._dialect.whole(request, answer, self._memory))
            return
        await self._begin_events()
        events = [*map(writer.chunk, chunks_of(answer, request)), writer.end()]
        await end_events(self._send, b"".join(events))

    async def _relay(self, call_task: CallTask, interrupts: Interrupts) -> None:
        writer = self._writer
        assert writer is not None
        last: list[bytes] = []

        async def emit(chunk: dict[str, Any]) -> None:
            events = writer.chunk(chunk)
            if call_task.calls:
                last.append(events)
            elif events:
                await self._begin_events()
                await send_events(self._send, events)

        async with self._pulse():
            await call_task.stream(emit)
        await self._begin_events()
        interrupts.stop_watching()
        await end_events(self._send, b"".join(last) + writer.end())

    async def _begin_events(self) -> None:
        if not self._begun:
            self._begun = True
            await start_events(self._send)

    @asynccontextmanager
    async def _pulse(self) -> AsyncIterator[None]:
        """Sends keep-alive comments within the block, if the client wants a stream."""
        task = asyncio.create_task(self._keep_alive()) if self._writer else None
        try:
            yield
        finally:
            if task is not None:
                task.cancel()

    async def _keep_alive(self) -> None:
        while True:
            await asyncio.sleep(KEEP_ALIVE_SECONDS)
            await self._begin_events()
            await send_events(self._send, _KEEP_ALIVE)

    async def _interrupted(self, call_task: CallTask, interrupted: Interrupted) -> None:
        if interrupted.reason == "gone":
            self._gone(call_task)
            return
        call_task.cancel()
        if interrupted.reason == "sealed" or call_task.calls:
            await self._fail(ended())
        else:
            await self._fail(call_task.failed(call_task.away or _too_slow()))

    def _gone(self, call_task: CallTask) -> None:
        """Handles a hang-up: a whole answer is still awaited and recorded, a stream is not."""
        if call_task.calls:
            return
        late = self._attempt.seconds_left <= _CLOCK_ERROR_SECONDS
        if call_task.task is None or late:
            call_task.cancel()
            call_task.break_off("disconnect")
        if late:
            # The worker stopped the agent at the deadline while the engine was sampling.
            call_task.failed(call_task.away or _too_slow())
        elif call_task.task is None and not call_task.calls:
            self._attempt.return_turn(self._agent, side=call_task.request.may_be_side)

    async def _fail(self, error: EnvserverError) -> None:
        """Reports `error` in the stream if it has begun, else raises it."""
        if not self._begun:
            raise error
        if self._writer is not None:
            await end_events(self._send, self._writer.fail(error))


def _ended(task: asyncio.Task[Any]) -> asyncio.Future[None]:
    """Returns a future that ends with `task`, which goes on if the future is cancelled."""
    ending: asyncio.Future[None] = task.get_loop().create_future()

    def end(_: asyncio.Task[Any]) -> None:
        if not ending.done():
            ending.set_result(None)

    task.add_done_callback(end)
    return ending


def _too_slow() -> EngineTimeout:
    """Returns the error for a deadline while the engine samples: not the model's fault."""
    return EngineTimeout(
        "The rollout's time ended while the engine was sampling.",
        hint="Raise --env.worker_timeout, or lower --rollouts.max_concurrent.",
    )


_MESSAGES = DIALECTS["v1/messages"]


async def count_tokens(session: AgentSession, body: bytes) -> dict[str, Any]:
    """Returns how many tokens the conversation's prompt has; takes no turn and records nothing."""
    endpoint, attempt, agent, _ = session
    if attempt.sealed:
        raise ended()
    attempt.check_time()
    memory = attempt.memory.setdefault(_MESSAGES.name, {})
    # The request has the fields of a message, except for the limit of an answer.
    with attempt.in_flight.reading():
        message = {**parse_object(body), "max_tokens": 1}
        request = read_request(_MESSAGES, message, memory, endpoint.tokens)
    await admit_images(request.messages, endpoint.tokens, attempt.in_flight)
    ready = await endpoint.ready()
    route = attempt.spec.route(agent)
    request, made = ready.body_for(request, route)
    made.body["model"] = endpoint.model(route.model)
    count = await ready.count_prompt(attempt, request, made.body, agent)
    if count is None:
        raise NotFoundError(
            "This engine does not count the tokens of a prompt: it has no /tokenize for messages.",
            hint="--tokens.tokenizer names the model's folder, to count here.",
        )
    return {"input_tokens": count}


class WrongKey(UsageError):
    kind, status = "wrong_key", 401


class WrongMethod(UsageError):
    kind, status = "method_not_allowed", 405


def key_and_rest(path: str) -> tuple[str, str]:
    key, _, rest = path.partition("/r/")[2].partition("/")
    return key, rest


def check_bearer(scope: Scope, key: str) -> None:
    """Checks the key in a request's headers, if it has one."""
    scheme, _, token = header(scope, b"authorization").partition(" ")
    bearer = token.strip() if scheme.lower() == "bearer" else scheme
    for sent in (bearer, header(scope, b"x-api-key")):
        if sent and not hmac.compare_digest(sent.encode(), key.encode()):
            raise WrongKey("The key does not belong to this address.")


def require(method: str, wanted: str) -> None:
    if method != wanted:
        raise WrongMethod(f"Use {wanted} here, not {method[:20]}.")


async def answer_lifespan(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
