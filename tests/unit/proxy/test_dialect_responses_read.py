"""How requests of OpenAI's responses API are parsed, and which are refused."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from envserver_records.errors import InputError
from hypothesis import given, settings
from support.dialects import call, chat_answer, mangled
from support.extent import examples

from envserver.proxy import ResponsesDialect
from envserver.proxy.admission import read_request

IMAGE = "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAf"

API = ResponsesDialect()
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL = {
    "type": "function",
    "name": "add",
    "description": "Adds.",
    "parameters": SCHEMA,
    "strict": None,
}
CHAT_TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "Adds.", "parameters": SCHEMA},
}


def read(**request: Any) -> Any:
    return read_request(API, {"model": "any", "input": "hi", **request}, {})


# Histories


@pytest.mark.parametrize(
    ("items", "messages"),
    [
        (
            [
                {"role": "developer", "content": "Be brief."},
                {
                    "type": "message",
                    "role": "user",
                    "content": [{"type": "input_text", "text": "What is it?"}],
                },
            ],
            [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "What is it?"},
            ],
        ),
        (
            [
                {
                    "role": "user",
                    "content": [
                        {"type": "input_text", "text": "See:"},
                        {
                            "type": "input_image",
                            "image_url": IMAGE,
                            "detail": "low",
                        },
                    ],
                }
            ],
            [
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "See:"},
                        {
                            "type": "image_url",
                            "image_url": {
                                "url": IMAGE,
                                "detail": "low",
                            },
                        },
                    ],
                }
            ],
        ),
        (  # two answers in a row stay two
            [
                {"role": "assistant", "content": "One."},
                {"role": "assistant", "content": "Two."},
                {
                    "type": "reasoning",
                    "id": "r",
                    "summary": [{"type": "summary_text", "text": "T"}],
                },
                {"type": "function_call", "call_id": "call_1", "name": "add", "arguments": "{}"},
            ],
            [
                {"role": "assistant", "content": "One."},
                {"role": "assistant", "content": "Two."},
                {
                    "role": "assistant",
                    "content": None,
                    "reasoning": "T",
                    "tool_calls": [call("call_1", "add", "{}")],
                },
            ],
        ),
        (  # images that tools give are shown behind all their results
            [
                {
                    "type": "function_call_output",
                    "call_id": "c1",
                    "output": [
                        {"type": "input_text", "text": "a"},
                        {"type": "input_image", "image_url": IMAGE},
                        {"type": "input_text", "text": "b"},
                    ],
                },
                {"type": "function_call_output", "call_id": "c2", "output": "c"},
            ],
            [
                {"role": "tool", "tool_call_id": "c1", "content": "a\nb"},
                {"role": "tool", "tool_call_id": "c2", "content": "c"},
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "image_url",
                            "image_url": {"url": IMAGE},
                        }
                    ],
                },
            ],
        ),
    ],
)
def test_input_items_are_chat_messages(items: list[Any], messages: list[Any]) -> None:
    assert read(input=items).messages == messages


# Fields


def test_the_engine_is_sent_what_the_agent_asked_for() -> None:
    ask = read(
        instructions="Be brief.",
        tools=[TOOL],
        tool_choice={"type": "function", "name": "add"},
        parallel_tool_calls=False,
        max_output_tokens=9,
        temperature=0.3,
        top_p=0.9,
        text={"format": {"type": "json_object"}},
        reasoning={"effort": "low"},
        metadata={"a": "b"},
        user="me",
        service_tier="flex",
        truncation="disabled",
    )
    assert ask.messages[0] == {"role": "system", "content": "Be brief."}
    assert ask.tools == [CHAT_TOOL]
    assert ask.wanted_tokens == 9
    assert ask.fields == {
        "tool_choice": {"type": "function", "function": {"name": "add"}},
        "parallel_tool_calls": False,
        "response_format": {"type": "json_object"},
        "reasoning_effort": "low",
    }
    assert (ask.choices, ask.stream, ask.wants_logprobs, ask.wants_reasoning) == (
        1,
        False,
        False,
        True,
    )


def test_only_allowed_tools_are_shown() -> None:
    other = {**TOOL, "name": "find"}
    allowed = {"type": "function", "name": "add"}
    choice = {"type": "allowed_tools", "mode": "required", "tools": [allowed]}
    ask = read(tools=[TOOL, other], tool_choice=choice)
    assert ask.tools == [CHAT_TOOL]
    assert ask.fields["tool_choice"] == "required"


@pytest.mark.parametrize(
    ("request_", "complaint"),
    [
        ({"tools": [{"type": "local_shell"}]}, r"tools\[0\]\.type 'local_shell' is not supported"),
        ({"tools": [{"type": "custom", "name": "x"}]}, "'custom' is not supported"),
        ({"tool_choice": "required"}, "tool_choice needs tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "x"}}, "'x' is not among"),
        ({"tools": [TOOL], "tool_choice": {"type": "file_search"}}, "'file_search' is not"),
        ({"truncation": "auto"}, "truncation must be disabled"),
        ({"background": True}, "background is not supported"),
        ({"conversation": "conv_1"}, "conversation is not supported"),
        ({"previous_response_id": "resp_1"}, "does not name a stored response"),
        ({"n": 2}, "n must be 1"),
        ({"max_output_tokens": 0}, "max_output_tokens must be"),
        ({"top_logprobs": 21}, "top_logprobs must be"),
        ({"text": {"format": {"type": "grammar"}}}, "'grammar' is not supported"),
        ({"input": []}, "input must be"),
        ({"input": [{"type": "web_search_call"}]}, r"input\[0\]\.type 'web_search_call'"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]},
            r"input\[0\]\.content\[0\]\.type 'input_file'",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]},
            "files are not stored here",
        ),
        ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens is not supported"),
    ],
)
def test_what_is_not_possible_is_refused_by_name(request_: dict[str, Any], complaint: str) -> None:
    with pytest.raises(InputError, match=complaint):
        read(**request_)


FULL: dict[str, Any] = {
    "model": "any",
    "instructions": "Be brief.",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "x", "text": "t"}]},
        {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "text", "text": "1"}]},
        {"type": "item_reference", "id": "x"},
    ],
    "tools": [TOOL],
    "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"name": "add"}]},
    "text": {"format": {"type": "json_schema", "name": "n", "schema": {}}},
    "reasoning": {"effort": "low"},
    "include": ["message.output_text.logprobs"],
    "top_logprobs": 2,
    "metadata": {},
    "store": True,
    "stream": False,
    "previous_response_id": None,
    "max_output_tokens": 5,
    "parallel_tool_calls": True,
    "chat_template_kwargs": {},
}


@settings(deadline=None, max_examples=examples(300))
@given(request=mangled(FULL))
def test_whatever_is_sent_is_read_or_refused(request: dict[str, Any]) -> None:
    memory = {"items": {"x": {"type": "message", "role": "assistant", "content": "a"}}}
    try:
        ask = read_request(API, request, memory)
    except InputError as error:
        assert error.detail["place"]
    else:
        orjson.dumps(API.whole(ask, chat_answer("a"), memory))
