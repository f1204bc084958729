"""OpenAI's responses API, checked with OpenAI's own client and types."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from envserver_records.errors import EngineTimeout, InputError
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import Response
from pydantic import BaseModel
from support.dialects import (
    Desk,
    call,
    chat_answer,
    chat_answers,
    message_of,
    texts,
)
from support.extent import examples

from envserver.proxy import ResponsesDialect
from envserver.tokens import classify

API = ResponsesDialect()
TOOL = {
    "type": "function",
    "name": "add",
    "description": "Adds.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    "strict": None,
}
CALLS = [call("call_1", "add", '{"a": 1}'), call("call_2", "add", '{"a":2 }')]
LOGPROBS = [
    {"token": t, "logprob": -0.5, "bytes": None, "top_logprobs": [{"token": "x", "logprob": -1.0}]}
    for t in ("Hi", "é", "<end>")
]


def client(desk: Desk) -> openai.OpenAI:
    """One that checks every answer and every event against its types."""
    return openai.OpenAI(
        base_url="http://desk/v1",
        api_key="any",
        http_client=desk.http,
        max_retries=0,
        _strict_response_validation=True,
    )


def create(desk: Desk, streamed: bool = False, **asked: Any) -> Response:
    """The response, whole or as the last event of a stream holds it."""
    asked.setdefault("input", "hi")
    asked.setdefault("model", "any")
    if not streamed:
        return client(desk).responses.create(**asked)
    *_, last = client(desk).responses.create(**asked, stream=True)
    return last.response


def read(memory: dict[str, Any] | None = None, **request: Any) -> Any:
    return API.read({"model": "any", "input": "hi", **request}, {} if memory is None else memory)


# Answers


@pytest.mark.parametrize("streamed", [False, True])
def test_reasoning_text_and_calls_are_items_of_their_own(streamed: bool) -> None:
    desk = Desk(API, chat_answer("Wait, é", reasoning="Hm.", calls=CALLS))
    response = create(desk, streamed, tools=[TOOL], metadata={"a": "b"}, max_output_tokens=50)
    reasoning, message, *calls = response.output
    assert reasoning.content[0].text == "Hm."
    assert (message.role, message.content[0].text) == ("assistant", "Wait, é")
    assert [(c.call_id, c.name, c.arguments) for c in calls] == [
        ("call_1", "add", '{"a": 1}'),
        ("call_2", "add", '{"a":2 }'),
    ]
    assert {item.status for item in response.output} == {"completed"}
    assert (response.status, response.incomplete_details) == ("completed", None)
    assert (response.model, response.created_at) == ("tiny", 1_700_000_000)
    assert response.metadata == {"a": "b"}
    assert response.max_output_tokens == 50
    usage = response.usage
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (11, 7, 18)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("finish", "status", "reason"),
    [
        ("stop", "completed", None),
        ("length", "incomplete", "max_output_tokens"),
        ("content_filter", "incomplete", "content_filter"),
        ("abort", "incomplete", None),
    ],
)
def test_an_answer_that_was_cut_off_is_incomplete(
    finish: str, status: str, reason: str | None, streamed: bool
) -> None:
    response = create(Desk(API, chat_answer("Well", finish=finish)), streamed)
    assert (response.status, response.output[-1].status) == (status, status)
    details = response.incomplete_details
    assert (details and details.reason) == reason


@pytest.mark.parametrize("streamed", [False, True])
def test_an_empty_answer_is_an_empty_message(streamed: bool) -> None:
    response = create(Desk(API, chat_answer("")), streamed)
    assert [item.type for item in response.output] == ["message"]
    assert response.output_text == ""


@pytest.mark.parametrize("streamed", [False, True])
def test_logprobs_are_told_to_whom_asks(streamed: bool) -> None:
    desk = Desk(API, chat_answer("Hié", logprobs=LOGPROBS), piece=2)
    response = create(desk, streamed, include=["message.output_text.logprobs"], top_logprobs=1)
    assert desk.ask.wants_logprobs
    assert desk.ask.fields["top_logprobs"] == 1
    told = response.output[0].content[0].logprobs
    assert [(entry.token, entry.logprob) for entry in told] == [
        ("Hi", -0.5),
        ("é", -0.5),
        ("<end>", -0.5),
    ]
    assert told[1].bytes == list("é".encode())
    assert told[1].top_logprobs[0].token == "x"


# Streams


def test_a_stream_tells_each_item_from_its_beginning_to_its_end() -> None:
    answer = chat_answer("Héllo", reasoning="Hm", calls=CALLS[:1])
    desk = Desk(API, answer, piece=4)
    events = list(client(desk).responses.create(model="any", input="hi", stream=True))
    assert [event.type.removeprefix("response.") for event in events] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert done == events[-1].response.output
    added = [event for event in events if event.type == "response.output_item.added"]
    assert [event.output_index for event in added] == [0, 1, 2]
    assert [event.item.id for event in added] == [item.id for item in done]


@settings(deadline=None, max_examples=examples(60))
@given(answer=chat_answers(), piece=st.integers(1, 5))
def test_the_clients_stream_adds_up_to_the_whole_answer(answer: dict[str, Any], piece: int) -> None:
    desk = Desk(API, answer, answer, piece=piece)
    whole = create(desk)
    with client(desk).responses.stream(model="any", input="hi") as stream:
        streamed = stream.get_final_response()
    assert _without_ids(streamed) == _without_ids(whole)


def test_the_clients_own_stream_helper_follows_text_and_arguments() -> None:
    desk = Desk(API, chat_answer("Héllo", calls=CALLS[:1]), piece=1)
    with client(desk).responses.stream(model="any", input="hi", tools=[TOOL]) as stream:
        events = list(stream)
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert deltas[-1].snapshot == "Héllo"
    (arguments,) = [e for e in events if e.type == "response.function_call_arguments.delta"]
    assert arguments.snapshot == '{"a": 1}'


def test_a_stream_that_breaks_ends_with_a_failed_response() -> None:
    desk = Desk(API, chat_answer("Hello"))
    desk.broken = EngineTimeout("The engine did not answer in time.")
    *_, item, last = client(desk).responses.create(model="any", input="hi", stream=True)
    assert (item.type, item.item.status) == ("response.output_item.done", "incomplete")
    assert (last.type, last.response.status) == ("response.failed", "failed")
    assert last.response.error.message == "The engine did not answer in time."
    assert last.response.error.code == "server_error"
    assert last.response.output[0].content[0].text == "Hello"
    assert not desk.memory


def test_a_stream_that_breaks_before_anything_was_said_is_told_all_the_same() -> None:
    writer = API.writer(read(stream=True), {})
    events = writer.begin() + writer.fail(EngineTimeout("Too slow."))
    kinds = [line for line in events.split(b"\n") if line.startswith(b"event: ")]
    assert [kind.rpartition(b".")[2] for kind in kinds] == [b"created", b"in_progress", b"failed"]


def test_parsed_output_comes_from_a_schema_that_the_engine_is_sent() -> None:
    class Sum(BaseModel):
        total: int

    desk = Desk(API, chat_answer('{"total": 3}'))
    response = client(desk).responses.parse(model="any", input="1+2", text_format=Sum)
    assert response.output_parsed == Sum(total=3)
    form = desk.ask.fields["response_format"]
    assert form["type"] == "json_schema"
    assert form["json_schema"]["name"] == "Sum"
    assert form["json_schema"]["strict"] is True
    assert form["json_schema"]["schema"]["required"] == ["total"]


# Histories


@settings(deadline=None, max_examples=examples(100))
@given(answer=chat_answers(), streamed=st.booleans(), text=texts)
def test_an_answer_that_is_sent_back_is_the_message_that_it_was(
    answer: dict[str, Any], streamed: bool, text: str
) -> None:
    desk = Desk(API, answer, chat_answer("Bye"), chat_answer("Bye"))
    response = create(desk, streamed)
    then = {"role": "user", "content": text}
    create(desk, input=[{"role": "user", "content": "hi"}, *response.output, then])
    create(desk, input=[then], previous_response_id=response.id)
    for history in desk.asks[1:]:
        first, back, last = history.messages
        assert (first["content"], last["content"]) == ("hi", text)
        assert classify(message_of(answer), back).change == "exact"
        assert back.get("reasoning", "") == message_of(answer).get("reasoning", "")
        assert back.get("tool_calls", []) == message_of(answer).get("tool_calls", [])


def test_a_conversation_goes_on_from_an_earlier_response_without_its_instructions() -> None:
    desk = Desk(API, chat_answer("", calls=CALLS), chat_answer("3"), chat_answer("Bye"))
    first = create(desk, instructions="Be brief.", tools=[TOOL])
    outputs = [
        {"type": "function_call_output", "call_id": f"call_{n}", "output": str(n)} for n in (1, 2)
    ]
    second = create(desk, input=outputs, previous_response_id=first.id, tools=[TOOL])
    create(desk, input="bye", previous_response_id=second.id, instructions="Be long.")
    assert desk.ask.messages == [
        {"role": "system", "content": "Be long."},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": CALLS},
        {"role": "tool", "tool_call_id": "call_1", "content": "1"},
        {"role": "tool", "tool_call_id": "call_2", "content": "2"},
        {"role": "assistant", "content": "3"},
        {"role": "user", "content": "bye"},
    ]
    # Two requests may go on from the same response.
    assert read(desk.memory, previous_response_id=first.id).messages[-2]["tool_calls"] == CALLS


def test_items_can_be_referred_to() -> None:
    desk = Desk(API, chat_answer("", calls=CALLS[:1]))
    (item,) = create(desk, tools=[TOOL]).output
    reference = {"type": "item_reference", "id": item.id}
    (message,) = read(desk.memory, input=[reference]).messages
    assert message["tool_calls"] == CALLS[:1]
    with pytest.raises(InputError, match=r"input\[0\]\.id does not name an item"):
        read(input=[reference])


@pytest.mark.parametrize("streamed", [False, True])
def test_nothing_is_kept_of_what_is_not_to_be_stored(streamed: bool) -> None:
    desk = Desk(API, chat_answer("Hi"))
    response = create(desk, streamed, store=False)
    with pytest.raises(openai.UnprocessableEntityError, match="previous_response_id does not name"):
        create(desk, previous_response_id=response.id)


def test_a_refusal_reaches_the_client_as_an_error_of_its_own() -> None:
    with pytest.raises(openai.UnprocessableEntityError) as caught:
        create(Desk(API), truncation="auto")
    assert caught.value.code == "input"
    assert "truncation must be disabled" in caught.value.message


def _without_ids(response: Response) -> Any:
    told = response.model_dump(exclude_none=True)
    for item in told["output"]:
        del item["id"]
        item.pop("parsed_arguments", None)
    return {k: v for k, v in told.items() if k not in ("id", "completed_at")}
