"""Anthropic's messages API, checked with Anthropic's own client and types."""

from __future__ import annotations

from typing import Any

import anthropic
import orjson
import pytest
from anthropic.types import Message
from envserver_records.errors import EngineTimeout, EngineUnavailable, InputError, NotFoundError
from hypothesis import given, settings
from hypothesis import strategies as st
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

from envserver.proxy import MessagesDialect
from envserver.tokens import classify

API = MessagesDialect()
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL = {"name": "add", "description": "Adds.", "input_schema": SCHEMA}
HI = {"role": "user", "content": "hi"}
THINK = {"type": "enabled", "budget_tokens": 1024}
CALLS = [call("call_1", "add", '{"a": 1}'), call("call_2", "add", '{"a":2.0 }')]


def client(desk: Desk) -> anthropic.Anthropic:
    """One that checks every answer and every event against its types."""
    return anthropic.Anthropic(
        base_url="http://desk",
        api_key="any",
        http_client=desk.http,
        max_retries=0,
        _strict_response_validation=True,
    )


def create(desk: Desk, streamed: bool = False, **asked: Any) -> Message:
    """The message, whole or put together from a stream by the client."""
    asked = {"model": "any", "max_tokens": 50, "messages": [HI], **asked}
    if not streamed:
        return client(desk).messages.create(**asked)
    with client(desk).messages.stream(**asked) as stream:
        return stream.get_final_message()


# Answers


@pytest.mark.parametrize("streamed", [False, True])
def test_thoughts_text_and_calls_are_blocks_of_their_own(streamed: bool) -> None:
    desk = Desk(API, chat_answer("Wait, é", reasoning="Hm.", calls=CALLS))
    message = create(desk, streamed, tools=[TOOL], max_tokens=2000, thinking=THINK)
    thinking, text, *calls = message.content
    assert (thinking.type, thinking.thinking, thinking.signature) == ("thinking", "Hm.", "")
    assert (text.type, text.text) == ("text", "Wait, é")
    assert [(c.type, c.id, c.name, c.input) for c in calls] == [
        ("tool_use", "call_1", "add", {"a": 1}),
        ("tool_use", "call_2", "add", {"a": 2.0}),
    ]
    assert message.id.startswith("msg_")
    assert (message.model, message.role, message.stop_reason) == ("tiny", "assistant", "tool_use")
    assert (message.usage.input_tokens, message.usage.output_tokens) == (11, 7)
    assert message.usage.cache_read_input_tokens == 0


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("finish", "stop", "calls", "reason"),
    [
        ("stop", None, [], "end_turn"),
        ("stop", "</code>", [], "stop_sequence"),
        ("stop", None, CALLS, "tool_use"),
        ("stop", "</code>", CALLS, "tool_use"),
        ("tool_calls", None, CALLS, "tool_use"),
        ("length", None, [], "max_tokens"),
        ("length", None, CALLS, "max_tokens"),
        ("content_filter", None, [], "refusal"),
        ("abort", None, [], "max_tokens"),
    ],
)
def test_why_a_model_stopped_is_told(
    finish: str, stop: str | None, calls: list[Any], reason: str, streamed: bool
) -> None:
    desk = Desk(API, chat_answer("Well", finish=finish, stop=stop, calls=calls))
    message = create(desk, streamed, stop_sequences=["</code>"])
    assert desk.ask.fields["stop"] == ["</code>"]
    assert message.stop_reason == reason
    assert message.stop_sequence == (stop if reason == "stop_sequence" else None)


@pytest.mark.parametrize("streamed", [False, True])
def test_arguments_that_are_no_object_stand_in_one(streamed: bool) -> None:
    desk = Desk(API, chat_answer("", calls=[call("c1", "add", "[1, 2"), call("c2", "add", "")]))
    first, second = create(desk, streamed).content
    assert (first.input, second.input) == ({"arguments": "[1, 2"}, {})


def test_thoughts_that_an_engine_tells_under_two_names_are_told_once() -> None:
    answer = chat_answer("Hi", reasoning="Hm.")
    message_of(answer)["reasoning_content"] = "Hm."
    thinking, _ = create(Desk(API, answer)).content
    assert thinking.thinking == "Hm."


# Streams


def test_a_stream_tells_each_block_from_its_beginning_to_its_end() -> None:
    desk = Desk(API, chat_answer("Héllo", reasoning="Hm", calls=CALLS[:1]), piece=4)
    asked: Any = {"model": "any", "max_tokens": 50, "messages": [HI]}
    with client(desk).messages.with_streaming_response.create(**asked, stream=True) as response:
        told = [line for line in response.iter_lines() if line.startswith("data: ")]
    events = [orjson.loads(line.removeprefix("data: ")) for line in told]
    assert [(e["type"], e.get("index"), e.get("delta", {}).get("type")) for e in events] == [
        ("message_start", None, None),
        ("ping", None, None),
        ("content_block_start", 0, None),
        ("content_block_delta", 0, "thinking_delta"),
        ("content_block_delta", 0, "signature_delta"),
        ("content_block_stop", 0, None),
        ("content_block_start", 1, None),
        ("content_block_delta", 1, "text_delta"),
        ("content_block_delta", 1, "text_delta"),
        ("content_block_stop", 1, None),
        ("content_block_start", 2, None),
        ("content_block_delta", 2, "input_json_delta"),
        ("content_block_stop", 2, None),
        ("message_delta", None, None),
        ("message_stop", None, None),
    ]
    assert events[0]["message"]["stop_reason"] is None
    assert events[-2]["usage"]["output_tokens"] == 7


