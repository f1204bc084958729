"""A request continues the recorded tokens of an earlier call, or is a root."""

import json
import re
from functools import cache
from typing import Any

import numpy as np
import pytest
from envserver_local.text import Text
from envserver_records.errors import EngineRefused
from envserver_records.records import Call, Message, Sequence, pack, unpack
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.cases import cases_of
from support.extent import examples
from support.forests import ACTIONS, calls_of, calm, forests, reference_rows
from support.odd_prompts import REQUESTS, our_text
from support.talk import ENDS, Talk, format_of, talk, written
from support.templates import CHATML, OWN, TEMPLATES, call, chat_format, tool
from support.traps import TRAPS as TEMPLATE_TRAPS
from support.traps import Trap

from envserver.tokens.builder import all_flags, build
from envserver.tokens.chat_format import ChatFormat
from envserver.tokens.comparison import answer_of, change_of
from envserver.tokens.flags import Actions
from envserver.tokens.history import PromptPlan, RequestHashes
from envserver.tokens.invariants import check
from envserver.tokens.prepare import KeptMessages, prepare

SHOWN, ENDED = "'\\n' + message.content }}", "{%- endfor %}\n{{- '<|im_end|>\\n' }}"
"""Pieces of CHATML that write an answer, and its end."""
USER: Message = {"role": "user", "content": "What is 2 + 2?"}
NEXT: Message = {"role": "user", "content": "And 3 + 3?"}


def said(text: str | None, **more: Any) -> Message:
    return {"role": "assistant", "content": text, **more}


def spelled(here: Talk, text: str) -> list[int]:
    """`text` letter by letter: ids that encoding it would not give."""
    ids = [id for letter in text for id in here.format.encode(letter)]
    assert ids != here.format.encode(text)
    return ids


def seen(here: Talk, index: int) -> list[int]:
    """What the model had before it after call `index`."""
    before = here.calls[index]
    return [*before.prompt_ids.tolist(), *before.completion_ids.tolist()]


@pytest.mark.parametrize("name", OWN)
def test_a_conversation_goes_on_from_its_own_tokens(name: str) -> None:
    here = talk(name)
    messages = [USER]
    for turn in range(4):
        text = f"It is 4, of course: {turn}."
        plan = here.ask(messages, text, sampled=spelled(here, written(name, said(text))))
        if turn:
            assert (plan.parent, plan.edge, plan.flags) == (turn - 1, "exact", [])
            assert plan.ids is not None
            assert plan.ids[: len(seen(here, turn - 1))].tolist() == seen(here, turn - 1)
            assert here.format.decode(plan.ids.tolist()) == plan.text
        messages = [*messages, said(text), NEXT]
    assert len(build(here.calls)) == 1
    # Tool calls may be written in the model's own way.
    here = talk(name)
    tools = [tool()]
    calls = [call({"expression": "1 + 1", "precision": 2})]
    answer = said(None if name in ("llama", "mistral") else "So:", tool_calls=calls)
    here.end = "<|observation|>" if name == "role_stops" else here.end
    here.ask([USER], answer, tools=tools, sampled=written(name, answer, indent=1))
    plan = here.plan([USER, answer, RESULT], tools)
    edge = "exact" if name == "role_stops" else "whitespace"  # its calls are not JSON
    assert (plan.parent, plan.edge, plan.flags) == (0, edge, [])
    turned = call({"precision": 2, "expression": "1 + 1"})
    assert here.plan([USER, answer | {"tool_calls": [turned]}, RESULT], tools).edge == "calls"
    other = call({"expression": "1 + 2", "precision": 2})
    plan = here.plan([USER, answer | {"tool_calls": [other]}, RESULT], tools)
    assert (plan.edge, plan.flags) == ("root", ["assistant_edited"])


