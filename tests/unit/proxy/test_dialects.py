"""What each API promises its official client: one contract, which every dialect keeps.

How requests are read and refused, how answers and errors are told, whole and streamed.
"""

from pathlib import Path
from typing import Any, get_type_hints

import openai
import orjson
import pytest
import yaml
from anthropic.types import beta, message_create_params
from envserver_records.errors import EngineTimeout, EngineUnavailable, InputError, NotFoundError
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params
from pydantic import BaseModel
from support import speaking
from support.dialects import (
    CHAT,
    HI,
    MESSAGES,
    RESPONSES,
    TEXTS,
    Api,
    Desk,
    Told,
    call,
    chat_answer,
    chat_answers,
    mangled,
    message_of,
    texts,
)
from support.extent import examples

from envserver.proxy.body import RAW
from envserver.tokens.comparison import answer_of, change_of

Json = dict[str, Any]
CASES: Json = yaml.safe_load((Path(__file__).parent / "dialect_requests.yaml").read_text())
APIS: dict[str, Api] = {api.path: api for api in (CHAT, TEXTS, RESPONSES, MESSAGES)}
TOOL: Any = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": None}
CALLS = [call("call_1", "add", '{"a": 1}'), call("call_2", "add", '{"a":2.0 }')]

ALL = pytest.mark.parametrize("api", APIS.values(), ids=repr)
WITH_HISTORY = pytest.mark.parametrize("api", [CHAT, RESPONSES, MESSAGES], ids=repr)
STREAMED = pytest.mark.parametrize("streamed", [False, True])


# Answers


@ALL
@STREAMED
def test_thoughts_text_calls_and_usage_are_told(api: Api, streamed: bool) -> None:
    desk = Desk(api, chat_answer("Wait, é", reasoning="Hm.", calls=CALLS))
    told = api.told(api.create(desk, streamed, **api.thinking))
    wanted = Told("Hm.", "Wait, é", [("call_1", "add", '{"a": 1}')], (11, 7))
    wanted.calls.append(("call_2", "add", '{"a": 2.0}' if api is MESSAGES else '{"a":2.0 }'))
    assert told == (wanted._replace(reasoning="", calls=[]) if api is TEXTS else wanted)


@ALL
@settings(deadline=None, max_examples=examples(60))
@given(answer=chat_answers(), piece=st.integers(1, 5))
def test_the_clients_stream_adds_up_to_the_whole_answer(api: Api, answer: Json, piece: int) -> None:
    desk = Desk(api, answer, answer, piece=piece)
    whole = api.create(desk, **api.thinking)
    if api is RESPONSES:
        with api.client(desk).responses.stream(model="any", input="hi") as stream:
            streamed = stream.get_final_response()
    else:
        streamed = api.create(desk, streamed=True, **api.thinking)
    assert api.compared(streamed) == api.compared(whole)


@WITH_HISTORY
@settings(deadline=None, max_examples=examples(100))
@given(answer=chat_answers(), streamed=st.booleans(), text=texts)
def test_an_answer_that_is_sent_back_is_the_message_that_it_was(
    api: Api, answer: Json, streamed: bool, text: str
) -> None:
    desk = Desk(api, answer, chat_answer("Bye"), chat_answer("Bye"))
    for request in api.histories(api.create(desk, streamed, **api.thinking), text):
        api.create(desk, **request)
        first, back, last = desk.ask.messages
        assert (first, last) == (HI, {**HI, "content": text})
        was, now = answer_of(message_of(answer)), answer_of(back)
        assert change_of(was, now, ended=True, tail="").change == "exact"
        for name, none in (("tool_calls", []), ("reasoning", "")):
            assert (back.get(name) or none) == message_of(answer).get(name, none)


@WITH_HISTORY
def test_parsed_output_comes_from_a_schema_that_the_engine_is_sent(api: Api) -> None:
    class Sum(BaseModel):
        total: int

    desk = Desk(api, chat_answer('{"total": 3}'))
    assert api.parsed(desk, Sum) == Sum(total=3)
    form = desk.ask.fields["response_format"]
    assert form["type"] == "json_schema"
    assert form["json_schema"]["schema"]["required"] == ["total"]
    if api is not MESSAGES:
        assert (form["json_schema"]["name"], form["json_schema"]["strict"]) == ("Sum", True)


