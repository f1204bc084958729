"""A request is continued from the recorded tokens of the call that it goes on from, or is a root."""

from __future__ import annotations

from typing import Any

import pytest

from envserver.records import Message
from tests.support.talk import ENDS, Talk, written
from tests.support.templates import OWN, call, chat_format, tool

USER: Message = {"role": "user", "content": "What is 2 + 2?"}
NEXT: Message = {"role": "user", "content": "And 3 + 3?"}


def said(text: str | None, **more: Any) -> Message:
    return {"role": "assistant", "content": text, **more}


def talk(name: str = "chatml", **settings: Any) -> Talk:
    special = ["<think>", "</think>"] if name == "thinking" else []
    return Talk(chat_format(OWN[name], special=special, stops=[ENDS[name]]), ENDS[name], **settings)


def spelled(format: Any, text: str) -> list[int]:
    """`text` letter by letter: ids that encoding it would not give."""
    ids = [id for letter in text for id in format.encode(letter)]
    assert ids != format.encode(text)
    return ids


@pytest.mark.parametrize("name", OWN)
def test_a_conversation_goes_on_from_its_own_tokens(name: str) -> None:
    here = talk(name)
    messages = [USER]
    for turn in range(4):
        text = f"It is 4, of course: {turn}."
        plan = here.ask(messages, text, sampled=spelled(here.format, written(name, said(text))))
        if turn:
            before = here.calls[turn - 1]
            seen = [*before.prompt_ids.tolist(), *before.completion_ids.tolist()]
            assert (plan.parent, plan.edge, plan.flags) == (turn - 1, "exact", [])
            assert plan.ids is not None and plan.ids[: len(seen)] == seen
            assert here.format.decode(plan.ids) == plan.text
        messages = [*messages, said(text), NEXT]


@pytest.mark.parametrize("name", OWN)
def test_tool_calls_may_be_written_in_the_models_own_way(name: str) -> None:
    here = talk(name)
    tools = [tool()]
    answer = said(
        "" if name in ("llama", "mistral") else "So:",
        tool_calls=[call({"expression": "1 + 1", "precision": 2})],
    )
    here.ask([USER], answer, tools=tools, sampled=written(name, answer, indent=1))
    result = {"role": "tool", "tool_call_id": "call00001", "content": "2"}
    plan = here.ask([USER, answer, result], "It is 2.", tools=tools)
    if name == "role_stops":  # its tool results begin with another token than the sampled one
        assert (plan.edge, plan.flags) == ("root", ["suffix_refused"])
        return
    assert plan.parent == 0, plan
