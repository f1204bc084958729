"""Official clients and agent frameworks, end to end: all ways to ask, whole and streamed."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any, Literal

import pytest
from anthropic import beta_tool
from anthropic.types import Message
from langchain.agents import create_agent
from langchain_core import tools as langchain_tools
from langchain_core.messages import HumanMessage
from openai.types.responses import Response
from pydantic import BaseModel
from smolagents import LogLevel, ToolCallingAgent, tool
from support import sim
from support.sdk_house import OURS, SdkHouse, Seat, sim_house, whole_and_streamed
from support.sim import QUESTION, TOKENIZER, call, said, user

TOOLS = sim.TOOLS[:1]
CALLS = said(
    "Two sums.",
    call("calculate", {"expression": "1 + 1"}),
    call("calculate", {"expression": "2 + 2"}),
)
DONE = said("They are 2 and 4.")
VALUE: Any = {"answer": 36, "unit": "pencils"}
JSON = said(json.dumps(VALUE))
RESPONSE_TOOLS = [{"type": "function", **TOOLS[0]["function"], "strict": True}]


class Answer(BaseModel):
    answer: int
    unit: str


@pytest.fixture(scope="module")
def house() -> Iterator[SdkHouse]:
    with sim_house() as house:
        yield house


def respond(seat: Seat, streamed: bool = False, **asked: Any) -> Response:
    if not streamed:
        return seat.openai.responses.create(model=seat.model, **asked)
    with seat.openai.responses.stream(model=seat.model, **asked) as stream:
        return stream.get_final_response()


def test_several_prompts_and_choices_are_calls_of_their_own(house: SdkHouse) -> None:
    prompts = ["One", "Two"]
    with house.seat(said("and more")) as seat:
        answer = seat.openai.completions.create(model="sim", prompt=prompts, n=2, max_tokens=4)
        assert [c.index for c in answer.choices] == [0, 1, 2, 3]
        seat.assert_exact()
        starts = [TOKENIZER.decode(c.prompt_ids.tolist(), special=True) for c in seat.calls]
        assert starts == ["One", "One", "Two", "Two"]
        assert answer.usage.completion_tokens == sum(len(c.completion_ids) for c in seat.calls)


# Responses


@whole_and_streamed
@pytest.mark.parametrize("by_id", [False, True])
def test_a_response_calls_tools_and_goes_on(house: SdkHouse, streamed: bool, by_id: bool) -> None:
    with house.seat(CALLS, DONE) as seat:
        asked: list[Any] = user()
        first = respond(seat, streamed, input=asked, tools=RESPONSE_TOOLS)
        message, *made = first.output
        assert message.content[0].text.endswith("Two sums.")
        assert [json.loads(c.arguments)["expression"] for c in made] == ["1 + 1", "2 + 2"]
        results = [
            {"type": "function_call_output", "call_id": c.call_id, "output": str(n)}
            for n, c in zip((2, 4), made, strict=True)
        ]
        more: dict[str, Any] = {"input": [*asked, *first.output, *results]}
        if by_id:
            more = {"input": results, "previous_response_id": first.id}
        last = respond(seat, streamed, tools=RESPONSE_TOOLS, **more)
        assert last.output_text.endswith("They are 2 and 4.")
        assert last.status == "completed"
        assert last.usage.output_tokens == len(seat.calls[1].completion_ids)
        seat.assert_exact(sequences=1)
        assert {c.dialect for c in seat.calls} == {"responses"}


# What is told


@whole_and_streamed
def test_ids_are_told_to_those_who_ask_and_to_nobody_else(house: SdkHouse, streamed: bool) -> None:
    with house.seat(DONE) as seat:
        client = seat.lenient_openai
        for extra in ({}, {"return_token_ids": True}):
            asked: Any = {"model": "sim", "stream": streamed, "extra_body": extra}
            list(client.chat.completions.create(messages=user(), **asked))
            list(client.completions.create(prompt="One", **asked))
        silent, told = seat.exchanges[:2], seat.exchanges[2:]
        assert [one.fields() & OURS for one in silent] == [set()] * 2
        assert [one.fields() & OURS for one in told] == [{"prompt_token_ids", "token_ids"}] * 2
        for one, recorded in zip(told, seat.calls[2:], strict=True):
            choices = [choice for answer in one.answers for choice in answer["choices"]]
            ids = [token for choice in choices for token in choice.get("token_ids") or []]
            assert ids == recorded.completion_ids.tolist()


# Anthropic's client


TOOL: Any = {
    "name": "calculate",
    "description": "Works it out.",
    "input_schema": TOOLS[0]["function"]["parameters"],
}
THINK = {"type": "enabled", "budget_tokens": 1024}


def message_of(seat: Seat, streamed: bool = False, **asked: Any) -> Message:
    """The message, whole or as the client's helper puts it together from a stream."""
    asked = {"model": seat.model, "max_tokens": 200, "messages": user()} | asked
    if not streamed:
        return seat.anthropic.messages.create(**asked)
    with seat.anthropic.messages.stream(**asked) as stream:
        text = "".join(stream.text_stream)
        message = stream.get_final_message()
    assert text == "".join(block.text for block in message.content if block.type == "text")
    return message


