"""OpenAI's own client, end to end: every way in which it can ask, whole and streamed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from openai.types.chat import ChatCompletion
from openai.types.responses import Response
from pydantic import BaseModel
from support.sdk_house import OURS, SdkHouse, Seat, sim_house
from support.sim import QUESTION, TOKENIZER, call, said, tool, user

TOOLS = [tool("calculate", expression={"type": "string"})]
CALLS = said(
    "Two sums.",
    call("calculate", {"expression": "1 + 1"}),
    call("calculate", {"expression": "2 + 2"}),
)
DONE = said("They are 2 and 4.")
JSON = said('{"answer": 36, "unit": "pencils"}')
RESPONSE_TOOLS = [{"type": "function", **TOOLS[0]["function"], "strict": True}]


class Answer(BaseModel):
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


@pytest.mark.parametrize("streamed", [False, True])
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
        seat.assert_exact()
        assert len(seat.sequences) == 1
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


@pytest.mark.parametrize("streamed", [False, True])
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
        seat.assert_exact()
        assert len(seat.sequences) == 6


@pytest.mark.parametrize("streamed", [False, True])
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


@pytest.mark.parametrize("streamed", [False, True])
def test_an_answer_in_a_schema_is_parsed(house: SdkHouse, streamed: bool) -> None:
    with house.seat(JSON) as seat:
        if streamed:
            parsed = chat(seat, True, response_format=Answer)
        else:
            parsed = seat.openai.chat.completions.parse(
                model=seat.model, messages=user(), response_format=Answer
            )
        assert parsed.choices[0].message.parsed == Answer(answer=36, unit="pencils")
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


@pytest.mark.parametrize("streamed", [False, True])
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
        seat.assert_exact()
        assert len(seat.sequences) == 1
        assert {c.dialect for c in seat.calls} == {"responses"}


@pytest.mark.parametrize("streamed", [False, True])
def test_a_response_in_a_schema_is_parsed(house: SdkHouse, streamed: bool) -> None:
    with house.seat(JSON) as seat:
        if streamed:
            parsed = respond(seat, True, input=QUESTION, text_format=Answer)
        else:
            parsed = seat.openai.responses.parse(model="sim", input=QUESTION, text_format=Answer)
        assert parsed.output_parsed == Answer(answer=36, unit="pencils")


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


@pytest.mark.parametrize("streamed", [False, True])
def test_logprobs_of_a_response_are_those_that_are_recorded(
    house: SdkHouse, streamed: bool
) -> None:
    with house.seat(DONE) as seat:
        asked: Any = {"input": QUESTION, "include": ["message.output_text.logprobs"]}
        answer = respond(seat, streamed, top_logprobs=2, **asked)
        told = [entry.logprob for entry in answer.output[0].content[0].logprobs]
        assert np.float32(told).tolist() == seat.calls[0].logprobs.tolist()


# What is told


@pytest.mark.parametrize("streamed", [False, True])
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


@pytest.mark.parametrize("streamed", [False, True])
def test_apis_without_a_place_for_ids_tell_none_even_if_asked(
    house: SdkHouse, streamed: bool
) -> None:
    with house.seat(DONE) as seat:
        asked: Any = {"model": "sim", "stream": streamed, "extra_body": {"return_token_ids": True}}
        list(seat.openai.responses.create(input=QUESTION, **asked))
        list(seat.anthropic.messages.create(messages=user(), max_tokens=50, **asked))
        assert len(seat.exchanges) == 2
        assert not any(one.fields() & {*OURS, "logprobs"} for one in seat.exchanges)