@pytest.mark.parametrize("api", [RESPONSES, MESSAGES], ids=repr)
@STREAMED
@pytest.mark.parametrize(("finish", "stop", "called", "reason", "incomplete"), CASES["stops"])
def test_why_a_model_stopped_is_told(
    api: Api, finish: str, stop: str | None, called: bool, reason: str, incomplete: str | None,
    streamed: bool,
) -> None:  # fmt: skip
    calls = CALLS if called else []
    desk = Desk(api, chat_answer("Well", finish=finish, stop=stop, calls=calls))
    answer = api.create(desk, streamed)
    if api is MESSAGES:
        assert answer.stop_reason == reason
        assert answer.stop_sequence == (stop if reason == "stop_sequence" else None)
        return
    status = "completed" if finish in ("stop", "tool_calls") else "incomplete"
    assert (answer.status, answer.output[-1].status) == (status, status)
    assert (answer.incomplete_details and answer.incomplete_details.reason) == incomplete


@ALL
@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (InputError("No."), "invalid_request_error"),
        (NotFoundError("No."), "not_found_error"),
        (EngineTimeout("No."), "timeout_error"),
    ],
)
def test_errors_have_the_form_that_the_client_knows(api: Api, error: Any, kind: str) -> None:
    with pytest.raises(api.refused) as caught:
        api.create(Desk(api, error))
    assert caught.value.status_code == error.status
    assert api.kind(caught.value) == (kind if api is MESSAGES else error.kind)
    assert "No." in caught.value.message


@pytest.mark.parametrize("api", [CHAT, TEXTS, MESSAGES], ids=repr)
def test_a_stream_that_breaks_raises_in_the_client(api: Api) -> None:
    desk = Desk(api, chat_answer("Hello"), broken=EngineUnavailable("No replica answers."))
    with pytest.raises(api.broken, match=r"No replica answers\.") as caught:
        api.create(desk, streamed=True)
    assert api.kind(caught.value) == (
        "overloaded_error" if api is MESSAGES else "engine_unavailable"
    )


def test_a_response_that_breaks_ends_as_a_failed_one() -> None:
    desk = Desk(RESPONSES, chat_answer("Hello"), broken=EngineTimeout("Too slow."))
    *_, item, last = RESPONSES.client(desk).responses.create(model="any", input="hi", stream=True)
    assert (item.type, item.item.status) == ("response.output_item.done", "incomplete")
    assert (last.type, last.response.status) == ("response.failed", "failed")
    assert (last.response.error.message, last.response.error.code) == ("Too slow.", "server_error")
    assert last.response.output[0].content[0].text == "Hello"
    assert not desk.memory
    # Also before anything was said.
    writer = RESPONSES.adapter.writer(RESPONSES.read(stream=True), {})
    events = writer.fail(EngineTimeout("Too slow."))
    kinds = [line for line in events.split(b"\n") if line.startswith(b"event: ")]
    assert [kind.rpartition(b".")[2] for kind in kinds] == [b"created", b"in_progress", b"failed"]


def test_a_message_is_streamed_block_by_block() -> None:
    desk = Desk(MESSAGES, chat_answer("Héllo", reasoning="Hm", calls=CALLS[:1]), piece=4)
    asked: Any = {"model": "any", **MESSAGES.smallest, "stream": True}
    with MESSAGES.client(desk).messages.with_streaming_response.create(**asked) as response:
        told = [line for line in response.iter_lines() if line.startswith("data: ")]
    events = [orjson.loads(line.removeprefix("data: ")) for line in told]
    text = """message_start ping
        content_block_start:0 content_block_delta:0:thinking_delta
            content_block_delta:0:signature_delta content_block_stop:0
        content_block_start:1 content_block_delta:1:text_delta content_block_delta:1:text_delta
            content_block_stop:1
        content_block_start:2 content_block_delta:2:input_json_delta content_block_stop:2
        message_delta message_stop"""
    parts = ([e["type"], e.get("index"), e.get("delta", {}).get("type")] for e in events)
    assert [":".join(str(p) for p in part if p is not None) for part in parts] == text.split()
    assert events[0]["message"]["stop_reason"] is None
    assert events[-2]["usage"]["output_tokens"] == 7