@pytest.mark.parametrize("asks_for_stop", [False, True])
def test_an_agent_that_closes_its_code_itself_is_one_conversation(asks_for_stop: bool) -> None:
    """As smolagents' CodeAgent does: stop strings, parts, strip, its calls in the same message."""
    here = talk("chatml")
    messages: list[Message] = [USER]
    for turn in range(4):
        text = f" Thought: look.\n<code>\nx = {turn}\n"
        content = text + "</code>" if asks_for_stop else text
        plan = here.ask(messages, content, sampled=text + "</code>", stop_reason="</code>")
        assert plan.edge == ("appended" if turn else "root")
        assert plan.flags == []
        kept = f"{text}</code>".strip() + f"\nCalling tools:\n[{{'code': 'x = {turn}'}}]"
        answer = said(None) | {"content": [{"type": "text", "text": kept}]}
        messages = [*messages, answer, {"role": "user", "content": "Observation:\n4"}]
    [row] = build(here.calls)
    assert row.path == [0, 1, 2, 3]


THOUGHT = said("It is 4.", reasoning="Two and two.")
WORKED = said("", reasoning="Work it out.", tool_calls=[call({"expression": "2 + 2"})])
RESULT: Message = {"role": "tool", "tool_call_id": "call00001", "content": "4"}
NO_THINKING = {"enable_thinking": False}
SPOKEN = {"NEXT": NEXT, "THOUGHT": THOUGHT, "WORKED": WORKED, "RESULT": RESULT} | {
    "ALL THOUGHT": said(None, reasoning="It is 4."),
    "NOTHING": said(None),
    "CALLED": said("", tool_calls=WORKED["tool_calls"]),
}
CASES = cases_of(__file__)


@pytest.mark.parametrize("case", CASES["comes_back"])
def test_an_answer_that_comes_back(case: str) -> None:
    form, answer, settings, how, outcomes = CASES["comes_back"][case]
    message = SPOKEN.get(answer, answer)
    how = {"sampled": written(form, message), "tools": [tool()]} | how if form != "chatml" else how
    here = talk(form, **settings)
    here.ask([USER], message, **how)
    for expected, *sent_back in outcomes:
        messages = [SPOKEN.get(text) or said(text) for text in sent_back]
        plan = here.plan([USER, *messages], how.get("tools"))
        wanted = {key: None if value == "none" else value for key, value in expected.items()}
        assert {key: getattr(plan, key) for key in wanted} == wanted


def test_what_text_cannot_say_is_kept() -> None:
    here = talk("chatml")
    half = here.format.encode("é")[:1]
    assert here.format.decode(half) == "\ufffd"
    ids = [*here.format.encode("So"), *half, *here.format.encode("<|im_start|> it is")]
    here.ask([USER], "So\ufffd it is", sampled=ids)
    plan = here.plan([USER, said("So\ufffd it is"), NEXT])
    assert (plan.parent, plan.edge) == (0, "lossy_detok")
    assert plan.ids is not None and plan.ids[: len(seen(here, 0))].tolist() == seen(here, 0)
    assert here.calls[0].flags == ["special_token_in_completion", "lossy_detokenization"]


@pytest.mark.parametrize("parsed", [True, False])
def test_reasoning_is_kept_where_that_is_wanted(parsed: bool) -> None:
    here = talk("thinking", think="keep")
    messages: list[Message] = [USER]
    for turn in range(3):
        text = written("thinking", THOUGHT)
        answer = THOUGHT if parsed else said(text)
        plan = here.ask(messages, answer, sampled=text)
        if turn:
            assert (plan.parent, plan.edge, plan.flags) == (turn - 1, "think_kept", ["think_kept"])
        messages = [*messages, said("It is 4.") if parsed else answer, NEXT]
    assert len(build(here.calls)) == 1


def test_each_of_several_answers_to_one_request_can_be_continued() -> None:
    here = talk("chatml")
    for text in ("It is 4.", "Four.", "It is 4."):
        here.ask([USER], text, sampled=spelled(here, text) if len(here.calls) == 2 else text)
    plan = here.plan([USER, said("Four."), NEXT])
    assert (plan.parent, plan.flags) == (1, [])
    plan = here.plan([USER, said("It is 4."), NEXT])
    assert (plan.parent, plan.flags) == (2, ["ambiguous_parent"])
    here.calls[2].delivered = "none"
    plan = here.plan([USER, said("It is 4."), NEXT])
    assert (plan.parent, plan.flags) == (0, [])


