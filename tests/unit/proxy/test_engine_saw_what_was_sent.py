"""Any sequence of requests reaches the engine byte for byte; each sample is recorded once.

The engine samples arbitrary tokens from hypothesis, rarely as a tokenizer would.
"""

import asyncio
import contextlib
import json
import random
from collections import Counter, deque
from functools import cache
from typing import Any, Literal, NamedTuple

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.engine_stand_in import END, ScaleOut
from support.extent import examples
from support.proxy_house import asgi_answer
from support.serving import attempt_spec
from support.speaking import Chat, Message, events_of, text_of
from support.talk import format_of
from support.templates import tool

from envserver.models.probe import ProbeResult
from envserver.proxy.endpoint import Capabilities, EngineEndpoint
from envserver.proxy.hooks import HookFunctions
from envserver.proxy.server import Proxy
from envserver.rollout_interface import ModelCall
from envserver.tokens.builder import build
from envserver.tokens.chat_format import ChatFormat
from envserver.tokens.invariants import check

Json = dict[str, Any]
UPSTREAM = ProbeResult(mode="tokens", model="tiny", tools=True, has_parser=True)


class Sample(NamedTuple):
    """What is sampled, before what ends it: the model's own end, the limit, or a stop string if
    one was asked for. `tail` is sampled in one token with the stop string's last."""

    ids: list[int]
    end: Literal["own", "limit", "string"] = "own"
    tail: str = ""


class Scripted(ScaleOut):
    """See ScaleOut; `script` holds what is sampled next, the oldest first.

    `saw` are the ids that were to be continued, and `said` those that were sampled behind them.
    """

    def __init__(self, format: ChatFormat) -> None:
        super().__init__(format)
        self.format = format
        self.script: deque[Sample] = deque()
        self.saw: list[list[int]] = []
        self.said: list[list[int]] = []

    def message(self, body: Json, text: str) -> Json:
        """As vLLM reads it: what begins like a call and is none is text."""
        with contextlib.suppress(ValueError, KeyError, TypeError):
            return super().message(body, text)
        return {"role": "assistant", "content": text}

    def generate(self, body: Json) -> Json:
        answer = super().generate(body)
        for choice in answer["choices"]:
            self.saw.append(list(body["token_ids"]))
            self.said.append(choice["token_ids"])
        return answer

    def sampled(self, sampling: Json, index: int = 0) -> Json:
        ids, end, tail = self.script.popleft()
        stop = (sampling.get("stop") or [None])[0] if end == "string" else None
        if stop is not None:
            ids = [*ids, *self.format.encode(stop + tail)]
        elif end != "limit":
            ids = [*ids, self.format.encode(END)[0]]
        text = self.format.decode([id for id in ids if not self.format.vocabulary.is_special(id)])
        return {
            "index": index,
            "text": text if stop is None else text.partition(stop)[0],
            "token_ids": ids,
            "finish_reason": "length" if end == "limit" else "stop",
            "stop_reason": stop,
        }


_format = cache(format_of)
PIECES = (
    "Four",
    " fo",
    "ur",
    "é",
    "\n",
    "  ",
    "<|im_start|>",
    "</code",
    '{"a": 1}',
    "calculate",
    "x",
)
CALL = '<tool_call>\n{"name": "calculate", "arguments": {"expression":  "1+1"}}\n</tool_call>'

texts = st.lists(st.sampled_from(PIECES), max_size=4).map("".join)
wishes = st.fixed_dictionaries(
    {}, optional={"n": st.just(2), "stream": st.just(True), "stop": st.just(["</code>"])}
)


@st.composite
def samples(draw: st.DrawFn) -> Sample:
    """Ids that need not be those of any text: pieces encoded one by one, parts of letters."""
    format: ChatFormat = _format("chatml")
    pieces = draw(st.lists(st.sampled_from((*PIECES, CALL)), max_size=5))
    ids = [id for piece in pieces for id in format.encode(piece)]
    if draw(st.booleans()):
        ids.insert(draw(st.integers(0, len(ids))), format.encode("é")[0])
    end = draw(st.sampled_from(["own", "own", "limit", "string"])) if ids else "own"
    return Sample(ids, end, draw(st.sampled_from(["", "", "\n", "co"])))


