"""One exchange with the engine: from an agent's ModelRequest to recorded calls.

It does not know the agent's connection. A whole answer is sampled in a separate task that requests
join: if the request that started it hangs up, it continues, so that the sample is recorded and a
retry finds it. Only the end of the attempt stops it.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import takewhile
from typing import Any, NamedTuple, TypeVar

import structlog
from envserver_records.errors import (
    ConfigError,
    EngineError,
    EngineGarbage,
    EngineRefused,
    EngineUnavailable,
    EnvserverError,
)
from envserver_records.records import Call, text_of
from envserver_records.timings import HookEvent
from envserver_records.waiting import Backoff

from ..models.routing import SampledVersions
from ..telemetry.tracing import (
    Span,
    chat_span,
    inputs,
    name_of,
    outputs,
    tool_of,
    tool_span,
    tool_texts,
    used_tokens,
    within,
)
from ..tokens.builder import first_unknown
from ..tokens.history import PromptPlan
from ..tokens.images import facts_of_all, urls_of
from .attempts import ProxyAttempt, TokenReservation
from .body import EngineBody
from .dialects.base import ModelRequest
from .dialects.conversation import TextPart, ToolCall, parts_of
from .dialects.messages import is_object
from .endpoint import VERSION_PLACEHOLDER, EngineEndpoint, MissingVersion, ReadyEngine
from .engine_answer import (
    Collector,
    EngineAnswer,
    SampledChoice,
    clean_answer,
    clean_chunk,
    is_last,
    leave_one_call,
    parse_answer,
    read_all_experts,
)
from .engine_client.base import EXPERTS_START, EngineSession
from .gate import Aborted
from .hooks import Hooks
from .recording import (
    NO_IDS,
    NO_LOGPROBS,
    CallContext,
    calls_of,
    mark_delivered,
    mark_replayed,
    names_version,
)


def model_call(
    attempt: ProxyAttempt,
    agent: str | None,
    body: Mapping[str, Any],
    request: ModelRequest,
    server: str,
) -> AbstractContextManager[Span]:
    """Opens a span for a model call; requests to the engine carry its `traceparent`.

    Texts are in spans only if the tracer wants them. `request`: as the agent sent it; `body`: as
    the engine gets it.
    """
    if not attempt.span.traceparent:
        return nullcontext(attempt.span)
    model = str(body.get("model", ""))
    attributes = chat_span(model, attempt.spec.rollout_id, agent, server, body)
    if attempt.span.texts:
        attributes |= inputs(request.messages, request.tools)
    return within(attempt.span.child(f"chat {model}", attributes, client=True))


def note_answer(span: Span, engine_answer: EngineAnswer) -> None:
    if not span.traceparent:
        return
    choices = engine_answer.choices
    prompts = [choice.prompt_ids for choice in choices if choice.prompt_ids is not None]
    if not prompts and engine_answer.prompt_ids is not None:
        prompts = [engine_answer.prompt_ids]
    span.note(
        {
            "gen_ai.response.model": engine_answer.model,
            "gen_ai.response.finish_reasons": [choice.finish_reason or "" for choice in choices],
            **used_tokens(sum(map(len, prompts)), engine_answer.tokens()),
        }
    )
    if span.texts:
        span.note(outputs((choice.message, choice.finish_reason) for choice in choices))


def note_tools(attempt: ProxyAttempt, agent: str | None, request: ModelRequest) -> None:
    """Adds a span for each tool whose result comes with `request` for the first time.

    It lasts from the answer that called the tool until now, for all tools of one answer.
    """
    if not attempt.span.traceparent:
        return
    last = next((call for call in reversed(attempt.calls) if call.agent == agent), None)
    calls = last.message.get("tool_calls") if last is not None else None
    if last is None or not calls:
        return
    called = {call_id: (name, arguments) for name, call_id, arguments in map(tool_of, calls)}
    offered = {tool_of(tool)[0] for tool in request.tools}  # others are words of the model
    began, now = last.started_at + last.seconds, time.time()
    new = takewhile(lambda sent: sent.get("role") != "assistant", reversed(request.messages))
    for message in reversed(list(new)):
        call_id = name_of(message.get("tool_call_id"))
        if message.get("role") != "tool" or call_id not in called:
            continue
        name, arguments = called[call_id]
        name = name if name in offered else "unknown"
        about = tool_span(name, call_id, attempt.spec.rollout_id)
        if attempt.span.texts:
            about |= tool_texts(arguments, text_of(message))
        attempt.span.past(f"execute_tool {name}", about, began, now)


class AgentSession(NamedTuple):
    """An agent of an attempt (None: its only one), its engine and the environment's hooks."""

    endpoint: EngineEndpoint
    attempt: ProxyAttempt
    agent: str | None
    hooks: Hooks | None