def test_other_agents_tools_and_template_settings_are_other_conversations() -> None:
    here = talk("chatml")
    here.ask([USER], "It is 4.")
    messages = [USER, said("It is 4."), NEXT]
    assert here.plan(messages).parent == 0
    others: dict[str, Any] = {
        "agent": "search", "tools": [tool()], "kwargs": NO_THINKING, "model": "other",
    }  # fmt: skip
    for name, other in others.items():
        plan = here.plan(messages, **{name: other})
        assert (plan.edge, plan.refusal, plan.flags) == ("root", None, [])
    here.ask([USER], "It is 4.", agent="search")
    assert here.plan(messages, agent="search").parent == 1


def test_answers_that_nobody_sampled_are_told() -> None:
    here = talk("chatml")
    shots = [USER, said("4"), NEXT]
    plan = here.ask(shots, "6")
    assert (plan.edge, plan.flags) == ("root", ["unsampled_assistant_in_history"])
    plan = here.ask([*shots, said("6"), USER], "4.")
    assert (plan.parent, plan.flags) == (0, [])
    plan = here.plan([*shots, said("6")])
    assert (plan.refusal, plan.flags) == ("ends_with_assistant", ["unsampled_assistant_in_history"])
    compacted = here.plan([{"role": "user", "content": "In short"}, said(" 4."), NEXT])
    assert (compacted.edge, compacted.flags) == ("root", [])


def test_images_are_the_engines() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgoA"}}
    plan = talk("chatml").plan([{"role": "user", "content": [image]}])
    assert (plan.ids, plan.text, plan.flags) == (None, None, ["multimodal_unstitched"])


def test_another_prompt_than_ours_ends_the_continuing_of_its_attempt_only() -> None:
    here, messages = talk("chatml"), [USER, said("It is 4."), NEXT]
    there = Talk(here.format, here.end)
    for attempt in (here, there):
        attempt.ask([USER], "It is 4.")
    here.ask(messages, "6", echo=[1, 2, 3])
    assert here.calls[1].flags == ["prompt_mismatch"]
    assert here.plan([*messages, said("6"), NEXT]).edge == "root"
    assert here.plan(messages).parent == 0
    odd: Message = {"role": "user", "content": [{"type": "text", "text": "2 + 2?"}]}
    other: Message = {"role": "user", "content": "2 + 3?"}
    here.ask([USER, odd, NEXT], "6", echo=here.format.prompt_ids([USER, other, NEXT], None, {}))
    assert here.calls[2].flags == ["render_mismatch"]
    assert here.history.differs_at == "messages[1], role user, content: parts text"
    plan = here.plan(messages)
    assert (plan.edge, plan.refusal, plan.flags) == ("root", "render_mismatch", ["render_mismatch"])
    assert there.plan(messages).parent == 0


def test_a_message_that_we_cannot_render_is_told() -> None:
    called = call({}) | {"type": "custom"}
    for message in (said(None, tool_calls=[called]), {"role": "user", "content": 4}):
        plan = talk("chatml").plan([USER, message, NEXT])
        assert (plan.refusal, plan.flags) == ("unusual_message", ["suffix_refused"])


class LocalTokenizer:
    """Stands in for transformers in the local engine."""

    def __init__(self, form: ChatFormat, source: str) -> None:
        self.source = source
        self.template = form.template(False)

    def get_chat_template(self, tools: object) -> str:
        return self.source

    def apply_chat_template(
        self,
        messages: list[Message],
        *,
        tools: list[dict[str, Any]] | None,
        tokenize: bool,
        continue_final_message: bool,
        add_generation_prompt: bool,
        **kwargs: Any,
    ) -> str:
        return self.template.render(
            messages, tools, generation_prompt=add_generation_prompt, kwargs=kwargs
        )