@settings(deadline=None, max_examples=examples(60))
@given(answer=chat_answers(), piece=st.integers(1, 5))
def test_the_clients_stream_adds_up_to_the_whole_answer(answer: dict[str, Any], piece: int) -> None:
    desk = Desk(API, answer, answer, piece=piece)
    whole = create(desk).model_dump(exclude={"id"})
    streamed = create(desk, streamed=True).model_dump(exclude={"id"})
    for block in streamed["content"]:
        block.pop("parsed_output", None)
    assert _floats(streamed) == _floats(whole)


def test_a_stream_that_breaks_raises_in_the_client() -> None:
    desk = Desk(API, chat_answer("Hello"))
    desk.broken = EngineUnavailable("No replica answers.")
    with pytest.raises(anthropic.APIStatusError) as caught:
        create(desk, streamed=True)
    assert caught.value.type == "overloaded_error"
    assert caught.value.api_message == "No replica answers."


def test_parsed_output_comes_from_a_schema_that_the_engine_is_sent() -> None:
    class Sum(BaseModel):
        total: int

    desk = Desk(API, chat_answer('{"total": 3}'))
    message = client(desk).messages.parse(
        model="any", max_tokens=50, messages=[HI], output_format=Sum
    )
    assert message.parsed_output == Sum(total=3)
    form = desk.ask.fields["response_format"]
    assert form["type"] == "json_schema"
    assert form["json_schema"]["schema"]["required"] == ["total"]


# Histories


@settings(deadline=None, max_examples=examples(100))
@given(answer=chat_answers(), streamed=st.booleans(), text=texts)
def test_an_answer_that_is_sent_back_is_the_message_that_it_was(
    answer: dict[str, Any], streamed: bool, text: str
) -> None:
    desk = Desk(API, answer, chat_answer("Bye"))
    message = create(desk, streamed, thinking=THINK, max_tokens=2000)
    turn = {"role": "assistant", "content": message.content}
    create(desk, messages=[HI, turn, {"role": "user", "content": [{"type": "text", "text": text}]}])
    first, back, last = desk.ask.messages
    assert (first, last["content"]) == (HI, text)
    assert classify(message_of(answer), back).change == "exact"
    assert back.get("tool_calls", []) == message_of(answer).get("tool_calls", [])
    assert back.get("reasoning", "") == message_of(answer).get("reasoning", "")


def test_arguments_that_an_agent_changed_are_its_own() -> None:
    desk = Desk(API, chat_answer("", calls=CALLS))
    content = create(desk).content
    blocks = [block.model_dump(exclude_none=True) for block in content]
    blocks[0]["input"]["a"] = True
    blocks[1]["input"]["a"] = 2  # as JavaScript writes 2.0
    turn = {"role": "assistant", "content": blocks}
    request = {"model": "any", "max_tokens": 50, "messages": [HI, turn, HI]}
    _, message, _ = API.read(request, desk.memory).messages
    written = [made["function"]["arguments"] for made in message["tool_calls"]]
    assert written == ['{"a":true}', '{"a":2.0 }']


# Errors


@pytest.mark.parametrize(
    ("error", "raised", "kind"),
    [
        (InputError("No."), anthropic.UnprocessableEntityError, "invalid_request_error"),
        (NotFoundError("No."), anthropic.NotFoundError, "not_found_error"),
        (EngineTimeout("No."), anthropic.GatewayTimeoutError, "timeout_error"),
    ],
)
def test_errors_have_the_shape_that_the_client_knows(
    error: Any, raised: type[anthropic.APIStatusError], kind: str
) -> None:
    with pytest.raises(raised) as caught:
        create(Desk(API, error))
    assert (caught.value.type, caught.value.api_message) == (kind, "No.")


@pytest.mark.parametrize("streamed", [False, True])
def test_a_client_that_has_the_server_keep_the_talk_goes_on_by_itself(streamed: bool) -> None:
    desk = Desk(API, chat_answer("One."), chat_answer("Two."))
    thread = client(desk).beta.messages.thread(
        model="any", max_tokens=50, unsupported_request_behavior="continue_unthreaded"
    )
    for words in ("And?", "And now?"):
        turn: Any = {"role": "user", "content": words}
        if streamed:
            with thread.stream(turn) as stream:
                stream.until_done()
        else:
            thread.send(turn)
    said = [message["content"] for message in desk.ask.messages]
    assert said == ["And?", "One.", "And now?"]


def _floats(value: Any) -> Any:
    """`value` with numbers as whole answers hold them: JSON's, without what is beyond 64 bits."""
    if isinstance(value, dict):
        return {key: _floats(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_floats(inner) for inner in value]
    return float(value) if type(value) is int else value
