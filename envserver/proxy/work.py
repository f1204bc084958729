"""One exchange with the engine: from what an agent asks to calls that are recorded.

It does not know the agent's connection. A whole answer is worked on in a task of its own: requests
join it, and when the one that began it hangs up, it goes on, so that what is sampled is recorded
and a retry finds it. Only the end of the attempt ends it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from envserver_records.errors import (
    ConfigError,
    EngineError,
    EngineGarbage,
    EngineRefused,
    EngineUnavailable,
    EnvserverError,
)
from envserver_records.records import Call

from ..telemetry.tracing import Span
from ..tokens.prompts import PromptPlan
from .ask import Ask
from .attempts import Attempt, Grant
from .body import EngineBody, engine_body
from .exchange import Choice, Exchange, exchange_of
from .gate import Aborted
from .missing import MissingVersion
from .recording import Circumstances, calls_of, mark_delivered, mark_replayed, names_version
from .source import VERSION_PLACE, Ready, Source
from .streaming import Collector, clean_answer, clean_chunk, is_last
from .tracing import model_call, note_answer

Emit = Callable[[dict[str, Any]], Awaitable[None]]


class Work:
    """The work for one request, and for the retries that join it.

    Args:
        agent: which agent of the attempt asks, None for the only one; `source` is its own.
        digest: of the request.
    """

    def __init__(
        self, source: Source, attempt: Attempt, ask: Ask, agent: str | None, digest: bytes
    ) -> None:
        self.ask = ask
        self.calls: list[Call] = []
        self.begun = asyncio.Event()
        """Set once it is known whether there will be a whole answer that others can join."""
        self._source = source
        self._attempt = attempt
        self._agent = agent
        self._seat = attempt.spec.seat(agent)
        self._line = attempt.spec.line(agent)
        self._digest = digest
        self._started_at = time.time()
        self._first_at: float | None = None
        self._first_version = self._version
        self._body: EngineBody
        self._prompt: PromptPlan
        self._ready: Ready
        self._collector: Collector | None = None
        self._task: asyncio.Task[dict[str, Any]] | None = None
        self._asked = False
        self._failure: EnvserverError | None = None
        self._waiting = 1
        self._delivered = False

    async def begin(self) -> None:
        """Finds out how the engine is asked, plans the prompt, and starts `task`, if any.

        Raises:
            EngineError: the engine does not answer.
        """
        try:
            await self._prepare()
            if not self._can_stream():
                self._task = asyncio.create_task(self._run())
                self._attempt.hold(self._task)
        except EngineError as error:
            raise self.failed(error) from None
        finally:
            if self._task is None:
                self._attempt.retries.forget(self)
            self.begun.set()

    async def _prepare(self) -> None:
        ask, seat = self.ask, self._seat
        try:
            self._ready = await self._source.ready()
        except ConfigError as error:
            # Told when the server starts, unless its engine came later. No agent can do anything.
            raise EngineError(error.message, hint=error.hint) from None
        self._body = engine_body(
            ask,
            model=seat.model,
            sampling=seat.sampling,
            exact=self._ready.exact,
            processed=self._ready.processed,
        )
        self._prompt = await self._ready.plan(self._attempt, ask, self._body.body, self._agent)

    def _can_stream(self) -> bool:
        """Whether the answer can truly be streamed (what is parsed from a stream, such as a tool
        call, may differ from what is parsed from the whole)."""
        ask = self.ask
        return (
            ask.stream and not ask.tools and self._ready.streams(ask, self._body.body, self._prompt)
        )

    # Those who wait

    def join(self) -> None:
        """One more request waits for the answer."""
        self._waiting += 1

    def leave(self) -> None:
        """A request, be it the first, waits no more."""
        self._waiting -= 1

    def delivered(self, *, again: bool) -> None:
        """A request has the whole answer; `again`: it was a retry."""
        if not self._attempt.sealed:  # what was recorded is final then, and may be in use
            self._delivered = True
            mark_delivered(self.calls)
            if again:
                mark_replayed(self.calls)

    @property
    def is_lost(self) -> bool:
        """Nobody waits for the answer, and nobody got it."""
        return not (self._waiting or self._delivered)

    # A whole answer, in a task

    @property
    def task(self) -> asyncio.Task[dict[str, Any]] | None:
        """Of a whole answer in the chat form, with what the agent may see; None for a stream."""
        return self._task

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> dict[str, Any]:
        try:
            return await self._whole()
        except BaseException as error:
            self._attempt.retries.forget(self)
            if isinstance(error, EngineError):
                raise self.failed(error) from None
            raise
        finally:
            # The work is remembered for retries, and ids as a list take ten times their size.
            self._prompt = PromptPlan()

    async def _whole(self) -> dict[str, Any]:
        with await self._reserved() as grant:
            self._body.with_max_tokens(grant.max_tokens)
            answer, exchange = await self._sampled()
            grant.spent = exchange.tokens()
            clean_answer(answer, self.ask)
            self._commit(exchange)
            await self._ready.remember(self._attempt, self.calls, self._prompt)
        return answer

    async def _sampled(self) -> tuple[dict[str, Any], Exchange]:
        missing = MissingVersion()
        while True:
            try:
                with suppress(Aborted):
                    async with self._source.gate.passing():
                        return await self._sampled_once()
            except EngineRefused as error:
                await self._wait_for_version(missing, error)

    async def _sampled_once(self) -> tuple[dict[str, Any], Exchange]:
        with self._sampling() as span:
            answer = await self._ready.whole(
                self.ask,
                self._body.body,
                self._prompt,
                rollout_id=self._line,
                timeout_seconds=self._seconds_left,
            )
            exchange = exchange_of(answer)
            note_answer(span, exchange)
            return answer, exchange

    async def _wait_for_version(self, missing: MissingVersion, error: EngineRefused) -> None:
        """Returns when a call that was refused for its version may be sent again.

        Raises:
            EngineError: it was refused for something else, or the version did not come.
        """
        if VERSION_PLACE not in self._seat.model or self._first_at is not None:
            raise error
        asked = self._body.body["model"]
        await missing.wait(error, asked, self._source.model(self._seat.model))

    # A true stream

    async def stream(self, emit: Emit) -> None:
        """Gives `emit` the answer's chunks, what the agent may see of them; the ends of the choices
        only after the recording.

        Raises:
            EngineError: it broke off; what there is was recorded.
        """
        with await self._reserved() as grant:
            self._body.with_max_tokens(grant.max_tokens)
            try:
                ends = await self._relay(emit)
                exchange = self._collected()
                if not exchange.choices:
                    raise EngineGarbage("The engine's stream holds no choices.")
            except EngineError as error:
                raise self.failed(error) from None
            finally:
                grant.spent = self._collected().tokens()
            self._commit(exchange)
            await self._ready.remember(self._attempt, self.calls, self._prompt)
        for chunk in ends:
            await emit(chunk)

    async def _relay(self, emit: Emit) -> list[dict[str, Any]]:
        """The chunks that are held back."""
        missing = MissingVersion()
        while True:
            self._collector = Collector(self.ask)
            ends: list[dict[str, Any]] = []
            try:
                async with self._source.gate.passing():
                    with self._sampling() as span:
                        await self._relay_once(self._collector, emit, ends)
                        note_answer(span, self._collector.exchange())
                return ends
            except Aborted:
                if self._first_at is not None:
                    raise EngineUnavailable("The engine was paused within its stream.") from None
            except EngineRefused as error:
                await self._wait_for_version(missing, error)

    async def _relay_once(
        self, collector: Collector, emit: Emit, ends: list[dict[str, Any]]
    ) -> None:
        streaming = self._ready.stream(
            self.ask,
            self._body.body,
            self._prompt,
            rollout_id=self._line,
            timeout_seconds=self._seconds_left,
        )
        async with streaming as chunks:
            async for chunk in chunks:
                collector.add(chunk)
                last = is_last(chunk)
                if not clean_chunk(chunk, self.ask):
                    continue
                if last:
                    ends.append(chunk)
                    continue
                if self._first_at is None:
                    self._first_at = time.time()
                await emit(chunk)

    def _collected(self) -> Exchange:
        return self._collector.exchange() if self._collector else Exchange(choices=[])

    # Recording

    def failed(self, error: EngineError) -> EnvserverError:
        """Notes that the engine failed, once, and records what was given of a stream.

        Returns:
            What the agent is to be told.
        """
        if self._failure is None:
            if self._first_at is not None:
                self.break_off("error")
            self._failure = self._attempt.engine_failed(
                error, recorded=bool(self.calls), agent=self._agent
            )
        return self._failure

    def break_off(self, how: str) -> None:
        """Records what there is of an exchange that ended too early, by "disconnect" or "error":
        nothing where the engine had not been asked yet.
        """
        if self._attempt.sealed or self.calls or not self._asked:
            return
        exchange = self._collected()
        if not exchange.choices:
            exchange.choices = [Choice(index=0, message={"role": "assistant", "content": ""})]
        self._record(calls_of(exchange, self._circumstances(), how))

    def _commit(self, exchange: Exchange) -> None:
        self._record(calls_of(exchange, self._circumstances()))
        if self._seat.follows_policy and names_version(exchange):
            self._source.names_versions = True
        self._attempt.engine_answered(self._agent)

    def _record(self, calls: list[Call]) -> None:
        self._attempt.commit(calls)
        self.calls = calls

    def _circumstances(self) -> Circumstances:
        ask = self.ask
        return Circumstances(
            model=self._seat.model,
            asked_model=self._body.body["model"],
            agent=self._agent,
            dialect=ask.dialect,
            digest=self._digest,
            messages=ask.messages,
            tools=ask.tools,
            sampling=self._body.sampling(),
            streamed=ask.stream,
            started_at=self._started_at,
            seconds=time.time() - self._started_at,
            seconds_to_first=self._first_at and self._first_at - self._started_at,
            first_version=self._first_version,
            last_version=self._version,
            trained=self._seat.trained,
            follows_policy=self._seat.follows_policy,
            names_versions=self._source.names_versions,
            prompt=self._prompt,
            flags=self._body.flags + (["own_model"] if self._seat.source else []),
        )

    @contextmanager
    def _sampling(self) -> Iterator[Span]:
        """Within: the engine samples, with the version of now or a later one."""
        self._asked = True
        self._first_version = self._version
        self._body.body["model"] = self._source.model(self._seat.model)
        with (
            self._attempt.sampling(self._first_version if self._seat.trained else -1),
            model_call(self._attempt, self._agent, self._body.body) as span,
        ):
            yield span

    async def _reserved(self) -> Grant:
        ask = self.ask
        return await self._attempt.reserve(ask.wanted_tokens, ask.choices, self._agent)

    @property
    def _version(self) -> int:
        """The policy's now, -1 where it is unknown or another model is asked."""
        return self._source.policy_version if self._seat.follows_policy else -1

    @property
    def _seconds_left(self) -> float:
        return max(0.0, self._attempt.seconds_left)