@calm
@given(st.sampled_from(sorted(TEMPLATES)), REQUESTS)
def test_the_local_engine_renders_any_conversation_as_we_do(
    name: str, request: dict[str, Any]
) -> None:
    form = chat_format(TEMPLATES[name])
    engine: Any = LocalTokenizer(form, TEMPLATES[name])
    messages, ours = request["messages"], our_text(form, request)
    if ours is None:
        with pytest.raises(EngineRefused):
            Text(engine, []).prompt_text(messages, request.get("tools"), request)
    else:
        assert Text(engine, []).prompt_text(messages, request.get("tools"), request) == ours


TRAPS = {**TEMPLATE_TRAPS}
TRAPS |= {"cuts_old_answers": Trap(CHATML.replace(SHOWN, "'\\n' + message.content[:5] }}"), True)}
TRAPS |= {"shows_capitals": Trap(CHATML.replace(SHOWN, "'\\n' + message.content | upper }}"), True)}
TRAPS |= {"hides_that_turns_end": Trap(CHATML.replace(ENDED, "{%- endfor %}\n{{- '\\n' }}"))}


@pytest.mark.parametrize("name", TRAPS)
def test_templates_that_rewrite_the_past_make_roots(name: str) -> None:
    source, tail_is_right = TRAPS[name]
    assert source != CHATML
    here = Talk(chat_format(source, stops=["<|im_end|>"]), "<|im_end|>")
    messages: list[Message] = [{"role": "system", "content": "Be brief."}, USER]
    for turn in range(3):
        text = f"It is 4, of course: {turn}."
        plan = here.ask(messages, text, sampled=spelled(here, text))
        assert plan.ids is None or not tail_is_right
        if plan.ids is not None:  # these messages do not run into the trap
            assert here.format.decode(plan.ids.tolist()) == plan.text
        messages = [*messages, said(text), NEXT]


# Any forest of calls becomes rows in which each sampled token is trained exactly once


@calm
@given(forests(), st.sampled_from(list(ACTIONS.values())))
def test_rows_are_those_of_the_definition_and_train_every_sampled_token_once(
    calls: list[Call], actions: Actions
) -> None:
    rows = build(calls, actions)
    check(calls, rows, actions)
    assert pack(rows) == pack(reference_rows(calls, actions))
    assert [pack(unpack(pack(row), Sequence)) for row in rows] == [pack(row) for row in rows]
    trained = sum(int(row.mask.sum()) for row in build(calls))
    assert trained == sum(len(c.completion_ids) for c in calls if c.exact and not c.flags)


FORESTS = cases_of(__file__, "forests.toml")
ROWS = FORESTS["rows"]


@pytest.mark.parametrize("name", ROWS)
def test_what_becomes_rows(name: str) -> None:
    calls, rows = calls_of(ROWS[name]["calls"]), ROWS[name]["rows"]
    built = build(calls, ACTIONS[ROWS[name]["actions"]])
    for row, columns in zip(built, rows, strict=True):
        assert {name: np.array(getattr(row, name)).tolist() for name in columns} == columns
    assert all_flags(calls, built) == sorted({flag for row in built for flag in row.flags})


# An open answer that an agent changed; what a conversation shares is hashed and prepared once

still = settings(
    deadline=None, max_examples=examples(60), suppress_health_check=[HealthCheck.too_slow]
)


@pytest.mark.parametrize(("was", "tail", "now", "expected"), FORESTS["open_answers"])
def test_open_answers(was: str, tail: str, now: str, expected: list[str]) -> None:
    before, after = answer_of({"content": was}), answer_of({"content": now})
    assert list(change_of(before, after, ended=False, tail=tail)) == expected


def test_deep_arguments_are_compared_as_text() -> None:
    deep = answer_of({"tool_calls": [{"function": {"name": "f", "arguments": "[" * 100_000}}]})
    assert change_of(deep, deep, ended=True, tail="").change == "exact"


# Hashed, prepared and encoded once

MESSAGES: list[Message] = [
    {"role": role, "content": content}
    for role in ("user", "assistant")
    for content in ("a", "b", "\ud800")
]
EDIT_TOOLS: list[list[dict[str, Any]]] = [[], [tool("search")], [tool("search")]]
REQUESTS = st.lists(
    st.tuples(
        st.lists(st.sampled_from(MESSAGES), max_size=5),
        st.sampled_from(EDIT_TOOLS),
        st.sampled_from([{}, {"n": 1}, {"n": True}, {"n": 2**70}]),
        st.sampled_from([None, "critic"]),
    ),
    max_size=6,
)


