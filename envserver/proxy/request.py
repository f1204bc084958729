"""One request of an agent for a model call, from its body to the last byte of its answer.

The order is what matters: the limits are checked and taken before the engine is asked; the calls
are committed before the agent can know that its answer is complete (a streamed answer's ends are
held back until then). What ends a stream early leaves a record of what was sampled until then,
marked as broken. After a seal, and where the engine failed before it sent anything, there is no
record.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any

from ..errors import (
    ConflictError,
    EngineError,
    EngineRefused,
    EngineTimeout,
    EnvserverError,
)
from .asgi import (
    Interrupted,
    Interrupts,
    Receive,
    Send,
    end_events,
    parse_object,
    send_events,
    send_json,
    start_events,
)
from .attempts import Attempt
from .dialects import Api, EventWriter
from .recording import mark_replayed
from .retries import Marks
from .source import Source
from .streaming import chunks_of
from .work import Work

KEEP_ALIVE_SECONDS = 10.0
"""A client that waits for a stream hears something this often."""
_KEEP_ALIVE = b": keep-alive\n\n"
_SLOW_CLIENT_SECONDS = 5.0
"""How long after the deadline an agent may still take to read its answer."""
_CLOCK_ERROR_SECONDS = 0.05
_CONTEXT_IS_FULL = re.compile(r"context[ _]length|max_model_len|maximum model length", re.I)
"""In the words in which vLLM, SGLang and OpenAI refuse a prompt that is too long."""


class ModelRequest:
    """One request; `answer` does everything.

    Args:
        api: the dialect that the agent speaks.
        agent: which agent of the attempt asks, None for the only one.
    """

    def __init__(
        self,
        source: Source,
        attempt: Attempt,
        api: Api,
        agent: str | None,
        receive: Receive,
        send: Send,
    ) -> None:
        self._source = source
        self._attempt = attempt
        self._api = api
        self._agent = agent
        self._receive = receive
        self._send = send
        self._begun = False
        self._writer: EventWriter | None = None

    async def answer(self, body: bytes, marks: Marks) -> None:
        """
        Raises:
            EnvserverError: to be told to the agent; nothing of an answer has left yet.
        """
        memory = self._attempt.memory.setdefault(self._api.name, {})
        ask = self._api.read(parse_object(body), memory)
        if ask.stream:
            self._writer = self._api.writer(ask, memory)
        earlier: Work | None = self._attempt.retries.find(marks)
        if earlier is not None:
            await earlier.begun.wait()
            if earlier.task is not None:
                await self._guarded(earlier, again=True)
                return
        self._attempt.take_turn()
        work = Work(self._source, self._attempt, ask, self._agent, marks.digest)
        self._attempt.retries.begin(marks, work)
        try:
            await self._guarded(work)
        finally:
            work.begun.set()

    async def _guarded(self, work: Work, *, again: bool = False) -> None:
        """Answers with `work`; what ends it early is recorded and told."""
        try:
            await self._work(work, again=again)
        except Interrupted as interrupted:
            await self._interrupted(work, interrupted)
        except EngineError as error:
            self._attempt.retries.forget(work)
            await self._engine_failed(work, error)
        except EnvserverError as error:
            self._attempt.retries.forget(work)
            await self._fail(error)

    async def _work(self, work: Work, *, again: bool) -> None:
        seconds = self._attempt.seconds_left + _SLOW_CLIENT_SECONDS
        interrupts = Interrupts(self._receive, seconds)
        self._attempt.working(interrupts)
        try:
            async with interrupts:
                if work.task is None:
                    await work.prepare()
                    if work.streams:
                        work.begun.set()
                        await self._relay(work, interrupts)
                        return
                    work.start()
                    work.begun.set()
                await self._whole(work, interrupts, again=again)
        finally:
            self._attempt.done(interrupts)

    async def _whole(self, work: Work, interrupts: Interrupts, *, again: bool) -> None:
        work.join()
        delivered = False
        try:
            answer = await self._waited_for(work)
            interrupts.last_words()
            await self._tell(work, answer)
            delivered = True
        finally:
            work.leave(delivered=delivered)
        if again:
            mark_replayed(work.calls)

    async def _waited_for(self, work: Work) -> dict[str, Any]:
        task = work.task
        assert task is not None
        while not task.done():
            await asyncio.wait({task}, timeout=KEEP_ALIVE_SECONDS if self._writer else None)
            if not task.done():
                await self._begin_events()
                await send_events(self._send, _KEEP_ALIVE)
        if task.cancelled():
            raise ConflictError("This attempt has ended.")
        return task.result()

    async def _tell(self, work: Work, answer: dict[str, Any]) -> None:
        ask, writer = work.ask, self._writer
        if writer is None:
            memory = self._attempt.memory[self._api.name]
            self._begun = True
            await send_json(self._send, 200, self._api.whole(ask, answer, memory))
            return
        await self._begin_events()
        events = [writer.begin(), *map(writer.chunk, chunks_of(answer, ask)), writer.end()]
        await end_events(self._send, b"".join(events))

    async def _relay(self, work: Work, interrupts: Interrupts) -> None:
        writer = self._writer
        assert writer is not None
        begun = False
        last: list[bytes] = []

        async def emit(chunk: dict[str, Any]) -> None:
            nonlocal begun
            events = b"" if begun else writer.begin()
            begun = True
            events += writer.chunk(chunk)
            if work.calls:
                last.append(events)
            elif events:
                await self._begin_events()
                await send_events(self._send, events)

        await work.stream(emit)
        await self._begin_events()
        interrupts.last_words()
        await end_events(self._send, b"".join(last) + writer.end())

    async def _begin_events(self) -> None:
        if not self._begun:
            self._begun = True
            await start_events(self._send)

    async def _interrupted(self, work: Work, interrupted: Interrupted) -> None:
        if interrupted.reason == "sealed":
            work.cancel()
            await self._fail(ConflictError("This attempt has ended."))
        elif work.calls:
            work.undelivered()
        elif interrupted.reason == "gone":
            self._gone(work)
        else:
            work.cancel()
            await self._engine_failed(work, _too_slow())

    def _gone(self, work: Work) -> None:
        """The agent hung up before the end: a whole answer is still waited for, a stream is not."""
        late = self._attempt.seconds_left <= _CLOCK_ERROR_SECONDS
        if work.task is None or late:
            work.cancel()
            work.break_off("disconnect")
            self._attempt.retries.forget(work)
        if late:
            # Whoever ran the agent ended it at the deadline, while the engine was at work.
            self._attempt.engine_failed(_too_slow(), recorded=True)

    async def _engine_failed(self, work: Work, error: EngineError) -> None:
        streamed = self._begun and work.task is None
        if streamed:
            work.break_off("error")
        if isinstance(error, EngineRefused) and _CONTEXT_IS_FULL.search(str(error)):
            self._attempt.engine_answered()
            await self._fail(self._attempt.reached("context", str(error)))
            return
        if not work.blamed:
            work.blamed = True
            self._attempt.engine_failed(error, recorded=streamed)
        await self._fail(error)

    async def _fail(self, error: EnvserverError) -> None:
        """Tells the agent of `error`: in the stream that has begun, else by raising it."""
        if not self._begun:
            raise error
        await end_events(self._send, self._writer.fail(error) if self._writer else b"")


def _too_slow() -> EngineTimeout:
    """A deadline that falls while the engine is at work is not the model's fault."""
    return EngineTimeout(
        "The rollout's time ended while the engine was at work.",
        hint="Allow more by --env.worker_timeout, or fewer at once by --rollouts.max_concurrent.",
    )
