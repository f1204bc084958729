"""Official clients and agent frameworks, end to end: all ways to ask, whole and streamed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import pytest
from anthropic import beta_tool
from anthropic.types import Message
from langchain.agents import create_agent
from langchain_core import tools as langchain_tools
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage
from langchain_core.runnables import Runnable
from openai.types.chat import ChatCompletion
from openai.types.responses import Response
from pydantic import BaseModel
from smolagents import CodeAgent, LogLevel, ToolCallingAgent, tool
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
    """The answer."""

    answer: int
    unit: str


@pytest.fixture(scope="module")
def house() -> Iterator[SdkHouse]:
    with sim_house() as house:
        yield house


def chat(seat: Seat, streamed: bool = False, **asked: Any) -> ChatCompletion:
    """The completion, whole or as the client's helper puts it together from a stream."""
    asked.setdefault("messages", user())
    if not streamed:
        return seat.openai.chat.completions.create(model=seat.model, **asked)
    with seat.openai.chat.completions.stream(model=seat.model, **asked) as stream:
        kinds = {event.type for event in stream}
        assert "chunk" in kinds
        return stream.get_final_completion()


def respond(seat: Seat, streamed: bool = False, **asked: Any) -> Response:
    if not streamed:
        return seat.openai.responses.create(model=seat.model, **asked)
    with seat.openai.responses.stream(model=seat.model, **asked) as stream:
        return stream.get_final_response()


# Chat


@whole_and_streamed
def test_parallel_tools_are_called_and_the_message_is_sent_back_as_it_came(
    house: SdkHouse, streamed: bool
) -> None:
    with house.seat(CALLS, DONE) as seat:
        messages: list[Any] = user()
        first = chat(seat, streamed, messages=messages, tools=TOOLS).choices[0]
        assert first.finish_reason == "tool_calls"
        assert first.message.content.endswith("Two sums.")
        made = first.message.tool_calls
        assert [c.function.name for c in made] == ["calculate", "calculate"]
        sums = [json.loads(c.function.arguments)["expression"] for c in made]
        assert sums == ["1 + 1", "2 + 2"]
        messages.append(first.message)
        for made_call, result in zip(made, ("2", "4"), strict=True):
            messages.append({"role": "tool", "tool_call_id": made_call.id, "content": result})
        last = chat(seat, streamed, messages=messages, tools=TOOLS).choices[0]
        assert last.finish_reason == "stop"
        assert last.message.content.endswith("They are 2 and 4.")
        seat.assert_exact(sequences=1)
        assert [c.streamed for c in seat.calls] == [streamed] * 2


@pytest.mark.parametrize(
    ("choice", "parallel", "called"),
    [
        ("auto", True, 2),
        ("auto", False, 1),
        ("none", True, 0),
        ("required", True, 2),
        ({"type": "function", "function": {"name": "calculate"}}, True, 2),
    ],
)
def test_tool_choice_and_parallel_tool_calls_are_obeyed(
    house: SdkHouse, choice: Any, parallel: bool, called: int
) -> None:
    with house.seat(CALLS) as seat:
        answer = chat(seat, tools=TOOLS, tool_choice=choice, parallel_tool_calls=parallel)
        assert len(answer.choices[0].message.tool_calls or []) == called
        forced = choice not in ("auto", "none")
        assert ("structured_output_masked" in seat.calls[0].flags) == forced


@whole_and_streamed
def test_each_of_several_choices_is_recorded_with_its_stop_string(
    house: SdkHouse, streamed: bool
) -> None:
    with house.seat(said("Once. STOP Never.")) as seat:
        answer = chat(seat, streamed, n=3, stop=["Nowhere", "STOP"], seed=7)
        assert [c.index for c in answer.choices] == [0, 1, 2]
        for choice, recorded in zip(answer.choices, seat.calls, strict=True):
            assert choice.finish_reason == "stop"
            assert choice.message.content.endswith("Once. ")
            assert recorded.message["content"] == choice.message.content
            assert recorded.stop_reason == "STOP"
            sampled = TOKENIZER.decode(recorded.completion_ids.tolist(), special=True)
            assert sampled == choice.message.content + "STOP"
        assert len({c.message.content for c in answer.choices}) > 1
        again = chat(seat, streamed, n=3, stop=["Nowhere", "STOP"], seed=7)
        assert [c.message.content for c in again.choices] == [
            c.message.content for c in answer.choices
        ]
        seat.assert_exact(sequences=6)


