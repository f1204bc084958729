"""One chat request of an agent, from its body to the last byte of its answer.

The order is what matters: the limits are checked and taken before the engine is asked; the calls
are committed before the agent can know that its answer is complete (a streamed answer's ends are
held back until then). What ends a request early leaves a record of what was sampled until then,
marked as broken: the agent hangs up, its time is over, the engine fails within its stream. After a
seal, and where the engine failed before it sent anything, there is no record.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable

from ..errors import (
    ConflictError,
    EngineError,
    EngineGarbage,
    EngineRefused,
    EngineTimeout,
    EnvserverError,
)
from ..models.engine import Engine
from ..records import Call
from .asgi import (
    DONE,
    Interrupted,
    Interrupts,
    Receive,
    Send,
    end_events,
    error_body,
    event,
    parse_object,
    send_events,
    send_json,
    start_events,
)
from .attempts import Attempt, Grant
from .plan import ChatPlan, plan_chat
from .recording import Choice, Circumstances, Exchange, calls_of, exchange_of, mark_undelivered
from .streaming import Collector, chunks_of, clean_answer, clean_chunk, is_last

_PATH = "/v1/chat/completions"
_SLOW_CLIENT_SECONDS = 5.0
"""How long after the deadline an agent may still take to read its answer."""
_CLOCK_ERROR_SECONDS = 0.05
_CONTEXT_IS_FULL = re.compile(r"context[ _]length|max_model_len|maximum model length", re.I)
"""In the words in which vLLM, SGLang and OpenAI refuse a prompt that is too long."""


class ChatRequest:
    """One request; `answer` does everything.

    Args:
        agent: which agent of the attempt asks, None for the only one.
        version: gives the policy version that the engine serves now.
    """

    def __init__(
        self,
        engine: Engine,
        attempt: Attempt,
        agent: str | None,
        version: Callable[[], int],
        receive: Receive,
        send: Send,
    ) -> None:
        self._engine = engine
        self._attempt = attempt
        self._agent = agent
        self._version = version
        self._receive = receive
        self._send = send
        self._started_at = time.time()
        self._first_version = version()
        self._begun = False
        self._committed: list[Call] = []
        self._collector: Collector | None = None

    async def answer(self, body: bytes) -> None:
        """
        Raises:
            EnvserverError: to be told to the agent; nothing of an answer has left yet.
        """
        spec = self._attempt.spec
        plan = plan_chat(
            parse_object(body), model=spec.model, sampling=spec.sampling, exact=self._engine.exact
        )
        self._attempt.take_turn()
        try:
            await self._work(plan)
        except Interrupted as interrupted:
            await self._interrupted(plan, interrupted)
        except EngineError as error:
            await self._engine_failed(plan, error)
        except EnvserverError as error:
            await self._fail(error)

    async def _work(self, plan: ChatPlan) -> None:
        seconds = self._attempt.seconds_left + _SLOW_CLIENT_SECONDS
        interrupts = Interrupts(self._receive, seconds)
        self._attempt.working(interrupts)
        try:
            async with interrupts:
                with await self._attempt.reserve(plan.wanted_tokens, plan.choices) as grant:
                    plan.with_max_tokens(grant.max_tokens)
                    self._first_version = self._version()
                    if plan.relay:
                        await self._relay(plan, grant, interrupts)
                    else:
                        await self._whole(plan, grant, interrupts)
        finally:
            self._attempt.done(interrupts)

    async def _whole(self, plan: ChatPlan, grant: Grant, interrupts: Interrupts) -> None:
        spec = self._attempt.spec
        answer = await self._engine.post(
            _PATH,
            plan.body,
            rollout_id=spec.rollout_id,
            timeout_seconds=max(0.0, self._attempt.seconds_left),
        )
        exchange = exchange_of(answer)
        clean_answer(answer, plan)
        self._commit(plan, grant, exchange)
        interrupts.last_words()
        self._begun = True
        if not plan.stream:
            await send_json(self._send, 200, answer)
            return
        await start_events(self._send)
        events = b"".join(event(chunk) for chunk in chunks_of(answer, plan))
        await end_events(self._send, events + DONE)

    async def _relay(self, plan: ChatPlan, grant: Grant, interrupts: Interrupts) -> None:
        spec = self._attempt.spec
        collector = self._collector = Collector(plan)
        ends: list[bytes] = []
        streaming = self._engine.stream(
            _PATH,
            plan.body,
            rollout_id=spec.rollout_id,
            timeout_seconds=max(0.0, self._attempt.seconds_left),
        )
        try:
            async with streaming as chunks:
                async for chunk in chunks:
                    collector.add(chunk)
                    last = is_last(chunk)
                    if not clean_chunk(chunk, plan):
                        continue
                    if last:
                        ends.append(event(chunk))
                        continue
                    await self._begin_events()
                    await send_events(self._send, event(chunk))
            exchange = collector.exchange()
            if not exchange.choices:
                raise EngineGarbage("The engine's stream holds no choices.")
        except BaseException:
            grant.spent = collector.exchange().tokens()
            raise
        self._commit(plan, grant, exchange)
        await self._begin_events()
        interrupts.last_words()
        await end_events(self._send, b"".join(ends) + DONE)

    async def _begin_events(self) -> None:
        if not self._begun:
            self._begun = True
            await start_events(self._send)

    def _commit(self, plan: ChatPlan, grant: Grant, exchange: Exchange) -> None:
        grant.spent = exchange.tokens()
        calls = calls_of(exchange, self._circumstances(plan))
        self._attempt.commit(calls)
        self._attempt.engine_answered()
        self._committed = calls

    def _circumstances(self, plan: ChatPlan) -> Circumstances:
        return Circumstances(
            model=self._attempt.spec.model,
            agent=self._agent,
            messages=plan.messages,
            tools=plan.tools,
            sampling=plan.sampling(),
            streamed=plan.stream,
            started_at=self._started_at,
            seconds=time.time() - self._started_at,
            first_version=self._first_version,
            last_version=self._version(),
            flags=plan.flags,
        )

    async def _interrupted(self, plan: ChatPlan, interrupted: Interrupted) -> None:
        if interrupted.reason == "sealed":
            await self._fail(ConflictError("This attempt has ended."))
        elif self._committed:
            mark_undelivered(self._committed)
        elif interrupted.reason == "gone":
            self._record_broken(plan, "disconnect")
            if self._attempt.seconds_left <= _CLOCK_ERROR_SECONDS:
                # Whoever ran the agent ended it at the deadline, while the engine was at work.
                self._attempt.engine_failed(_too_slow(), recorded=True)
        else:
            await self._engine_failed(plan, _too_slow())

    async def _engine_failed(self, plan: ChatPlan, error: EngineError) -> None:
        if self._begun:
            self._record_broken(plan, "error")
        if isinstance(error, EngineRefused) and _CONTEXT_IS_FULL.search(str(error)):
            self._attempt.engine_answered()
            await self._fail(self._attempt.reached("context", str(error)))
            return
        self._attempt.engine_failed(error, recorded=self._begun)
        await self._fail(error)

    def _record_broken(self, plan: ChatPlan, how: str) -> None:
        """Records what there is of an exchange that ended too early."""
        if self._attempt.sealed:
            return
        exchange = self._collector.exchange() if self._collector else Exchange(choices=[])
        if not exchange.choices:
            exchange.choices = [Choice(index=0, message={"role": "assistant", "content": ""})]
        self._attempt.commit(calls_of(exchange, self._circumstances(plan), how))

    async def _fail(self, error: EnvserverError) -> None:
        """Tells the agent of `error`: in the stream that has begun, else by raising it."""
        if not self._begun:
            raise error
        await end_events(self._send, event(error_body(error)))


def _too_slow() -> EngineTimeout:
    """A deadline that falls while the engine is at work is not the model's fault."""
    return EngineTimeout(
        "The rollout's time ended while the engine was at work.",
        hint="Allow more by --env.worker_timeout, or fewer at once by --rollouts.max_concurrent.",
    )