def results(message: Message, *given: str) -> dict[str, Any]:
    """The user's turn with what the tools gave."""
    made = [block for block in message.content if block.type == "tool_use"]
    blocks = [
        {"type": "tool_result", "tool_use_id": one.id, "content": text}
        for one, text in zip(made, given, strict=True)
    ]
    return {"role": "user", "content": blocks}


@whole_and_streamed
def test_thoughts_are_blocks_that_can_be_sent_back(house: SdkHouse, streamed: bool) -> None:
    thoughtful = {**CALLS, "content": "<think>\nTwo sums it takes.\n</think>\nTwo sums."}
    with house.seat(thoughtful, DONE) as seat:
        messages: list[Any] = user()
        asked: Any = {"tools": [TOOL], "thinking": THINK, "max_tokens": 2000}
        first = message_of(seat, streamed, messages=messages, **asked)
        assert [block.type for block in first.content] == [
            "thinking",
            "text",
            "tool_use",
            "tool_use",
        ]
        assert first.content[0].thinking == "Two sums it takes."
        messages += [{"role": "assistant", "content": first.content}, results(first, "2", "4")]
        assert message_of(seat, streamed, messages=messages, **asked).stop_reason == "end_turn"
        recorded, replayed = seat.calls[0].message, seat.calls[1].messages[1]
        assert replayed["reasoning"] == recorded["reasoning"] == "Two sums it takes."
        assert replayed["content"] == recorded["content"] == "Two sums."
        assert replayed["tool_calls"] == recorded["tool_calls"]
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
        assert runner.until_done().content[0].text.endswith("They are 2 and 4.")
        assert [m["content"] for m in seat.calls[1].messages if m["role"] == "tool"] == ["2", "4"]
        seat.assert_exact(sequences=1)


# LangChain's chat model and LangGraph's agent


PRODUCTS = said(
    "Two products.",
    call("multiply", {"first": 3, "second": 12}),
    call("multiply", {"first": 2, "second": 12}),
)
MULTIPLIED = said("They are 36 and 24.")


@langchain_tools.tool
def multiply(first: int, second: int) -> int:
    """Multiplies."""
    return first * second


@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
def test_structured_output(
    house: SdkHouse, method: Literal["json_schema", "function_calling", "json_mode"]
) -> None:
    turn = JSON
    if method == "function_calling":
        turn = said(None, call("Answer", VALUE))
    with house.seat(turn) as seat:
        model = seat.langchain().with_structured_output(Answer, method=method)
        assert model.invoke(QUESTION) == Answer(**VALUE)
        assert "structured_output_masked" in seat.calls[0].flags
        seat.assert_exact()


@pytest.mark.parametrize("responses", [False, True])
@whole_and_streamed
def test_agents_loop_until_no_tool_call(house: SdkHouse, streamed: bool, responses: bool) -> None:
    with house.seat(PRODUCTS, PRODUCTS, MULTIPLIED) as seat:
        model = seat.langchain(use_responses_api=responses, streaming=streamed)
        agent = create_agent(model, [multiply], system_prompt="Be brief.")
        asked: Any = {"messages": [HumanMessage(QUESTION)]}
        said_last = asyncio.run(agent.ainvoke(asked))["messages"][-1]
        assert said_last.text.endswith("They are 36 and 24.")
        assert len(seat.calls) == 3
        seat.assert_exact(sequences=1)


# smolagents' agents


QUIET: Any = {"max_steps": 4, "verbosity_level": LogLevel.OFF}


@tool
def calculate(expression: str) -> str:
    """Works it out.

    Args:
        expression: a product.
    """
    first, second = expression.split("*")
    return str(int(first) * int(second))


@whole_and_streamed
def test_an_agent_calls_tools_at_once_and_in_sequence(house: SdkHouse, streamed: bool) -> None:
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
        # It tells its calls as text afterwards, and the results in a user's words.
        seat.assert_exact(sequences=2)