def test_a_response_is_streamed_item_by_item() -> None:
    desk = Desk(RESPONSES, chat_answer("Héllo", reasoning="Hm", calls=CALLS[:1]), piece=4)
    events = [*RESPONSES.client(desk).responses.create(model="any", input="hi", stream=True)]
    text = """created in_progress
        output_item.added content_part.added reasoning_text.delta reasoning_text.done
            content_part.done output_item.done
        output_item.added content_part.added output_text.delta output_text.delta output_text.done
            content_part.done output_item.done
        output_item.added function_call_arguments.delta function_call_arguments.done
            output_item.done
        completed"""
    assert [event.type.removeprefix("response.") for event in events] == text.split()
    assert [event.sequence_number for event in events] == [*range(len(events))]
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert done == events[-1].response.output
    added = [event for event in events if event.type == "response.output_item.added"]
    assert [event.output_index for event in added] == [0, 1, 2]
    assert [event.item.id for event in added] == [item.id for item in done]


@STREAMED
def test_what_else_a_message_tells(streamed: bool) -> None:
    answer = chat_answer("Hi", reasoning="Hm.")
    message_of(answer)["reasoning_content"] = "Hm."  # the engine's other name for it
    message = MESSAGES.create(Desk(MESSAGES, answer), streamed)
    thinking, text = message.content
    assert (thinking.thinking, thinking.signature, text.text) == ("Hm.", "", "Hi")
    assert message.id.startswith("msg_")
    assert (message.model, message.role) == ("tiny", "assistant")
    assert message.usage.cache_read_input_tokens == 0
    odd = chat_answer("", calls=[call("c1", "add", "[1, 2"), call("c2", "add", "")])
    first, second = MESSAGES.create(Desk(MESSAGES, odd), streamed).content
    assert (first.input, second.input) == ({"arguments": "[1, 2"}, {})


@STREAMED
def test_what_else_a_response_tells(streamed: bool) -> None:
    desk = Desk(RESPONSES, chat_answer("Hi", reasoning="Hm.", calls=CALLS), chat_answer(""))
    response = RESPONSES.create(desk, streamed, metadata={"a": "b"}, max_output_tokens=50)
    assert [item.type for item in response.output] == [
        "reasoning",
        "message",
        *["function_call"] * 2,
    ]
    assert {item.status for item in response.output} == {"completed"}
    assert response.output[1].role == "assistant"
    assert (response.model, response.created_at) == ("tiny", 1_700_000_000)
    assert (response.metadata, response.max_output_tokens) == ({"a": "b"}, 50)
    assert response.usage.total_tokens == 18
    empty = RESPONSES.create(desk, streamed)
    assert [item.type for item in empty.output] == ["message"]
    assert empty.output_text == ""


@STREAMED
def test_logprobs_of_a_response_are_told_to_whom_asks(streamed: bool) -> None:
    top = [{"token": "x", "logprob": -1.0}]
    logprobs = [
        {"token": token, "logprob": -0.5, "bytes": None, "top_logprobs": top}
        for token in ("Hi", "é", "<end>")
    ]
    desk = Desk(RESPONSES, chat_answer("Hié", logprobs=logprobs), piece=2)
    asked: Any = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
    response = RESPONSES.create(desk, streamed, **asked)
    assert (desk.ask.wants_logprobs, desk.ask.fields["top_logprobs"]) == (True, 1)
    told = response.output[0].content[0].logprobs
    assert [(entry.token, entry.logprob) for entry in told] == [
        (token, -0.5) for token in ("Hi", "é", "<end>")
    ]
    assert told[1].bytes == list("é".encode())
    assert told[1].top_logprobs[0].token == "x"


# Conversations


def test_arguments_that_an_agent_changed_are_its_own() -> None:
    desk = Desk(MESSAGES, chat_answer("", calls=CALLS))
    blocks = [block.model_dump(exclude_none=True) for block in MESSAGES.create(desk).content]
    blocks[0]["input"]["a"] = True
    blocks[1]["input"]["a"] = 2  # as JavaScript writes 2.0
    turn = {"role": "assistant", "content": blocks}
    _, message, _ = MESSAGES.adapter.read(
        {"max_tokens": 50, "messages": [HI, turn, HI]}, desk.memory
    ).messages
    written = [made["function"]["arguments"] for made in message["tool_calls"]]
    assert written == ['{"a":true}', '{"a":2.0 }']


