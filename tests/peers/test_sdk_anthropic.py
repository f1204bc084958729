"""Anthropic's own client, end to end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from anthropic import beta_tool
from anthropic.types import Message
from support.sdk_house import SdkHouse, Seat, sim_house
from support.sim import QUESTION, call, said

TOOL: Any = {
    "name": "calculate",
    "description": "Works it out.",
    "input_schema": {
        "type": "object",
        "properties": {"expression": {"type": "string"}},
        "required": ["expression"],
    },
}
CALLS = said(
    "Two sums.",
    call("calculate", {"expression": "1 + 1"}),
    call("calculate", {"expression": "2 + 2"}),
)
DONE = said("They are 2 and 4.")
THINK = {"type": "enabled", "budget_tokens": 1024}


@pytest.fixture(scope="module")
def house() -> Iterator[SdkHouse]:
    with sim_house() as house:
        yield house


def ask(seat: Seat, streamed: bool = False, **asked: Any) -> Message:
    """The message, whole or as the client's helper puts it together from a stream."""
    asked = {"model": seat.model, "max_tokens": 200, "messages": user()} | asked
    if not streamed:
        return seat.anthropic.messages.create(**asked)
    with seat.anthropic.messages.stream(**asked) as stream:
        text = "".join(stream.text_stream)
        message = stream.get_final_message()
    assert text == "".join(block.text for block in message.content if block.type == "text")
    return message


def user() -> list[Any]:
    return [{"role": "user", "content": QUESTION}]


def results(message: Message, *given: str) -> dict[str, Any]:
    """The user's turn with what the tools gave."""
    made = [block for block in message.content if block.type == "tool_use"]
    blocks = [
        {"type": "tool_result", "tool_use_id": one.id, "content": text}
        for one, text in zip(made, given, strict=True)
    ]
    return {"role": "user", "content": blocks}


@pytest.mark.parametrize("streamed", [False, True])
def test_a_talk_is_one_sequence(house: SdkHouse, streamed: bool) -> None:
    with house.seat(said("First."), said("Second."), said("Third.")) as seat:
        messages = user()
        for words in ("First.", "Second.", "Third."):
            answer = ask(seat, streamed, messages=messages, system="Be brief.")
            assert answer.content[0].text.endswith(words)
            assert answer.stop_reason == "end_turn"
            assert answer.usage.output_tokens == len(seat.calls[-1].completion_ids)
            messages += [
                {"role": "assistant", "content": answer.content},
                {"role": "user", "content": "And then?"},
            ]
        seat.assert_exact()
        assert len(seat.sequences) == 1
        assert {c.dialect for c in seat.calls} == {"messages"}


@pytest.mark.parametrize("streamed", [False, True])
def test_tools_are_called_and_their_results_told(house: SdkHouse, streamed: bool) -> None:
    with house.seat(CALLS, DONE) as seat:
        messages = user()
        first = ask(seat, streamed, messages=messages, tools=[TOOL])
        assert first.stop_reason == "tool_use"
        assert [b.input for b in first.content if b.type == "tool_use"] == [
            {"expression": "1 + 1"},
            {"expression": "2 + 2"},
        ]
        messages += [{"role": "assistant", "content": first.content}, results(first, "2", "4")]
        last = ask(seat, streamed, messages=messages, tools=[TOOL])
        assert last.content[0].text.endswith("They are 2 and 4.")
        seat.assert_exact()
        assert len(seat.sequences) == 1


@pytest.mark.parametrize("streamed", [False, True])
def test_thoughts_are_blocks_that_can_be_sent_back(house: SdkHouse, streamed: bool) -> None:
    thoughtful = {**CALLS, "content": "<think>\nTwo sums it takes.\n</think>\nTwo sums."}
    with house.seat(thoughtful, DONE) as seat:
        messages = user()
        asked: Any = {"tools": [TOOL], "thinking": THINK, "max_tokens": 2000}
        first = ask(seat, streamed, messages=messages, **asked)
        assert [block.type for block in first.content] == [
            "thinking",
            "text",
            "tool_use",
            "tool_use",
        ]
        assert first.content[0].thinking == "Two sums it takes."
        messages += [{"role": "assistant", "content": first.content}, results(first, "2", "4")]
        last = ask(seat, streamed, messages=messages, **asked)
        assert last.stop_reason == "end_turn"
        recorded, replayed = seat.calls[0].message, seat.calls[1].messages[1]
        assert replayed["reasoning"] == recorded["reasoning"] == "Two sums it takes."
        assert replayed["content"] == recorded["content"] == "Two sums."
        assert replayed["tool_calls"] == recorded["tool_calls"]
        seat.assert_exact()


@pytest.mark.parametrize(
    ("choice", "called"),
    [
        ({"type": "auto"}, 2),
        ({"type": "auto", "disable_parallel_tool_use": True}, 1),
        ({"type": "none"}, 0),
        ({"type": "any"}, 2),
        ({"type": "tool", "name": "calculate"}, 2),
    ],
)
def test_tool_choice_is_obeyed(house: SdkHouse, choice: Any, called: int) -> None:
    with house.seat(CALLS) as seat:
        answer = ask(seat, tools=[TOOL], tool_choice=choice)
        assert sum(block.type == "tool_use" for block in answer.content) == called


@pytest.mark.parametrize("streamed", [False, True])
def test_a_stop_sequence_and_a_limit_end_an_answer(house: SdkHouse, streamed: bool) -> None:
    with house.seat(said("Once. STOP Never.")) as seat:
        stopped = ask(seat, streamed, stop_sequences=["STOP"])
        assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "STOP")
        assert stopped.content[0].text.endswith("Once. ")
        cut = ask(seat, streamed, max_tokens=3)
        assert cut.stop_reason == "max_tokens"
        assert [c.stop_reason for c in seat.calls] == ["STOP", None]
        seat.assert_exact()


def test_the_clients_own_loop_runs_tools_to_the_end(house: SdkHouse) -> None:
    """It asks for a thread first, which the server would keep, and goes on without."""

    @beta_tool
    def calculate(expression: str) -> str:
        """Works it out.

        Args:
            expression: a sum.
        """
        return {"1 + 1": "2", "2 + 2": "4"}[expression]

    with house.seat(CALLS, DONE) as seat:
        runner = seat.anthropic.beta.messages.tool_runner(
            model=seat.model, max_tokens=200, messages=user(), tools=[calculate]
        )
        last = runner.until_done()
        assert last.content[0].text.endswith("They are 2 and 4.")
        assert [m["content"] for m in seat.calls[1].messages if m["role"] == "tool"] == ["2", "4"]
        seat.assert_exact()
        assert len(seat.sequences) == 1