given = st.lists(samples(), min_size=2, max_size=2)


class Talk(NamedTuple):
    """`settings`: the fields of a request that hold for all its turns."""

    agent: str | None
    settings: Json
    messages: list[Message]


class Agents(RuleBasedStateMachine):
    """An attempt at whose proxy anything is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.Runner()
        self.engine = Scripted(_format("chatml"))
        capabilities = Capabilities(probe_result=UPSTREAM, format=self.engine.format)

        async def find() -> Capabilities:
            return capabilities

        self.proxy = Proxy(
            self.engine, endpoint=EngineEndpoint(self.engine, find=find), hooks=self.hooks()
        )
        self.attempt = self.proxy.open(
            attempt_spec(seconds=3600.0, max_turns=10_000, agents=["main", "helper"])
        )
        self.talks: list[Talk] = []
        self.asked: list[tuple[Talk, Json]] = []

    def teardown(self) -> None:
        self.loop.close()

    def hooks(self) -> HookFunctions | None:
        """What the environment does to calls."""
        return None

    @precondition(lambda self: len(self.talks) < 3)
    @rule(
        said=texts,
        agent=st.sampled_from([None, None, "helper"]),
        settings=st.fixed_dictionaries(
            {}, optional={"tools": st.just([tool()]), "chat_template_kwargs": st.just({"tone": 1})}
        ),
        wishes=wishes,
        given=given,
    )
    def begins(self, said: str, agent: str | None, settings: Json, **asked: Any) -> None:
        """A new talk."""
        self.ask(Talk(agent, settings, [{"role": "user", "content": said}]), **asked)

    @precondition(lambda self: self.talks)
    @rule(
        data=st.data(),
        said=texts,
        back=st.sampled_from(["plain", "plain", "stripped", "parts", "appended", "edited"]),
        wishes=wishes,
        given=given,
    )
    def goes_on(self, data: st.DataObject, said: str, back: str, **asked: Any) -> None:
        """The next turn of a talk, or another one for the turn that was."""
        talk = data.draw(st.sampled_from(self.talks[::-1]))
        *messages, answer = talk.messages
        question = {"role": "user", "content": said}
        self.ask(talk._replace(messages=[*messages, _sent_back(answer, back), question]), **asked)

    @precondition(lambda self: self.asked)
    @rule(data=st.data(), given=given)
    def asks_again(self, data: st.DataObject, given: list[Sample]) -> None:
        """The very same request, which is a new one."""
        self.ask(*data.draw(st.sampled_from(self.asked[::-1])), given)

    @precondition(lambda self: self.asked)
    @rule(data=st.data(), given=given)
    def tries_again(self, data: st.DataObject, given: list[Sample]) -> None:
        """A request whose answer got lost: nothing is sampled, unless it was a stream, or a hook
        refused it."""
        talk, wishes = data.draw(st.sampled_from(self.asked[::-1]))
        before = len(self.attempt.calls)
        self.ask(talk, wishes, given, retry=b"1")
        streamed = "stream" in wishes and "tools" not in talk.settings
        assert self.hooks() or (len(self.attempt.calls) > before) == streamed

    def ask(self, talk: Talk, wishes: Json, given: list[Sample], retry: bytes = b"0") -> None:
        """Asks, with what the engine then samples."""
        self.asked.append((talk, wishes))
        self.engine.script.clear()
        self.engine.script.extend(given)
        body = {"messages": talk.messages, **talk.settings, **wishes}
        whole = self.loop.run(self._post(talk.agent, body, retry))
        self.talks += [
            talk._replace(messages=[*talk.messages, message]) for message in Chat().answers(whole)
        ]

    async def _post(self, agent: str | None, body: Json, retry: bytes) -> Any:
        headers = [(b"x-agent", (agent or "").encode()), (b"x-stainless-retry-count", retry)]
        status, text = await asgi_answer(self.proxy, self.attempt.key, body, headers=headers)
        if status == 400 and json.loads(text)["error"].get("param") == "refused":
            assert self.hooks() is not None
            return {"choices": []}
        assert status == 200, text
        return Chat().joined(events_of(text)) if body.get("stream") else json.loads(text)

    @invariant()
    def the_engine_saw_what_was_recorded(self) -> None:
        calls = self.attempt.calls
        recorded = [(c.prompt_ids.tobytes(), c.completion_ids.tobytes()) for c in calls]
        engine = zip(self.engine.saw, self.engine.said, strict=True)
        assert Counter(recorded) == Counter((_bytes(saw), _bytes(said)) for saw, said in engine)

    @invariant()
    def what_is_continued_stands_in_the_prompt(self) -> None:
        calls = self.attempt.calls
        for call in calls:
            assert not {"prompt_mismatch", "render_mismatch"} & {*call.flags}
            if call.planned_parent is not None:
                parent = calls[call.planned_parent]
                seen = parent.prompt_ids.tobytes() + parent.completion_ids.tobytes()
                assert call.prompt_ids.tobytes().startswith(seen)
                assert call.agent == parent.agent

    @invariant()
    def rows_are_exact(self) -> None:
        check(self.attempt.calls, build(self.attempt.calls))


class HookedAgents(Agents):
    """The same, with an environment that changes and refuses requests and answers at random."""

    @initialize(seed=st.integers(0, 2**32))
    def decides(self, seed: int) -> None:
        self.dice = random.Random(seed)

    def hooks(self) -> HookFunctions:
        return HookFunctions(self.on_request, self.on_answer)

    def on_request(self, call: ModelCall) -> None:
        system = {"role": "system", "content": "Be brief."}
        match self.dice.randrange(8):
            case 0:
                call.refuse("not this")
            case 1:
                call.change("compacted", messages=call.messages[-1:])
            case 2:
                call.change("an injected message", messages=[system, *call.messages])
            case 3:
                call.change("another tool", tools=[tool()])
            case 4:
                call.messages.clear()  # has no effect

    async def on_answer(self, call: ModelCall) -> None:
        assert call.answer is not None
        text = text_of(call.answer)
        new = {"role": "assistant"}
        match self.dice.randrange(8):
            case 0:
                call.refuse("not so")
            case 1:
                call.change("cut", answer={**new, "content": text.strip()})
            case 2:
                call.change("appended", answer={**new, "content": text + " And more."})
            case 3:
                call.change("another", answer={**new, "content": "Four"})
            case 4:
                function = {"name": "calculate", "arguments": '{"expression": "1"}'}
                made = {"id": "call_x", "type": "function", "function": function}
                call.change("a call", answer={**new, "content": text, "tool_calls": [made]})
            case 5:
                call.answer["content"] = "has no effect"

    @invariant()
    def what_the_agent_did_not_get_is_not_trained(self) -> None:
        rows = build(self.attempt.calls)
        for call in self.attempt.calls:
            assert {"answer_changed", "answer_refused"}.isdisjoint(call.flags) or not any(
                row.mask[row.calls == call.index].any() for row in rows
            )


def _bytes(ids: list[int]) -> bytes:
    return np.array(ids, np.int32).tobytes()


def _sent_back(answer: Message, how: str) -> Message:
    text = text_of(answer)
    if how == "stripped":
        return {**answer, "content": text.strip()}
    if how == "parts":
        return {**answer, "content": [{"type": "text", "text": text}]}
    if how == "appended":
        return {**answer, "content": text + "</code>\nCalled."}
    return {**answer, "content": "No: " + text} if how == "edited" else answer


TestAgents = Agents.TestCase
TestHookedAgents = HookedAgents.TestCase
TestAgents.settings = TestHookedAgents.settings = settings(
    max_examples=examples(60),
    stateful_step_count=15,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