_log = structlog.get_logger("envserver.proxy")
_AWAY = Backoff(1.0, max_seconds=15.0, jitter=(0.5, 1.0))
_PATIENCE = 0.9
"""Share of the time left for which a call waits: the agent must see the failure, not the end."""
T = TypeVar("T")
Emit = Callable[[dict[str, Any]], Awaitable[None]]


class CallTask:
    """The engine call for one request, with its `digest`, and for the retries that join it."""

    def __init__(self, session: AgentSession, request: ModelRequest, digest: bytes) -> None:
        self._endpoint, self._attempt, self._agent, self._hooks = session
        self.request = request
        self.calls: list[Call] = []
        self.begun = asyncio.Event()
        """Set when it is known whether there will be a whole answer for others to join."""
        self._route = session.attempt.spec.route(session.agent)
        self._routing_key = session.attempt.spec.routing_key(session.agent)
        self._digest = digest
        self._hooked: HookEvent | None = None
        self._started_at = time.time()
        self._first_at: float | None = None
        self._first_version = self._version
        self._of_replica = SampledVersions()
        self._sent = request
        """`request` as the engine gets it."""
        self._body: EngineBody
        self._prompt: PromptPlan
        self._wants_experts = self._route.trained and session.endpoint.tokens.experts
        self._experts_start = 0
        self._images: list[str] = []
        self._most_tokens: int | None = None
        """Limit of an answer: the least of the agent's, the run's and the room in its row."""
        self._ready: ReadyEngine
        self._collector: Collector | None = None
        self.task: asyncio.Task[dict[str, Any]] | None = None
        """The task of a whole answer, as the agent may see it; None for a stream."""
        self._asked = False
        self.away: EngineUnavailable | None = None
        """Why it waits, or has waited, for the engine."""
        self._failure: EnvserverError | None = None
        self._waiting = 1
        self._delivered = False

    async def begin(self) -> None:
        """Waits for the engine's capabilities, plans the prompt, starts `task` or will stream."""
        try:
            await self._prepare()
            if not self._can_stream():
                self.task = asyncio.create_task(self._run())
                self._attempt.hold(self.task)
        except EngineError as error:
            raise self.failed(error) from None
        finally:
            if self.task is None:
                self._attempt.retries.forget(self)
            self.begun.set()

    async def _prepare(self) -> None:
        request = self.request
        if self._hooks is not None and self._hooks.on_request is not None:
            request, self._hooked = await self._hooks.request(
                self._attempt, request, self._agent, self._endpoint.tokens
            )
        try:
            self._ready = await self._endpoint.ready()
        except ConfigError as error:
            # Reported at start-up, unless the engine came later. No agent can do anything about it.
            raise EngineError(error.message, hint=error.hint) from None
        request, self._body = self._ready.body_for(request, self._route)
        self._sent = request
        images = await facts_of_all(urls_of(request.messages), self._attempt.in_flight.reading)
        self._images = [image.sha256 for image in images]
        self._prompt = await self._ready.plan(self._attempt, request, self._body.body, self._agent)
        if self._wants_experts and self._prompt.parent is not None:
            self._experts_start = first_unknown(self._attempt.calls[self._prompt.parent])
            self._body.body[EXPERTS_START] = self._experts_start
        wanted = (self.request.wanted_tokens, self._route.sampling.get("max_tokens"))
        self._most_tokens = min((n for n in wanted if n is not None), default=None)
        most = self._attempt.spec.limits.max_row_tokens
        is_counted = request.prompt is None and not images
        if most is not None and self._route.trained and self._ready.exact and is_counted:
            self._body.body["model"] = self._endpoint.model(self._route.model)
            self._most_tokens = await self._fitting(self._most_tokens, most)
        note_tools(self._attempt, self._agent, request)

    async def _fitting(self, wanted: int | None, most: int) -> int | None:
        """Returns how many of the `wanted` tokens an answer may have so that its row has at most
        `most`; None: as many as the engine gives. If none fits, it raises what an engine would, so
        that agents' clients shorten their conversation."""
        plan, context = self._prompt, self._ready.max_model_len
        # The engine's context ends an answer that has no limit; a limit beyond it is refused.
        ends_first = context is not None and most < context
        if plan.ids is None and (wanted is not None or not ends_first):
            shown = plan.text or f"{self._sent.messages}{self._sent.tools}"
            room = most - (wanted or 1)
            if len(shown) <= room and len(shown.encode("utf-8", "surrogatepass")) <= room:
                return wanted  # a token has at least one byte
        if plan.text is None and not self._ready.counts:
            return wanted
        try:
            prompt = await self._ready.prompt_tokens(
                self._attempt, plan, self._body.body, self._agent
            )
        except EngineError:
            return wanted  # the call itself will say what is wrong
        if prompt is None and self._attempt.calls:  # else the model may not be loaded yet
            self._ready.counts = False
        # Without a first answer nothing could be trained: the group is dropped, and says why.
        if prompt is None or (prompt >= most and not self._attempt.calls):
            return wanted
        if prompt >= most:
            raise EngineRefused(
                f"This model's maximum context length is {most} tokens here "
                f"(env.max_token_length). However, your messages resulted in {prompt} tokens.",
                status=400,
            )
        if wanted is None:
            return most - prompt if ends_first else None
        return min(wanted, most - prompt)

    def _can_stream(self) -> bool:
        """Returns whether the answer can be a true stream.

        Not with tools: what is parsed from a stream may differ from the whole answer. Nor if the
        environment looks at answers, nor with routed experts, which vLLM's chunks lack.
        """
        request = self._sent
        return (
            request.stream
            and not request.tools
            and not self._wants_experts
            and (self._hooks is None or self._hooks.on_answer is None)
            and self._ready.client(request).streams(self._body.body, self._prompt.ids)
        )

    # Requests that wait

    def join(self) -> None:
        self._waiting += 1

    def leave(self) -> None:
        self._waiting -= 1

    def delivered(self, *, again: bool) -> None:
        """Records that a request got the whole answer; `again`: it was a retry."""
        if not self._attempt.sealed:  # a sealed record is final and may be in use
            self._delivered = True
            mark_delivered(self.calls)
            if again:
                mark_replayed(self.calls)

    @property
    def is_lost(self) -> bool:
        """Whether no request received its answer and none waits for it."""
        return not (self._waiting or self._delivered)

    @property
    def is_waited_for(self) -> bool:
        return self._waiting > 0

    @property
    def is_usable(self) -> bool:
        """Whether its answer has text or calls, all of which a client can read."""
        return any(map(_is_usable, self.calls))

    # Whole answers

    def cancel(self) -> None:
        if self.task is not None:
            self.task.cancel()

    async def _run(self) -> dict[str, Any]:
        try:
            return await self._whole()
        except BaseException as error:
            self._attempt.retries.forget(self)
            if isinstance(error, EngineError):
                raise self.failed(error) from None
            raise
        finally:
            # The task is kept for retries, and ids take much memory.
            self._prompt = PromptPlan()
            if self.request.prompt is not None:
                self.request.prompt = self._sent.prompt = ""
                self._body.body.pop("prompt", None)

    async def _whole(self) -> dict[str, Any]:
        with await self._reserved() as reservation:
            self._body.with_max_tokens(reservation.max_tokens)
            answer, engine_answer = await self._at_engine(self._sampled)
            reservation.spent = engine_answer.tokens()
            clean_answer(answer, self.request)
            if self._sent.fields.get("parallel_tool_calls") is False:
                leave_one_call(answer, engine_answer)
            refused = None
            if self._hooks is not None and self._hooks.on_answer is not None:
                refused = await self._hooks.answers(
                    self._attempt, self._sent, self._agent, answer, engine_answer
                )
            await self._committed(engine_answer)
        if refused is not None:
            raise self._attempt.reached("refused", refused, self._agent)
        return answer

    async def _at_engine(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Calls `ask`, again after a pause that aborted it or while its version is missing; also
        while the engine is away, if the attempt has calls, which would be lost with it."""
        missing_version, tries, patience_until = MissingVersion(), 0, 0.0
        while True:
            self._collector = None
            try:
                async with self._endpoint.gate.passing():
                    return await ask()
            except Aborted:
                if self._first_at is not None:
                    raise EngineUnavailable("The engine was paused during a stream.") from None
            except EngineUnavailable as error:
                if tries == 0:
                    patience_until = time.time() + _PATIENCE * self._attempt.seconds_left
                tries += 1
                pause = _AWAY.seconds(tries, random.random())
                may_wait = _is_away(error) and self._attempt.calls and self._first_at is None
                if not may_wait or time.time() + pause > patience_until:
                    raise
                if tries == 1:
                    _log.info("call_waits_for_engine", error=str(error))
                self._attempt.engine_away(error, self._agent)
                self.away = error
                self._asked = False  # if its client leaves now, there was no call
                await asyncio.sleep(pause)
            except EngineRefused as error:
                model = self._route.model
                if VERSION_PLACEHOLDER not in model or self._first_at is not None:
                    raise
                requested = self._body.body["model"]
                await missing_version.wait(error, requested, self._endpoint.model(model))

    async def _sampled(self) -> tuple[dict[str, Any], EngineAnswer]:
        with self._sampling() as span:
            client, bare = self._ready.client(self._sent), not self._sent.wants_logprobs
            ids = self._prompt.ids
            answer = await client.whole(self._session(), self._body.body, ids, bare=bare)
            engine_answer = parse_answer(answer)
            note_answer(span, engine_answer)
        if self._wants_experts:
            known, start = self._attempt.calls, self._experts_start
            await read_all_experts(engine_answer, known, ids, start)
        return answer, engine_answer

    # True streams

    async def stream(self, emit: Emit) -> None:
        """Passes cleaned chunks to `emit`; the ends of the choices only after recording."""
        with await self._reserved() as reservation:
            self._body.with_max_tokens(reservation.max_tokens)
            try:
                ends = await self._at_engine(partial(self._relay, emit))
                engine_answer = self._collected()
                if not engine_answer.choices:
                    raise EngineGarbage("The engine's stream holds no choices.")
            except EngineError as error:
                raise self.failed(error) from None
            finally:
                reservation.spent = self._collected().tokens()
            await self._committed(engine_answer)
        for chunk in ends:
            await emit(chunk)

    async def _relay(self, emit: Emit) -> list[dict[str, Any]]:
        """Emits all chunks but the last ones, which it returns."""
        collector = self._collector = Collector(self.request)
        ends: list[dict[str, Any]] = []
        client, bare = self._ready.client(self._sent), not self._sent.wants_logprobs
        with self._sampling() as span:
            body, ids = self._body.body, self._prompt.ids
            async with client.stream(self._session(), body, ids, bare=bare) as chunks:
                async for chunk in chunks:
                    collector.add(chunk)
                    last = is_last(chunk)
                    if not clean_chunk(chunk, self.request):
                        continue
                    if last:
                        ends.append(chunk)
                        continue
                    if self._first_at is None:
                        self._first_at = time.time()
                    await emit(chunk)
            note_answer(span, collector.engine_answer())
        return ends

    def _collected(self) -> EngineAnswer:
        return self._collector.engine_answer() if self._collector else EngineAnswer(choices=[])

    # Recording

    def failed(self, error: EngineError) -> EnvserverError:
        """Records the failure once, and what had arrived; returns the error for the agent."""
        if self._failure is None:
            if self._first_at is not None:
                self.break_off("error")
            self._failure = self._attempt.engine_failed(
                error,
                recorded=bool(self.calls),
                agent=self._agent,
                side=self.request.may_be_side,
            )
        return self._failure

    def break_off(self, how: str) -> None:
        """Records what has arrived of a call that began and ended by "disconnect" or "error"."""
        if self._attempt.sealed or self.calls or not self._asked:
            return
        engine_answer = self._collected()
        if not engine_answer.choices:
            engine_answer.choices = [
                SampledChoice(index=0, message={"role": "assistant", "content": ""})
            ]
        self._record(engine_answer, how)

    async def _committed(self, engine_answer: EngineAnswer) -> None:
        self._record(engine_answer)
        if self._route.follows_policy and names_version(engine_answer):
            self._endpoint.names_versions = True
        self._attempt.engine_answered(self._agent)
        await self._ready.remember(self._attempt, self.calls, self._prompt)
        if any("render_mismatch" in call.flags for call in self.calls):
            try:
                await self._endpoint.confirm(self._routing_key)
            except (ConfigError, EngineError) as error:
                for call in self.calls:
                    call.flags.append("other_model_served")
                changed = EngineUnavailable(f"The engine has changed: {error.message}")
                raise self.failed(changed) from None

    def _record(self, engine_answer: EngineAnswer, broken: str | None = None) -> None:
        calls = calls_of(engine_answer, self._context(engine_answer), broken)
        as_planned = bool(calls) and calls[0].prompt_ids is self._prompt.ids
        self._attempt.commit(calls, side=self.request.may_be_side)
        if as_planned:  # now an equal array that calls share; so they need not be compared
            self._prompt.ids = calls[0].prompt_ids
        self.calls = calls

    def _context(self, engine_answer: EngineAnswer) -> CallContext:
        request, route, ready, plan = self._sent, self._route, self._ready, self._prompt
        ignored = {"ignored": request.ignored} if request.ignored else {}
        searched = bool(self._images) and engine_answer.images is None
        first_version, last_version = self._versions()
        call = Call(
            index=-1,
            model=route.model,
            prompt_ids=NO_IDS,
            completion_ids=NO_IDS,
            logprobs=NO_LOGPROBS,
            versions=[],
            exact=False,
            finish_reason="",
            message={},
            messages=request.messages,
            tools=request.tools,
            sampling=self._body.sampling() | ignored,
            logprobs_kind=ready.logprobs_kind,
            agent=self._agent,
            trained=route.trained,
            dialect=request.dialect,
            streamed=request.stream,
            delivered="none",
            body_digest=self._digest,
            planned_parent=plan.parent,
            edge=plan.edge,
            refusal=plan.refusal,
            started_at=self._started_at,
            seconds=time.time() - self._started_at,
            seconds_to_first=self._first_at and self._first_at - self._started_at,
            flags=self._body.flags + (["own_model"] if route.endpoint else []),
            hooks=[] if self._hooked is None else [self._hooked],
        )
        return CallContext(
            call=call,
            prompt=plan,
            asked_model=self._body.body["model"],
            first_version=first_version,
            last_version=last_version,
            follows_policy=route.follows_policy,
            names_versions=self._endpoint.names_versions,
            images=self._images,
            folded=ready.folded(plan) if searched else None,
            image_token=ready.image_token,
            wants_experts=self._wants_experts,
        )

    @contextmanager
    def _sampling(self) -> Iterator[Span]:
        """Context in which the engine samples, with the current policy version or a later one."""
        self._asked, self.away = True, None
        self._first_version = self._version
        self._body.body["model"] = self._endpoint.model(self._route.model)
        with (
            SampledVersions() as self._of_replica,
            self._attempt.sampling(self._first_version if self._route.trained else -1),
            model_call(
                self._attempt, self._agent, self._body.body, self._sent, self._ready.server
            ) as span,
        ):
            yield span

    async def _reserved(self) -> TokenReservation:
        return await self._attempt.reserve(self._most_tokens, self.request.choices, self._agent)

    def _versions(self) -> tuple[int, int]:
        """Returns the policy versions at the start and at the end of the call.

        They are those of the replica, if it has its own; a version in the model's name is the
        policy's.
        """
        first, last = self._first_version, self._version
        if not self._route.follows_policy or VERSION_PLACEHOLDER in self._route.model:
            return first, last
        of_replica = self._of_replica
        return (
            first if of_replica.first is None else of_replica.first,
            last if of_replica.last is None else of_replica.last,
        )

    @property
    def _version(self) -> int:
        """The current policy version; -1 if it is unknown or another model samples."""
        return self._endpoint.policy_version if self._route.follows_policy else -1

    def _session(self) -> EngineSession:
        seconds = max(0.0, self._attempt.seconds_left)
        return EngineSession(self._endpoint.engine, self._routing_key, seconds)


def _is_away(error: EngineUnavailable) -> bool:
    """Whether the engine may come back by itself: nobody has to do what a hint says."""
    return not error.hint and error.detail.get("status") in (None, 502, 503, 504)


def _is_usable(call: Call) -> bool:
    is_cut = not {"truncated_length", "finish_abort"}.isdisjoint(call.flags)
    parts = [*parts_of(call.message)]
    calls = [part for part in parts if isinstance(part, ToolCall)]
    says = any(
        isinstance(part, TextPart) and part.kind == "text" and part.text.strip() for part in parts
    )
    return not is_cut and (says or bool(calls)) and all(is_object(call.arguments) for call in calls)
