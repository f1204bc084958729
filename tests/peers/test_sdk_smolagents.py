"""smolagents' agents, end to end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from smolagents import CodeAgent, LogLevel, ToolCallingAgent, tool
from support.sdk_house import SdkHouse, sim_house
from support.sim import QUESTION, call, said

QUIET: Any = {"max_steps": 4, "verbosity_level": LogLevel.OFF}


@tool
def calculate(expression: str) -> str:
    """Works it out.

    Args:
        expression: a product.
    """
    first, second = expression.split("*")
    return str(int(first) * int(second))


@pytest.fixture(scope="module")
def house() -> Iterator[SdkHouse]:
    with sim_house() as house:
        yield house


@pytest.mark.parametrize("streamed", [False, True])
def test_a_code_agent_stops_before_its_tag_and_puts_it_back(
    house: SdkHouse, streamed: bool
) -> None:
    turns = [
        said("I multiply.\n<code>\nx = calculate('3 * 12')\nprint(x)\n</code>"),
        said("<code>\ny = calculate(x + ' * 2')\nprint(y)\n</code>"),
        said("<code>\nfinal_answer(x + y)\n</code>"),
    ]
    with house.seat(*turns) as seat:
        agent = CodeAgent([calculate], seat.smolagents(), stream_outputs=streamed, **QUIET)
        assert agent.run(QUESTION) == "3672"
        assert [c.stop_reason for c in seat.calls] == ["</code>"] * 3
        assert [c.streamed for c in seat.calls] == [streamed] * 3
        for earlier, later in zip(seat.calls, seat.calls[1:], strict=False):
            answer = [m for m in later.messages if m["role"] == "assistant"][-1]
            replayed = answer["content"][0]["text"]
            assert replayed.startswith(earlier.message["content"] + "</code>\nCalling tools:\n")
        seat.assert_exact()
        assert len(seat.sequences) == 1


@pytest.mark.parametrize("streamed", [False, True])
def test_a_tool_calling_agent_calls_tools_at_once_and_one_after_the_other(
    house: SdkHouse, streamed: bool
) -> None:
    turns = [
        said(
            "I multiply.",
            call("calculate", {"expression": "3 * 12"}),
            call("calculate", {"expression": "2 * 12"}),
        ),
        said(None, call("final_answer", {"answer": "36"})),
    ]
    with house.seat(*turns) as seat:
        agent = ToolCallingAgent([calculate], seat.smolagents(), stream_outputs=streamed, **QUIET)
        assert agent.run(QUESTION) == "36"
        *_, results = seat.calls[1].messages
        head, *observed = results["content"][0]["text"].split("\n")
        assert (head, sorted(observed)) == ("Observation:", ["24", "36"])
        assert seat.calls[0].sampling["tool_choice"] == "required"
        seat.assert_exact()
        # It tells its calls as text afterwards, and the results in a user's words.
        assert len(seat.sequences) == 2


def test_a_code_agent_may_answer_in_a_schema(house: SdkHouse) -> None:
    turns = [
        said('{"thought": "I multiply.", "code": "print(3 * 12)"}'),
        said('{"thought": "Done.", "code": "final_answer(36)"}'),
    ]
    with house.seat(*turns) as seat:
        agent = CodeAgent(
            [], seat.smolagents(), use_structured_outputs_internally=True, **QUIET
        )  # fmt: skip
        assert agent.run(QUESTION) == 36
        assert all("structured_output_masked" in c.flags for c in seat.calls)
        seat.assert_exact()
