"""Anthropic's messages API, as Anthropic's own client and its types see it."""

from __future__ import annotations

from typing import Any

import anthropic
import orjson
import pytest
from anthropic.types import Message
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel
from support.dialects import (
    Desk,
    call,
    chat_answer,
    chat_answers,
    mangled,
    message_of,
    texts,
)

from envserver.errors import EngineTimeout, EngineUnavailable, InputError, NotFoundError
from envserver.proxy.dialects.messages import MessagesApi
from envserver.tokens.edits import classify

API = MessagesApi()
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL = {"name": "add", "description": "Adds.", "input_schema": SCHEMA}
CHAT_TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": SCHEMA, "description": "Adds."},
}
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


def read(memory: dict[str, Any] | None = None, **request: Any) -> Any:
    request = {"model": "any", "max_tokens": 50, "messages": [HI], **request}
    return API.read(request, {} if memory is None else memory)


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


@settings(deadline=None, max_examples=60)
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


@settings(deadline=None, max_examples=100)
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
    _, message, _ = read(desk.memory, messages=[HI, turn, HI]).messages
    written = [made["function"]["arguments"] for made in message["tool_calls"]]
    assert written == ['{"a":true}', '{"a":2.0 }']


@pytest.mark.parametrize(
    ("turns", "messages"),
    [
        (  # results of tools stand before what else the user says
            [
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "Go on."},
                        {"type": "tool_result", "tool_use_id": "c1", "content": "1"},
                        {
                            "type": "tool_result",
                            "tool_use_id": "c2",
                            "content": [
                                {"type": "text", "text": "a"},
                                {"type": "image", "source": {"type": "url", "url": "http://i"}},
                                {"type": "text", "text": "b"},
                            ],
                        },
                        {"type": "tool_result", "tool_use_id": "c3"},
                    ],
                }
            ],
            [
                {"role": "tool", "tool_call_id": "c1", "content": "1"},
                {"role": "tool", "tool_call_id": "c2", "content": "a\nb"},
                {"role": "tool", "tool_call_id": "c3", "content": ""},
                {
                    "role": "user",
                    "content": [
                        {"type": "image_url", "image_url": {"url": "http://i"}},
                        {"type": "text", "text": "Go on."},
                    ],
                },
            ],
        ),
        (  # that a tool failed is said
            [
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": n, "is_error": True, "content": text}
                        for n, text in (("c1", "no file"), ("c2", "Error 7"), ("c3", []))
                    ],
                }
            ],
            [
                {"role": "tool", "tool_call_id": "c1", "content": "Error: no file"},
                {"role": "tool", "tool_call_id": "c2", "content": "Error 7"},
                {"role": "tool", "tool_call_id": "c3", "content": "Error:"},
            ],
        ),
        (
            [
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "image",
                            "source": {"type": "base64", "media_type": "image/png", "data": "eA=="},
                        },
                        {
                            "type": "document",
                            "title": "T",
                            "context": "C",
                            "source": {"type": "text", "media_type": "text/plain", "data": "D"},
                        },
                        {
                            "type": "text",
                            "text": "What?",
                            "cache_control": {"type": "ephemeral"},
                        },
                    ],
                },
                {"role": "system", "content": "Be brief."},
            ],
            [
                {
                    "role": "user",
                    "content": [
                        {"type": "image_url", "image_url": {"url": "data:image/png;base64,eA=="}},
                        {"type": "text", "text": "T\nC\nD"},
                        {"type": "text", "text": "What?"},
                    ],
                },
                {"role": "system", "content": "Be brief."},
            ],
        ),
        (  # what is encrypted can only be left out; an empty turn at the end says nothing
            [
                HI,
                {
                    "role": "assistant",
                    "content": [
                        {"type": "redacted_thinking", "data": "x"},
                        {"type": "text", "text": "a"},
                        {"type": "text", "text": "b"},
                    ],
                },
                HI,
                {"role": "assistant", "content": []},
            ],
            [HI, {"role": "assistant", "content": "ab"}, HI],
        ),
    ],
)
def test_turns_are_chat_messages(turns: list[Any], messages: list[Any]) -> None:
    assert read(messages=turns).messages == messages