@whole_and_streamed
def test_logprobs_that_are_asked_for_are_those_that_are_recorded(
    house: SdkHouse, streamed: bool
) -> None:
    with house.seat(DONE) as seat:
        answer = chat(seat, streamed, logprobs=True, top_logprobs=2)
        told = answer.choices[0].logprobs.content
        assert np.float32([entry.logprob for entry in told]).tolist() == (
            seat.calls[0].logprobs.tolist()
        )
        assert all(1 <= len(entry.top_logprobs) <= 2 for entry in told)
        assert bytes(b for entry in told for b in entry.bytes).decode().startswith(
            answer.choices[0].message.content
        )  # fmt: skip
        asked: Any = {"input": QUESTION, "include": ["message.output_text.logprobs"]}
        response = respond(seat, streamed, top_logprobs=2, **asked)
        told = [entry.logprob for entry in response.output[0].content[0].logprobs]
        assert np.float32(told).tolist() == seat.calls[1].logprobs.tolist()


@whole_and_streamed
def test_an_answer_in_a_schema_is_parsed(house: SdkHouse, streamed: bool) -> None:
    with house.seat(JSON) as seat:
        response = seat.openai.responses.parse(model="sim", input=QUESTION, text_format=Answer)
        if streamed:
            response = respond(seat, True, input=QUESTION, text_format=Answer)
        assert response.output_parsed == Answer(**VALUE)
    with house.seat(JSON) as seat:
        if streamed:
            parsed = chat(seat, True, response_format=Answer)
        else:
            parsed = seat.openai.chat.completions.parse(
                model=seat.model, messages=user(), response_format=Answer
            )
        assert parsed.choices[0].message.parsed == Answer(**VALUE)
        form = {"name": "answer", "schema": Answer.model_json_schema(), "strict": True}
        raw = chat(seat, streamed, response_format={"type": "json_schema", "json_schema": form})
        assert Answer.model_validate_json(raw.choices[0].message.content)
        assert all("structured_output_masked" in c.flags for c in seat.calls)
        assert seat.calls[0].sampling["response_format"]["type"] == "json_schema"


def test_models_are_listed(house: SdkHouse) -> None:
    with house.seat() as seat:
        (model,) = seat.openai.models.list()
        assert model.id == seat.model


# Text completions


@pytest.mark.parametrize("prompt", ["One and two", TOKENIZER.encode("One and two")])
def test_a_text_completion_goes_on_from_a_text_or_from_ids(house: SdkHouse, prompt: Any) -> None:
    ids = TOKENIZER.encode("One and two")
    asked: dict[str, Any] = {"model": "sim", "prompt": prompt, "max_tokens": 6, "seed": 1}
    with house.seat(said("make three in all, if you count right.")) as seat:
        whole = seat.openai.completions.create(**asked, logprobs=1).choices[0]
        assert whole.finish_reason == "length"
        assert np.float32(whole.logprobs.token_logprobs).tolist() == (
            seat.calls[0].logprobs.tolist()
        )
        stream = seat.lenient_openai.completions.create(**asked, stream=True)
        chunks = [chunk.choices[0] for chunk in stream]
        assert "".join(chunk.text for chunk in chunks) == whole.text
        assert chunks[-1].finish_reason == "length"
        assert len(chunks) > 2
        seat.assert_exact()
        for recorded in seat.calls:
            assert recorded.dialect == "completions"
            assert recorded.prompt_ids.tolist() == ids
            sampled = recorded.completion_ids.tolist()
            assert TOKENIZER.decode(sampled, special=False) == whole.text


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
def test_a_response_calls_tools_and_is_gone_on_from(
    house: SdkHouse, streamed: bool, by_id: bool
) -> None:
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


def test_events_of_a_response_stream_come_in_order_and_say_what_is_recorded(
    house: SdkHouse,
) -> None:
    with house.seat(CALLS) as seat:
        events = list(
            seat.openai.responses.create(
                model="sim", input=QUESTION, tools=RESPONSE_TOOLS, stream=True
            )
        )
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert events[0].type == "response.created"
        assert events[-1].type == "response.completed"
        text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
        arguments = [
            e.arguments for e in events if e.type == "response.function_call_arguments.done"
        ]
        recorded = seat.calls[0].message
        assert text == recorded["content"]
        assert arguments == [c["function"]["arguments"] for c in recorded["tool_calls"]]


# What is told


@whole_and_streamed
def test_ids_are_told_to_those_who_ask_for_them_and_to_nobody_else(
    house: SdkHouse, streamed: bool
) -> None:
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


@whole_and_streamed
def test_apis_without_a_place_for_ids_tell_none_even_if_asked(
    house: SdkHouse, streamed: bool
) -> None:
    with house.seat(DONE) as seat:
        asked: Any = {"model": "sim", "stream": streamed, "extra_body": {"return_token_ids": True}}
        list(seat.openai.responses.create(input=QUESTION, **asked))
        list(seat.anthropic.messages.create(messages=user(), max_tokens=50, **asked))
        assert len(seat.exchanges) == 2
        assert not any(one.fields() & {*OURS, "logprobs"} for one in seat.exchanges)


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
def test_a_talk_is_one_sequence(house: SdkHouse, streamed: bool) -> None:
    with house.seat(said("First."), said("Second."), said("Third.")) as seat:
        messages: list[Any] = user()
        for words in ("First.", "Second.", "Third."):
            answer = message_of(seat, streamed, messages=messages, system="Be brief.")
            assert answer.content[0].text.endswith(words)
            assert answer.stop_reason == "end_turn"
            assert answer.usage.output_tokens == len(seat.calls[-1].completion_ids)
            messages += [
                {"role": "assistant", "content": answer.content},
                {"role": "user", "content": "And then?"},
            ]
        seat.assert_exact(sequences=1)
        assert {c.dialect for c in seat.calls} == {"messages"}


