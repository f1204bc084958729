"""One request of an agent for a model call, from its body to the last byte of its answer.

The order is what matters: the limits are checked and taken before the engine is asked; the calls
are committed before the agent can know that its answer is complete (a streamed answer's ends are
held back until then). What ends a stream early leaves a record of what was sampled until then,
marked as broken. After a seal, and where the engine failed before it sent anything, there is no
record.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from envserver_records.errors import EngineTimeout, EnvserverError

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
from .ask import Ask
from .attempts import Attempt, ended
from .dialects import Api, EventWriter
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
        self._memory = attempt.memory.setdefault(api.name, {})
        self._begun = False
        self._writer: EventWriter | None = None

    @property
    def is_streamed(self) -> bool:
        """Whether the agent asked for a stream."""
        return self._writer is not None

    async def answer(self, body: bytes, marks: Marks) -> None:
        """
        Raises:
            EnvserverError: to be told to the agent; nothing of an answer has left yet.
        """
        ask = self._api.read(parse_object(body), self._memory)
        if ask.stream:
            self._writer = self._api.writer(ask, self._memory)
        retries = self._attempt.retries
        while (earlier := retries.find(marks)) is not None:
            await earlier.begun.wait()
            if earlier.task is not None:
                earlier.join()
                await self._guarded(earlier, again=True)
                return
        self._attempt.take_turn(self._agent)
        work = Work(self._source, self._attempt, ask, self._agent, marks.digest)
        retries.begin(marks, work)
        await self._guarded(work, again=False)

    async def _guarded(self, work: Work, *, again: bool) -> None:
        """Answers with `work`; what ends it early is recorded and told."""
        try:
            await self._work(work, again=again)
        except Interrupted as interrupted:
            await self._interrupted(work, interrupted)
        except EnvserverError as error:
            await self._fail(error)
        finally:
            work.leave()

    async def _work(self, work: Work, *, again: bool) -> None:
        seconds = self._attempt.seconds_left + _SLOW_CLIENT_SECONDS
        interrupts = Interrupts(self._receive, seconds)
        self._attempt.working(interrupts)
        try:
            async with interrupts:
                if not again:
                    await work.begin()
                if work.task is None:
                    await self._relay(work, interrupts)
                else:
                    answer = await self._waited_for(work.task)
                    interrupts.last_words()
                    await self._tell(work.ask, answer)
                work.delivered(again=again)
        finally:
            self._attempt.done(interrupts)

    async def _waited_for(self, task: asyncio.Task[dict[str, Any]]) -> dict[str, Any]:
        async with self._kept_alive():
            await asyncio.wait({task})
        if task.cancelled():
            raise ended()
        return task.result()

    async def _tell(self, ask: Ask, answer: dict[str, Any]) -> None:
        writer = self._writer
        if writer is None:
            self._begun = True
            await send_json(self._send, 200, self._api.whole(ask, answer, self._memory))
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

        async with self._kept_alive():
            await work.stream(emit)
        await self._begin_events()
        interrupts.last_words()
        await end_events(self._send, b"".join(last) + writer.end())

    async def _begin_events(self) -> None:
        if not self._begun:
            self._begun = True
            await start_events(self._send)

    @asynccontextmanager
    async def _kept_alive(self) -> AsyncIterator[None]:
        """Within it, a client that wants a stream hears something now and then."""
        pulse = asyncio.create_task(self._pulse()) if self._writer else None
        try:
            yield
        finally:
            if pulse is not None:
                pulse.cancel()

    async def _pulse(self) -> None:
        while True:
            await asyncio.sleep(KEEP_ALIVE_SECONDS)
            await self._begin_events()
            await send_events(self._send, _KEEP_ALIVE)

    async def _interrupted(self, work: Work, interrupted: Interrupted) -> None:
        if interrupted.reason == "gone":
            self._gone(work)
            return
        work.cancel()
        if interrupted.reason == "sealed" or work.calls:
            await self._fail(ended())
        else:
            await self._fail(work.failed(_too_slow()))

    def _gone(self, work: Work) -> None:
        """The agent hung up before the end: a whole answer is still waited for, a stream is not."""
        if work.calls:
            return
        late = self._attempt.seconds_left <= _CLOCK_ERROR_SECONDS
        if work.task is None or late:
            work.cancel()
            work.break_off("disconnect")
        if late:
            # Whoever ran the agent ended it at the deadline, while the engine was at work.
            work.failed(_too_slow())
        elif work.task is None and not work.calls:
            self._attempt.return_turn(self._agent)

    async def _fail(self, error: EnvserverError) -> None:
        """Tells the agent of `error`: in the stream that has begun, else by raising it."""
        if not self._begun:
            raise error
        if self._writer is not None:
            await end_events(self._send, self._writer.fail(error))


def _too_slow() -> EngineTimeout:
    """A deadline that falls while the engine is at work is not the model's fault."""
    return EngineTimeout(
        "The rollout's time ended while the engine was at work.",
        hint="Allow more by --env.worker_timeout, or fewer at once by --rollouts.max_concurrent.",
    )