def test_system_blocks_are_one_text_without_what_is_for_the_bill() -> None:
    blocks = [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=12ab;"},
        {"type": "text", "text": "You are", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": " terse."},
    ]
    for system in (blocks, "You are terse."):
        first, _ = read(system=system).messages
        assert first == {"role": "system", "content": "You are terse."}


def test_the_model_goes_on_with_what_the_assistant_said_last() -> None:
    ask = read(messages=[HI, {"role": "assistant", "content": "The answer is ("}])
    assert ask.messages[-1] == {"role": "assistant", "content": "The answer is ("}
    assert ask.fields == {"continue_final_message": True, "add_generation_prompt": False}


# Requests


def test_the_engine_is_sent_what_the_agent_asked_for() -> None:
    ask = read(
        tools=[{**TOOL, "type": "custom", "cache_control": {"type": "ephemeral"}}],
        tool_choice={"type": "tool", "name": "add", "disable_parallel_tool_use": True},
        stop_sequences=["END"],
        temperature=0.3,
        top_p=0.9,
        top_k=5,
        output_config={"effort": "low"},
        metadata={"user_id": "me"},
        service_tier="auto",
        stream=True,
    )
    assert ask.tools == [CHAT_TOOL]
    assert ask.wanted_tokens == 50
    assert ask.fields == {
        "temperature": 0.3,
        "top_p": 0.9,
        "top_k": 5,
        "stop": ["END"],
        "tool_choice": {"type": "function", "function": {"name": "add"}},
        "parallel_tool_calls": False,
        "reasoning_effort": "low",
    }
    assert (ask.choices, ask.stream, ask.wants_logprobs) == (1, True, False)


@pytest.mark.parametrize(
    ("choice", "told"), [("auto", "auto"), ("any", "required"), ("none", "none")]
)
def test_the_choice_of_tools_has_other_words(choice: str, told: str) -> None:
    assert read(tools=[TOOL], tool_choice={"type": choice}).fields == {"tool_choice": told}


@pytest.mark.parametrize(
    ("thinking", "shown", "variables"),
    [
        (None, False, None),
        ({"type": "disabled"}, False, {"enable_thinking": False}),
        (THINK, True, {"enable_thinking": True}),
        ({"type": "adaptive"}, True, {"enable_thinking": True}),
        ({"type": "adaptive", "display": "omitted"}, False, {"enable_thinking": True}),
    ],
)
def test_thoughts_are_shown_to_whom_asks(
    thinking: Any, shown: bool, variables: dict[str, Any] | None
) -> None:
    ask = read(thinking=thinking)
    assert ask.wants_reasoning == shown
    assert ask.fields.get("chat_template_kwargs") == variables


def test_the_agents_own_template_variables_come_first() -> None:
    ask = read(thinking=THINK, chat_template_kwargs={"enable_thinking": False, "x": 1})
    assert ask.fields["chat_template_kwargs"] == {"enable_thinking": False, "x": 1}


TOOL_USE = {"type": "tool_use", "id": "c", "name": "add", "input": {}}


@pytest.mark.parametrize(
    ("request_", "complaint"),
    [
        ({"max_tokens": None}, "max_tokens is missing"),
        ({"max_tokens": 0}, "max_tokens must be"),
        ({"messages": []}, "messages must be"),
        ({"messages": [{"role": "system", "content": ""}]}, "messages must say something"),
        ({"messages": [{"role": "user", "content": []}]}, r"messages\[0\]\.content must not be"),
        ({"messages": [{"role": "tool", "content": "x"}]}, r"messages\[0\]\.role cannot be 'tool'"),
        (
            {"messages": [{"role": "user", "content": [{"type": "container_upload"}]}]},
            r"messages\[0\]\.content\[0\]\.type 'container_upload'",
        ),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "document", "source": {"type": "base64", "data": "x"}}
                        ],
                    }
                ]
            },
            "'base64' is not possible here: only text is",
        ),
        ({"messages": [HI, {"role": "assistant", "content": "So "}]}, "end with whitespace"),
        ({"messages": [HI, {"role": "assistant", "content": [TOOL_USE]}]}, "have no results"),
        (
            {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
            r"tools\[0\]\.type 'web_search_20250305' is not possible",
        ),
        ({"tool_choice": {"type": "any"}}, "tool_choice needs tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "x"}}, "'x' is not among"),
        ({"thinking": {"type": "hard"}}, "thinking.type cannot be 'hard'"),
        ({"stop_sequences": "END"}, "stop_sequences must be"),
        ({"output_config": {"format": {"type": "xml"}}}, "must be a json_schema"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers is not possible"),
        ({"n": 2}, "n must be 1"),
        ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens is not possible"),
    ],
)
def test_what_is_not_possible_is_refused_by_name(request_: dict[str, Any], complaint: str) -> None:
    with pytest.raises(InputError, match=complaint):
        read(**request_)


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


FULL: dict[str, Any] = {
    "model": "any",
    "max_tokens": 5,
    "system": [{"type": "text", "text": "Be brief."}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "t", "signature": ""},
                {"type": "text", "text": "x"},
                {"type": "tool_use", "id": "c", "name": "add", "input": {"a": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "c",
                    "content": [{"type": "text", "text": "1"}],
                    "is_error": False,
                },
                {"type": "document", "source": {"type": "content", "content": [HI]}},
                {"type": "image", "source": {"type": "url", "url": "u"}},
            ],
        },
        {"role": "assistant", "content": "So"},
    ],
    "tools": [TOOL],
    "tool_choice": {"type": "tool", "name": "add"},
    "thinking": THINK,
    "output_config": {"format": {"type": "json_schema", "schema": {}}, "effort": "low"},
    "stop_sequences": ["x"],
    "stream": False,
    "chat_template_kwargs": {},
}


@settings(deadline=None, max_examples=300)
@given(request=mangled(FULL))
def test_whatever_is_sent_is_read_or_refused(request: dict[str, Any]) -> None:
    try:
        ask = API.read(request, {})
    except InputError as error:
        assert error.detail["place"]
    else:
        orjson.dumps(API.whole(ask, chat_answer("a"), {}))


def _floats(value: Any) -> Any:
    """`value` with numbers as whole answers hold them: JSON's, without what is beyond 64 bits."""
    if isinstance(value, dict):
        return {key: _floats(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_floats(inner) for inner in value]
    return float(value) if type(value) is int else value