@still
@given(REQUESTS)
def test_hashes_do_not_depend_on_earlier_requests(requests: list[Any]) -> None:
    known = RequestHashes()
    for messages, tools, kwargs, agent in requests:
        about = {"kwargs": kwargs, "model": "m", "agent": agent}
        assert known.of(messages, tools, **about) == RequestHashes().of(messages, tools, **about)


@still
@given(st.lists(st.tuples(st.lists(st.sampled_from(MESSAGES), max_size=5), st.booleans())))
def test_messages_do_not_depend_on_those_that_were_kept(requests: list[Any]) -> None:
    kept = KeptMessages()
    for messages, parts in requests:
        assert prepare(messages, parts=parts, kept=kept) == prepare(messages, parts=parts)


def test_messages_of_another_request_are_not_taken_for_those_of_this_one() -> None:
    kept = KeptMessages()

    class Interrupted(dict[str, Any]):
        """A message during whose preparation another request's are prepared."""

        def get(self, name: str, default: Any = None) -> Any:
            kept.prepare([{"role": "user", "content": "of another request"}], True, "shown")
            return super().get(name, default)

    kept.prepare(MESSAGES[:2], True, "shown")
    messages = [*MESSAGES[:2], Interrupted(role="user", content="a")]
    assert kept.prepare(messages, True, "shown") == prepare(messages, parts=True, images="shown")


# Random changes to conversations: recorded tokens are reused only where they fit

texts = st.lists(
    st.sampled_from(["It", " is", " 4", ".\n", "\n\n", "é", "日", " </code>", "{", '"a"', "  "]),
    min_size=1,
    max_size=6,
).map("".join)
words = texts.filter(lambda text: bool(text.strip()))
RANDOM_RESULT = {"role": "tool", "tool_call_id": "call00001", "content": "2"}


