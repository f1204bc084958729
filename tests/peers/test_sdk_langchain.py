"""LangChain's chat model and LangGraph's agent, end to end."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, Literal

import pytest
from langchain.agents import create_agent
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage
from langchain_core.runnables import Runnable
from langchain_core.tools import tool
from pydantic import BaseModel
from support.sdk_house import SdkHouse, sim_house
from support.sim import QUESTION, call, said

CALLS = said(
    "Two products.",
    call("calculate", {"first": 3, "second": 12}),
    call("calculate", {"first": 2, "second": 12}),
)
DONE = said("They are 36 and 24.")


class Answer(BaseModel):
    """The answer."""

    answer: int
    unit: str


@tool
def calculate(first: int, second: int) -> int:
    """Multiplies."""
    return first * second


@pytest.fixture(scope="module")
def house() -> Iterator[SdkHouse]:
    with sim_house() as house:
        yield house


def ask(model: Runnable[Any, Any], messages: list[BaseMessage], streamed: bool) -> AIMessage:
    """The answer, whole or added up from what a stream gives."""
    if not streamed:
        return model.invoke(messages)
    first, *others = model.stream(messages)
    return sum(others, first)


@pytest.mark.parametrize("responses", [False, True])
@pytest.mark.parametrize("streamed", [False, True])
def test_bound_tools_are_called_and_their_messages_sent_back(
    house: SdkHouse, streamed: bool, responses: bool
) -> None:
    with house.seat(CALLS, DONE) as seat:
        model = seat.langchain(use_responses_api=responses, stream_usage=True)
        model = model.bind_tools([calculate])
        messages: list[BaseMessage] = [HumanMessage(QUESTION)]
        first = ask(model, messages, streamed)
        assert [c["args"] for c in first.tool_calls] == [
            {"first": 3, "second": 12},
            {"first": 2, "second": 12},
        ]
        assert first.text.endswith("Two products.")
        messages += [first, *(calculate.invoke(c) for c in first.tool_calls)]
        last = ask(model, messages, streamed)
        assert last.text.endswith("They are 36 and 24.")
        sampled = [len(c.completion_ids) for c in seat.calls]
        assert [m.usage_metadata["output_tokens"] for m in (first, last)] == sampled
        results = [m["content"] for m in seat.calls[1].messages if m["role"] == "tool"]
        assert results == ["36", "24"]
        seat.assert_exact()
        assert len(seat.sequences) == 1
        assert {c.dialect for c in seat.calls} == {"responses" if responses else "chat"}


def test_words_come_as_they_are_sampled(house: SdkHouse) -> None:
    with house.seat(DONE) as seat:
        chunks = list(seat.langchain(stream_usage=True).stream(QUESTION))
        sampled = len(seat.calls[0].completion_ids)
        assert sum(bool(chunk.content) for chunk in chunks) == sampled - 1  # all but the end
        whole = sum(chunks[1:], chunks[0])
        assert whole.content == seat.calls[0].message["content"]
        assert whole.usage_metadata["output_tokens"] == sampled


@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
def test_structured_output(
    house: SdkHouse, method: Literal["json_schema", "function_calling", "json_mode"]
) -> None:
    value = {"answer": 36, "unit": "pencils"}
    turn = said(Answer(**value).model_dump_json())
    if method == "function_calling":
        turn = said(None, call("Answer", value))
    with house.seat(turn) as seat:
        model = seat.langchain().with_structured_output(Answer, method=method)
        assert model.invoke(QUESTION) == Answer(**value)
        assert "structured_output_masked" in seat.calls[0].flags
        seat.assert_exact()


@pytest.mark.parametrize("responses", [False, True])
@pytest.mark.parametrize("streamed", [False, True])
def test_an_agent_loops_until_no_tool_is_called(
    house: SdkHouse, streamed: bool, responses: bool
) -> None:
    with house.seat(CALLS, CALLS, DONE) as seat:
        model = seat.langchain(use_responses_api=responses, streaming=streamed)
        agent = create_agent(model, [calculate], system_prompt="Be brief.")
        asked: Any = {"messages": [HumanMessage(QUESTION)]}
        said_last = asyncio.run(agent.ainvoke(asked))["messages"][-1]
        assert said_last.text.endswith("They are 36 and 24.")
        assert len(seat.calls) == 3
        seat.assert_exact()
        assert len(seat.sequences) == 1


def test_an_agent_ends_with_an_answer_in_a_schema(house: SdkHouse) -> None:
    with house.seat(CALLS, said(None, call("Answer", {"answer": 36, "unit": "pencils"}))) as seat:
        agent = create_agent(seat.langchain(), [calculate], response_format=Answer)
        ended = agent.invoke({"messages": [HumanMessage(QUESTION)]})
        assert ended["structured_response"] == Answer(answer=36, unit="pencils")
        seat.assert_exact()
