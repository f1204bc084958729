"""Random changes to conversations: recorded tokens are reused only where they fit."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

import pytest
from envserver_records.records import Message
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.extent import examples
from support.talk import ENDS, Talk, format_of, written
from support.templates import OWN, call, tool

from envserver.tokens import PromptPlan, build, check
from envserver.tokens.prepare import prepare

texts = st.lists(
    st.sampled_from(["It", " is", " 4", ".\n", "\n\n", "é", "日", " </code>", "{", '"a"', "  "]),
    min_size=1,
    max_size=6,
).map("".join)
words = texts.filter(lambda text: bool(text.strip()))
RESULT = {"role": "tool", "tool_call_id": "call00001", "content": "2"}


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
        new = RESULT if "tool_calls" in answer else {"role": "user", "content": self.draw(words)}
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
        assert plan.ids[: len(seen)] == seen
        assert self.here.format.decode(plan.ids[len(seen) :]) == plan.added
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