@whole_and_streamed
def test_tools_are_called_and_their_results_told(house: SdkHouse, streamed: bool) -> None:
    with house.seat(CALLS, DONE) as seat:
        messages: list[Any] = user()
        first = message_of(seat, streamed, messages=messages, tools=[TOOL])
        assert first.stop_reason == "tool_use"
        assert [b.input for b in first.content if b.type == "tool_use"] == [
            {"expression": "1 + 1"},
            {"expression": "2 + 2"},
        ]
        messages += [{"role": "assistant", "content": first.content}, results(first, "2", "4")]
        last = message_of(seat, streamed, messages=messages, tools=[TOOL])
        assert last.content[0].text.endswith("They are 2 and 4.")
        seat.assert_exact(sequences=1)


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
        last = message_of(seat, streamed, messages=messages, **asked)
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
        answer = message_of(seat, tools=[TOOL], tool_choice=choice)
        assert sum(block.type == "tool_use" for block in answer.content) == called


@whole_and_streamed
def test_a_stop_sequence_and_a_limit_end_an_answer(house: SdkHouse, streamed: bool) -> None:
    with house.seat(said("Once. STOP Never.")) as seat:
        stopped = message_of(seat, streamed, stop_sequences=["STOP"])
        assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "STOP")
        assert stopped.content[0].text.endswith("Once. ")
        cut = message_of(seat, streamed, max_tokens=3)
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


def answer_of(model: Runnable[Any, Any], messages: list[BaseMessage], streamed: bool) -> AIMessage:
    """The answer, whole or added up from what a stream gives."""
    if not streamed:
        return model.invoke(messages)
    first, *others = model.stream(messages)
    return sum(others, first)


@pytest.mark.parametrize("responses", [False, True])
@whole_and_streamed
def test_bound_tools_are_called_and_their_messages_sent_back(
    house: SdkHouse, streamed: bool, responses: bool
) -> None:
    with house.seat(PRODUCTS, MULTIPLIED) as seat:
        model = seat.langchain(use_responses_api=responses, stream_usage=True)
        model = model.bind_tools([multiply])
        messages: list[BaseMessage] = [HumanMessage(QUESTION)]
        first = answer_of(model, messages, streamed)
        assert [c["args"] for c in first.tool_calls] == [
            {"first": 3, "second": 12},
            {"first": 2, "second": 12},
        ]
        assert first.text.endswith("Two products.")
        messages += [first, *(multiply.invoke(c) for c in first.tool_calls)]
        last = answer_of(model, messages, streamed)
        assert last.text.endswith("They are 36 and 24.")
        sampled = [len(c.completion_ids) for c in seat.calls]
        assert [m.usage_metadata["output_tokens"] for m in (first, last)] == sampled
        results = [m["content"] for m in seat.calls[1].messages if m["role"] == "tool"]
        assert results == ["36", "24"]
        seat.assert_exact(sequences=1)
        assert {c.dialect for c in seat.calls} == {"responses" if responses else "chat"}


def test_words_come_as_they_are_sampled(house: SdkHouse) -> None:
    with house.seat(MULTIPLIED) as seat:
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
def test_an_agent_loops_until_no_tool_is_called(
    house: SdkHouse, streamed: bool, responses: bool
) -> None:
    with house.seat(PRODUCTS, PRODUCTS, MULTIPLIED) as seat:
        model = seat.langchain(use_responses_api=responses, streaming=streamed)
        agent = create_agent(model, [multiply], system_prompt="Be brief.")
        asked: Any = {"messages": [HumanMessage(QUESTION)]}
        said_last = asyncio.run(agent.ainvoke(asked))["messages"][-1]
        assert said_last.text.endswith("They are 36 and 24.")
        assert len(seat.calls) == 3
        seat.assert_exact(sequences=1)


def test_an_agent_ends_with_an_answer_in_a_schema(house: SdkHouse) -> None:
    with house.seat(PRODUCTS, said(None, call("Answer", VALUE))) as seat:
        agent = create_agent(seat.langchain(), [multiply], response_format=Answer)
        ended = agent.invoke({"messages": [HumanMessage(QUESTION)]})
        assert ended["structured_response"] == Answer(**VALUE)
        seat.assert_exact()


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
        seat.assert_exact(sequences=1)


@whole_and_streamed
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
        # It tells its calls as text afterwards, and the results in a user's words.
        seat.assert_exact(sequences=2)


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
