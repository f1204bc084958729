"""How requests of Anthropic's messages API are parsed, and which are refused."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from envserver_records.errors import InputError
from hypothesis import given, settings
from support.dialects import chat_answer, mangled
from support.extent import examples

from envserver.proxy import MessagesDialect
from envserver.proxy.admission import read_request

IMAGE = "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAf"

API = MessagesDialect()
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL = {"name": "add", "description": "Adds.", "input_schema": SCHEMA}
HI = {"role": "user", "content": "hi"}
THINK = {"type": "enabled", "budget_tokens": 1024}


def read(**request: Any) -> Any:
    return read_request(API, {"model": "any", "max_tokens": 50, "messages": [HI], **request}, {})


# Histories


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
                                {
                                    "type": "image",
                                    "source": {
                                        "type": "url",
                                        "url": IMAGE,
                                    },
                                },
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
                        {
                            "type": "image_url",
                            "image_url": {"url": IMAGE},
                        },
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
                            "source": {
                                "type": "base64",
                                "media_type": "image/png",
                                "data": IMAGE.partition(",")[2],
                            },
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
                        {
                            "type": "image_url",
                            "image_url": {"url": IMAGE},
                        },
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


# Fields


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
    function = {"name": "add", "parameters": SCHEMA, "description": "Adds."}
    assert ask.tools == [{"type": "function", "function": function}]
    assert ask.wanted_tokens == 50
    assert ask.fields == {
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
        ({"messages": [{"role": "system", "content": ""}]}, "messages must not be empty"),
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
            "'base64' is not supported: only text is",
        ),
        ({"messages": [HI, {"role": "assistant", "content": "So "}]}, "end with whitespace"),
        ({"messages": [HI, {"role": "assistant", "content": [TOOL_USE]}]}, "have no results"),
        (
            {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
            r"tools\[0\]\.type 'web_search_20250305' is not supported",
        ),
        ({"tool_choice": {"type": "any"}}, "tool_choice needs tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "x"}}, "'x' is not among"),
        ({"thinking": {"type": "hard"}}, "thinking.type cannot be 'hard'"),
        ({"stop_sequences": "END"}, "stop_sequences must be"),
        ({"output_config": {"format": {"type": "xml"}}}, "must be a json_schema"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers is not supported"),
        ({"n": 2}, "n must be 1"),
        ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens is not supported"),
    ],
)
def test_what_is_not_possible_is_refused_by_name(request_: dict[str, Any], complaint: str) -> None:
    with pytest.raises(InputError, match=complaint):
        read(**request_)


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
                {
                    "type": "image",
                    "source": {"type": "url", "url": IMAGE},
                },
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


@settings(deadline=None, max_examples=examples(300))
@given(request=mangled(FULL))
def test_whatever_is_sent_is_read_or_refused(request: dict[str, Any]) -> None:
    try:
        ask = read_request(API, request, {})
    except InputError as error:
        assert error.detail["place"]
    else:
        orjson.dumps(API.whole(ask, chat_answer("a"), {}))