@STREAMED
def test_a_client_that_has_the_server_keep_the_talk_goes_on_by_itself(streamed: bool) -> None:
    desk = Desk(MESSAGES, chat_answer("One."), chat_answer("Two."))
    thread = MESSAGES.client(desk).beta.messages.thread(
        model="any", max_tokens=50, unsupported_request_behavior="continue_unthreaded"
    )
    for words in ("And?", "And now?"):
        turn: Any = {"role": "user", "content": words}
        if streamed:
            with thread.stream(turn) as stream:
                stream.until_done()
        else:
            thread.send(turn)
    assert [message["content"] for message in desk.ask.messages] == ["And?", "One.", "And now?"]


def test_a_conversation_goes_on_from_an_earlier_response_without_its_instructions() -> None:
    desk = Desk(RESPONSES, chat_answer("", calls=CALLS), chat_answer("3"), chat_answer("Bye"))
    first = RESPONSES.create(desk, instructions="Be brief.", tools=[TOOL])
    outputs = [
        {"type": "function_call_output", "call_id": f"call_{n}", "output": str(n)} for n in (1, 2)
    ]
    second = RESPONSES.create(desk, input=outputs, previous_response_id=first.id, tools=[TOOL])
    RESPONSES.create(desk, input="bye", previous_response_id=second.id, instructions="Be long.")
    assert desk.ask.messages == [
        {"role": "system", "content": "Be long."},
        HI,
        {"role": "assistant", "content": None, "tool_calls": CALLS},
        *({"role": "tool", "tool_call_id": f"call_{n}", "content": f"{n}"} for n in (1, 2)),
        {"role": "assistant", "content": "3"},
        {**HI, "content": "bye"},
    ]
    # Two requests may go on from the same response.
    again = RESPONSES.read(desk.memory, previous_response_id=first.id)
    assert again.messages[-2]["tool_calls"] == CALLS


def test_items_of_responses_can_be_referred_to() -> None:
    desk = Desk(RESPONSES, chat_answer("", calls=CALLS[:1]))
    (item,) = RESPONSES.create(desk, tools=[TOOL]).output
    reference = {"type": "item_reference", "id": item.id}
    (message,) = RESPONSES.read(desk.memory, input=[reference]).messages
    assert message["tool_calls"] == CALLS[:1]


@STREAMED
def test_nothing_is_kept_of_a_response_that_is_not_to_be_stored(streamed: bool) -> None:
    desk = Desk(RESPONSES, chat_answer("Hi"))
    response = RESPONSES.create(desk, streamed, store=False)
    with pytest.raises(openai.UnprocessableEntityError, match="previous_response_id does not name"):
        RESPONSES.create(desk, previous_response_id=response.id)


# Requests

CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1 + 1, and 2 + 2?"},
    {"role": "assistant", "content": "Hm.", "tool_calls": [call("c1", "add", '{"a":1}')]},
    {"role": "tool", "tool_call_id": "c1", "content": "2"},
    {"role": "assistant", "content": "Two. And?"},
    {"role": "user", "content": "Go on."},
]


@pytest.mark.parametrize(
    ("api", "speaker"),
    [(CHAT, speaking.Chat()), (RESPONSES, speaking.Responses()), (MESSAGES, speaking.Messages())],
)
def test_a_conversation_is_one_request_in_all_dialects(api: Api, speaker: speaking.Speaker) -> None:
    function = {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}
    tool = {"type": "function", "function": function}
    choice = {"type": "function", "function": {"name": "add"}}
    wishes = {"max_tokens": 9, "user": "me", "stream": True, "tool_choice": choice}
    ask = api.read(**speaker.body(CONVERSATION, [tool], wishes, ""))
    assert (ask.messages, ask.tools, ask.fields) == (CONVERSATION, [tool], {"tool_choice": choice})
    assert (ask.wanted_tokens, ask.choices, ask.stream, ask.wants_logprobs) == (9, 1, True, False)


@pytest.mark.parametrize("case", CASES["conversations"])
def test_turns_are_chat_messages(case: str) -> None:
    path, turns, messages = CASES["conversations"][case]
    request = {"input" if path == RESPONSES.path else "messages": turns}
    assert APIS[path].read(**request).messages == messages