class Agent:
    """It draws what it does; the messages that it changed in earnest are in `edited`, by id."""

    def __init__(self, data: st.DataObject, here: Talk, name: str) -> None:
        self.draw = data.draw
        self.here = here
        self.name = name
        self.conversations: list[list[Message]] = []
        self.edited: list[Message] = []

    def step(self) -> None:
        messages = self.request()
        answer, more = self.answer()
        agent = self.draw(st.sampled_from([None, None, "sub"]), label="agent")
        for _ in range(self.draw(st.sampled_from([1, 1, 2]), label="choices")):
            plan = self.here.ask(messages, answer, tools=[tool()], agent=agent, **more)
            self.holds(plan, messages)
        new = (
            RANDOM_RESULT
            if "tool_calls" in answer
            else {"role": "user", "content": self.draw(words)}
        )
        self.conversations.append([*messages, self.replay(answer, more), new])

    def request(self) -> list[Message]:
        """A conversation that goes on, begins, is compacted or is taken up at an earlier place."""
        kind = self.draw(st.sampled_from(["on", "on", "on", "on", "begin", "compact", "again"]))
        if kind == "begin" or not self.conversations:
            return [{"role": "user", "content": self.draw(words)}]
        messages = self.conversations[-1 if kind == "on" else 0]
        if kind == "compact":
            return [{"role": "user", "content": "In short: 4."}, *messages[-2:]]
        return messages[: max(1, len(messages) - 2)] if kind == "again" else messages

    def answer(self) -> tuple[Message, dict[str, Any]]:
        """An answer, and how it was sampled."""
        message: Message = {"role": "assistant", "content": self.draw(texts)}
        end = self.draw(st.sampled_from(["stop", "stop", "tool_calls", "length", "</code>"]))
        if end == "tool_calls":
            held = self.draw(st.dictionaries(words, st.integers() | texts, max_size=2))
            message["tool_calls"] = [call(held)]
            if self.name in ("llama", "mistral"):
                message["content"] = None
        if self.name == "thinking" and end in ("stop", "tool_calls"):
            message["reasoning"] = self.draw(words)
        text = written(self.name, message, indent=self.draw(st.sampled_from([None, 1])))
        ids = self.sampled(text + ("</code>\n" if end == "</code>" else ""))
        if self.draw(st.integers(0, 4), label="breaks a letter") == 0 and end == "stop":
            ids += self.here.format.encode("é")[:1]
            message["content"] += self.draw(st.sampled_from(["", "\ufffd"]))
        if end == "</code>":
            return message, {"sampled": ids, "stop_reason": end}
        return message, {"sampled": ids, "finish": end}

    def sampled(self, text: str) -> list[int]:
        """Ids of `text`, seldom those that encoding it gives."""
        cuts = sorted(self.draw(st.lists(st.integers(0, len(text)), max_size=4)))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        return [id for piece in pieces for id in self.here.format.encode(piece)]

    def replay(self, answer: Message, more: dict[str, Any]) -> Message:
        """The answer as the agent sends it back."""
        again: Message = json.loads(json.dumps(answer))
        content = again["content"] or ""
        change = self.draw(
            st.sampled_from(["none", "strip", "parts", "reorder", "think", "append", "edit"])
        )
        if change == "strip":
            again["content"] = content.strip()
        elif change == "parts":
            again["content"] = [{"type": "text", "text": content}]
        elif change == "reorder":
            for one in again.get("tool_calls", []):
                held = json.loads(one["function"]["arguments"])
                one["function"]["arguments"] = json.dumps(dict(reversed(held.items())), indent=2)
        elif change == "think":
            again.pop("reasoning", None)
        elif change == "append":
            again["content"] = content + ("</code>\n" if "stop_reason" in more else "") + " I say"
            if more.get("finish", "") in ("stop", "tool_calls"):
                self.edited.append(again)
        elif change == "edit":
            again["content"] = "Five: " + content
            self.edited.append(again)
        return again

    def holds(self, plan: PromptPlan, messages: list[Message]) -> None:
        """What is true of every plan."""
        if plan.ids is None:
            assert plan.edge == "root" and plan.parent is None
            return
        assert plan.parent is not None and plan.added is not None and plan.text is not None
        before = self.here.calls[plan.parent]
        seen = [*before.prompt_ids.tolist(), *before.completion_ids.tolist()]
        assert plan.ids[: len(seen)].tolist() == seen
        assert self.here.format.decode(plan.ids[len(seen) :].tolist()) == plan.added
        at = len(before.messages)
        assert prepare(before.messages, parts=False) == prepare(messages[:at], parts=False) or any(
            "reasoning" in message for message in messages
        )
        assert messages[at]["role"] == "assistant"
        # What was added to one answer may go on from another of the same words without an end.
        ended = before.finish_reason != "length" and before.stop_reason is None
        open_end = plan.edge == "appended" and not ended
        assert open_end or all(message is not messages[at] for message in self.edited)
        if plan.edge != "think_kept":
            assert re.fullmatch(self.pattern(plan), plan.text, re.DOTALL)

    def pattern(self, plan: PromptPlan) -> str:
        """Matches what reads as the plan does but for what was sampled.

        (Whitespace before an answer goes with it: some templates leave it out for an empty one.)
        """
        pieces = [re.escape(str(plan.added))]
        while plan.parent is not None:
            plan = self.here.plans[plan.parent]
            pieces.append(re.escape(str(plan.text if plan.added is None else plan.added).rstrip()))
        return "(.*)".join(reversed(pieces))


_format = cache(format_of)


@pytest.mark.parametrize("name", OWN)
@given(data=st.data())
@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_agent(name: str, data: st.DataObject) -> None:
    think = data.draw(st.sampled_from(["template", "keep"])) if name == "thinking" else "template"
    agent = Agent(data, Talk(_format(name), ENDS[name], think=think), name)
    for _ in range(data.draw(st.integers(1, 7), label="steps")):
        agent.step()
    calls = agent.here.calls
    rows = build(calls)
    check(calls, rows)
    assert all(
        any(set(row.path) >= {c.index, c.planned_parent} for row in rows)
        for c in calls
        if c.planned_parent is not None
    )