@pytest.mark.parametrize("case", CASES["fields"])
def test_the_engine_is_sent_what_the_agent_asked_for(case: str) -> None:
    path, request, fields, more = CASES["fields"][case]
    ask = APIS[path].read(**request)
    assert ask.fields == fields
    assert {name: getattr(ask, name) for name in more} == more


@pytest.mark.parametrize(("path", "request_", "complaint"), CASES["refused"])
def test_what_is_not_possible_is_refused_by_name(path: str, request_: Json, complaint: str) -> None:
    with pytest.raises(InputError, match=complaint):
        APIS[path].read(**request_)


@ALL
def test_what_is_off_is_harmless_and_what_means_nothing_here_is_ignored(api: Api) -> None:
    plain, nothing = api.read(), CASES["ignored"]
    off = api.read(**CASES["switched_off"])
    assert (off.fields, off.ignored) == (plain.fields, [])
    both = {"thinking": {"type": "enabled"}, "reasoning": {"effort": "low"}}
    more = {name: value for name, value in both.items() if name not in api.adapter.table.read}
    ignoring = api.read(**nothing, **more)
    assert (ignoring.fields, ignoring.ignored) == (plain.fields, [*nothing, *more])
    for name in ("priority", "regex", "lora_path"):
        with pytest.raises(InputError, match=f"{name} is not among the fields"):
            api.read(**{name: 0})


@ALL
@settings(deadline=None, max_examples=examples(240))
@given(data=st.data())
def test_whatever_is_sent_is_read_or_refused(api: Api, data: st.DataObject) -> None:
    memory = {"items": {"x": {"type": "message", "role": "assistant", "content": "a"}}}
    try:
        ask = api.read(memory, **data.draw(mangled({"model": "any", **CASES["full"][api.path]})))
    except InputError as error:
        assert error.detail["place"]
    else:
        orjson.dumps(api.adapter.whole(ask, chat_answer("a"), memory))


@pytest.mark.parametrize(
    ("api", "params"),
    [
        (CHAT, chat_params.CompletionCreateParamsBase),
        (TEXTS, completion_create_params.CompletionCreateParamsBase),
        (RESPONSES, response_create_params.ResponseCreateParamsBase),
        (MESSAGES, message_create_params.MessageCreateParamsBase),
        (MESSAGES, beta.message_create_params.MessageCreateParamsBase),
    ],
)
def test_every_field_of_an_official_client_is_decided_on(api: Api, params: Any) -> None:
    table = api.adapter.table
    decided = {*table.engine, *table.read, *table.dropped, *table.refused, *RAW}
    assert sorted(get_type_hints(params).keys() - decided) == []


@STREAMED
def test_calls_of_tools_in_namespaces_have_both_names(streamed: bool) -> None:
    """As Codex offers the tools of MCP servers."""
    save, look, exec = ({**TOOL, "name": name} for name in ("save", "look", "exec"))
    space = {"type": "namespace", "description": "Some."}
    mcp_env = {**space, "name": "mcp__env", "tools": [save, look]}
    spaces: Any = [exec, mcp_env, {**space, "name": "mcp", "tools": [look]}]
    flat = ["exec", "mcp__env__save", "mcp__look", "mcp__env__unknown"]
    split = [(None, "exec"), ("mcp__env", "save"), ("mcp", "look"), (None, "mcp__env__unknown")]
    made = [call(f"c{n}", name, "{}") for n, name in enumerate(flat)]
    desk = Desk(RESPONSES, chat_answer(calls=made))
    asked: Any = {"model": "any", "input": "hi", "tools": [*spaces, {"type": "web_search"}]}
    told = RESPONSES.client(desk).responses.create(**asked, stream=streamed)
    if streamed:
        events = [*told]
        told = events[-1].response
        added = [e.item.to_dict() for e in events if e.type == "response.output_item.added"]
        assert [item.get("namespace") for item in added] == [namespace for namespace, _ in split]
    items = [item.to_dict() for item in told.output]
    assert [(item.get("namespace"), item["name"]) for item in items] == split
    names = [tool["function"]["name"] for tool in desk.ask.tools]
    assert names == ["exec", "mcp__env__save", "mcp__env__look", "mcp__look"]
    back = RESPONSES.read(tools=spaces, input=[HI, *items])
    assert [made["function"]["name"] for made in back.messages[1]["tool_calls"]] == flat
