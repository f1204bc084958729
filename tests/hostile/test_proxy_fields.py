"""What walled code asks of the engine with its own key: only listed fields arrive there.

The engine keeps every request it gets (support/recording_engine.py).
"""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.dialects import json_values, mangled
from support.extent import examples
from support.recording_engine import (
    BACKTRACKS,
    CHAT,
    MESSAGES,
    METADATA,
    PLAIN,
    RESPONSES,
    TEXT,
    Json,
    refused,
    send,
)

IMAGE = "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAf"


def user(*parts: Json) -> Json:
    return {"role": "user", "content": list(parts)}


def chat(*parts: Json) -> tuple[str, Json]:
    return CHAT, {"messages": [user(*parts)]}


def part(url: Any, kind: str = "image_url") -> Json:
    return {"type": kind, kind: {"url": url}}


def shown(kind: str, url: str) -> tuple[str, Json]:
    """A request of one dialect that shows the model what lies at `url`."""
    source = {"type": "url", "url": url}
    image = {"type": "image", "source": source}
    result = {"type": "tool_result", "tool_use_id": "c", "content": [image]}
    picture = {"type": "input_image", "image_url": url}
    output = {"type": "function_call_output", "call_id": "c", "output": [picture]}
    return {
        "chat": chat({"type": "text", "text": "Look:"}, part(url)),
        "chat's tool": (CHAT, {"messages": [{**user(part(url)), "role": "tool"}]}),
        "responses": (RESPONSES, {"input": [user(picture)]}),
        "responses' tool": (RESPONSES, {"input": [output]}),
        "messages": (MESSAGES, {"max_tokens": 9, "messages": [user(image)]}),
        "messages' tool": (MESSAGES, {"max_tokens": 9, "messages": [user(result)]}),
    }[kind]


WAYS = ("chat", "chat's tool", "responses", "responses' tool", "messages", "messages' tool")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "url",
    [
        METADATA,
        "file:///etc/passwd",
        "https://example.com/a.png",
        "FILE:///etc/passwd",
        "//169.254.169.254/",
        "data:text/plain;base64,AAAA",
        "data:image/png,AAAA",
        " data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAf",
    ],
)
def test_the_engine_fetches_nothing_for_an_agent(way: str, url: str) -> None:
    refused(*shown(way, url), "url must begin with data:image/", "Let the environment fetch it")


@pytest.mark.parametrize("way", WAYS)
def test_an_image_passes_by_value(way: str) -> None:
    status, _, (asked,) = send(*shown(way, IMAGE))
    assert status == 200
    assert part(IMAGE) in asked["messages"][-1]["content"]


@pytest.mark.parametrize(
    "hostile",
    [
        part(METADATA, "audio_url"),
        part(METADATA, "video_url"),
        {"type": "image_url", "image_url": METADATA},
        {"type": "input_audio", "input_audio": {"data": METADATA, "format": "wav"}},
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav;base64,AAAA#"}},
        {"type": "image_embeds", "image_embeds": "gAN9cQAu"},
        {"type": "prompt_embeds", "data": "gAN9cQAu"},
        {"type": "file", "file": {"file_id": "f"}},
        {"image_url": METADATA},
        {"type": ["image_url"]},
    ],
)
def test_no_other_part_of_a_message_names_what_the_engine_loads(hostile: Json) -> None:
    refused(*chat(hostile), "messages[0].content[0]")


def test_only_what_was_checked_in_a_part_goes_on() -> None:
    extra = {"uuid": "another rollout's image", "image_embeds": "x", "url": METADATA}
    held = {"type": "image_url", "image_url": {**extra, "url": IMAGE, "detail": "low"}, **extra}
    message = {**user(held, {"type": "text", "text": "a", **extra}), **extra, "media": [METADATA]}
    _, _, (asked,) = send(CHAT, {"messages": [message]})
    image = {"type": "image_url", "image_url": {"url": IMAGE, "detail": "low"}}
    assert asked["messages"] == [user(image, {"type": "text", "text": "a"})]


@pytest.mark.parametrize(
    "text",
    [
        "#EXTM3U\n#EXTINF:1,\nhttp://169.254.169.254/latest/meta-data\n#EXT-X-ENDLIST\n",
        "ffconcat version 1.0\nfile /etc/passwd\n",
        '<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>',
        "#EXTM3U\n#\0\nhttp://169.254.169.254/latest/meta-data\n",
        "#EXTM3U\n#\N{NO-BREAK SPACE}\nhttp://169.254.169.254/latest/meta-data\n",
        "\N{ZERO WIDTH NO-BREAK SPACE}#EXTM3U\nhttp://169.254.169.254/latest/meta-data\n",
        "%!PS-Adobe-3.0 EPSF-3.0\n\0",
        "\0<svg/>",
        "",
    ],
)
def test_a_medium_that_is_text_could_name_what_is_fetched(text: str) -> None:
    """So only formats pass that are known by their first bytes."""
    held = base64.b64encode(text.encode()).decode()
    for kind in ("image", "audio", "video"):
        url = f"data:{kind}/any;base64,{held}"
        refused(*chat(part(url, f"{kind}_url")), f"{kind}_url.url is not ")
    frames = f"data:video/jpeg;base64,/9j/4AAQ,{held}"
    refused(*chat(part(frames, "video_url")), "video_url.url is not PNG, JPEG")


@pytest.mark.parametrize(
    ("kind", "first"),
    [
        ("image", b"\xff\xd8\xff\xc0\0\x0b\x08\0\x08\0\x08"),
        ("image", b"RIFF\0\0\0\0WEBPVP8X" + bytes(14)),
        ("image", b"\0\0\0\x1cftypavif\0\0\0\x14ispe" + bytes(4) + b"\0\0\0\x08" * 2),
        ("audio", b"RIFF\0\0\0\0WAVEfmt "),
        ("audio", b"\xff\xfb\x90"),
        ("video", b"\0\0\0\x20ftypisom"),
        ("video", b"\x1a\x45\xdf\xa3"),
    ],
)
def test_usual_media_pass(kind: str, first: bytes) -> None:
    url = f"data:{kind}/any;base64,{base64.b64encode(first).decode()}"
    assert send(*chat(part(url, f"{kind}_url")))[0] == 200


COUNT = "v1/messages/count_tokens"


def calls(*made: Any) -> Json:
    return {"messages": [{"role": "assistant", "content": None, "tool_calls": list(made)}]}


def function(**fields: Any) -> Json:
    return {"type": "function", "function": {"name": "a", **fields}}


@pytest.mark.parametrize(
    ("path", "body", "place"),
    [
        (CHAT, {"messages": [{"role": 5, "content": "a"}]}, "messages[0].role"),
        (CHAT, {"messages": [{"content": "a"}]}, "messages[0].role"),
        (CHAT, calls("a"), "tool_calls[0]"),
        (CHAT, calls({"type": "mcp"}), "tool_calls[0].type"),
        (CHAT, calls({"id": [METADATA]}), "tool_calls[0].id"),
        (CHAT, calls({"id": "c" * 70_000, **function(arguments="")}), "tool_calls[0].id"),
        (CHAT, calls({"id": "c", **function(arguments=5)}), "tool_calls[0].function.arguments"),
        (CHAT, {"messages": [{"role": "x" * 65, "content": "a"}]}, "messages[0].role"),
        (CHAT, {"messages": [{"role": "tool", "content": "a", "tool_call_id": "c" * 70_000}]},
         "messages[0].tool_call_id"),
        (CHAT, calls(function(arguments=[METADATA])), "tool_calls[0].function.arguments"),
        *(
            (CHAT, {"messages": [{"role": "user", "content": "a", name: {"url": METADATA}}]}, name)
            for name in ("name", "tool_call_id", "refusal", "reasoning", "reasoning_content")
        ),
        *(
            (CHAT, {"messages": [user()], "tools": [function(**{name: [METADATA]})]}, name)
            for name in ("description", "parameters", "strict")
        ),
        (RESPONSES, {"input": "a", "tools": [{"type": "function", "name": "a", "strict": 1}]},
         "tools[0].strict"),
        (MESSAGES, {"max_tokens": 9, "messages": [user()], "tools": [
            {"name": "a", "description": [METADATA], "input_schema": {}}]}, "tools[0].description"),
        (CHAT, {"messages": [user()], "response_format": {"structures": []}},
         "response_format.type"),
        (CHAT, {"messages": [user()], "response_format": {"type": "text", "structures": []}},
         "response_format.structures"),
        (CHAT, {"messages": [user()], "tool_choice": {"type": "mcp", "url": METADATA}},
         "tool_choice.type"),
        (RESPONSES, {"input": "a", "reasoning": {"effort": "x" * 65}}, "reasoning.effort"),
        (TEXT, {"prompt": ["a"] * 128, "n": 2}, "n "),
        (COUNT, {"messages": [user()], "chat_template_kwargs": {"chat_template": "x"}},
         "chat_template_kwargs.chat_template"),
        (COUNT, {"messages": [user()], "chat_template_kwargs": {"a": "x" * 20_000}},
         "chat_template_kwargs"),
        (COUNT, {"messages": [user()], "priority": 1}, "priority"),
    ],
)  # fmt: skip
def test_what_is_nested_has_types_and_bounds(path: str, body: Json, place: str) -> None:
    refused(path, body, place)


def test_only_listed_fields_of_what_is_nested_go_on() -> None:
    extra = {"url": METADATA, "image_url": {"url": METADATA}}
    call = {"id": "c", "type": "function", "function": {"name": "a", "arguments": "{}"}}
    made = {**call, "function": {**call["function"], **extra}, **extra}  # type: ignore[dict-item]
    said = {"role": "assistant", "content": None}
    choice = {"type": "function", "function": {"name": "a", **extra}, **extra}
    body = {"messages": [{**said, "tool_calls": [made], "reasoning_details": [extra]}]}
    status, _, (asked,) = send(CHAT, {**body, "tools": [function()], "tool_choice": choice})
    assert status == 200
    assert asked["messages"] == [{**said, "tool_calls": [call]}]
    assert asked["tool_choice"] == {"type": "function", "function": {"name": "a"}}


def test_a_chat_may_allow_some_of_its_tools() -> None:
    other = {"type": "function", "function": {"name": "b"}}
    allowed = {"mode": "required", "tools": [function()]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    body = {"messages": [user()], "tools": [function(), other], "tool_choice": choice}
    _, _, (asked,) = send(CHAT, body)
    assert (asked["tools"], asked["tool_choice"]) == ([function()], "required")


MULTIMODAL: Json = {
    "messages": [
        {"role": "system", "content": [{"type": "text", "text": "a"}], "name": "b"},
        user({"type": "text", "text": "a"}, part(IMAGE), part(IMAGE)),
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "function": {}}]},
        {**user(part(IMAGE)), "role": "tool", "tool_call_id": "c"},
    ],
    "tools": [{"type": "function", "function": {"name": "a", "parameters": {}}}],
}
hostile_parts = st.sampled_from(
    [METADATA, "file:///etc/passwd", part(METADATA), [part(METADATA)], {"url": METADATA}]
)


@settings(deadline=None, max_examples=examples(150))
@given(body=mangled(MULTIMODAL, json_values | hostile_parts))
def test_whatever_stands_in_a_message_no_address_arrives(body: Json) -> None:
    """As text it may: that is the prompt."""
    status, _, asked = send(CHAT, body)
    assert status in (200, 400)
    for message in asked[0]["messages"] if asked else ():
        for one in message["content"] if isinstance(message.get("content"), list) else ():
            assert one["type"] in ("text", "input_text", "image_url")
            assert one.get("image_url", {"url": IMAGE})["url"] == IMAGE


def test_media_are_bounded_each_and_together() -> None:
    megabytes = "AAAA" * (1024 * 1024 // 3)
    refused(*chat(part(IMAGE + megabytes * 21)), "number 1 with 21.0 MB: 20 MB at most")
    fifteen = part(IMAGE + megabytes * 15)
    refused(*chat(fifteen, fifteen, fifteen), "MB together: 40 MB at most")
    refused(*chat(*[part(IMAGE)] * 257), "hold 257 images")


# Fields

DIALECTS = pytest.mark.parametrize("path", PLAIN)
CONTROL: Json = {
    "chat_template": "{{ raise_exception('x') }}",
    "kv_transfer_params": {"do_remote_prefill": True, "remote_host": "169.254.169.254"},
    "priority": -1_000_000,
    "request_id": "other",
    "cache_salt": "x",
    "vllm_xargs": {"a": 1},
    "mm_processor_kwargs": {"num_crops": 10**9},
    "media_io_kwargs": {"video": {"num_frames": -1}},
    "lora_request": {"lora_path": "/"},
    "documents": [{"text": "x"}],
    "prompt_logprobs": 20,
    "prompt_embeds": "gAN9cQAu",
    "logits_processors": ["os.system"],
    "repetition_detection": {},
}
CONSTRAINTS: Json = {
    "structured_outputs": {"regex": BACKTRACKS},
    "guided_regex": BACKTRACKS,
    "guided_json": {"type": "object"},
    "guided_choice": ["a"],
    "guided_grammar": 'root ::= "a"',
    "logit_bias": {"5": 100},
    "allowed_token_ids": [5],
    "bad_words": ["wrong"],
    "min_tokens": 10_000,
    "ignore_eos": True,
    "thinking_token_budget": 1,
}
FORCED = ("truncate_prompt_tokens", "use_beam_search", "best_of")


@DIALECTS
@pytest.mark.parametrize("name", [*CONTROL, *CONSTRAINTS, *FORCED])
def test_what_steers_the_engine_is_refused_by_name(path: str, name: str) -> None:
    value = (CONTROL | CONSTRAINTS).get(name, 5)
    refused(path, {**PLAIN[path], name: value}, name)


@DIALECTS
def test_what_clients_send_by_themselves_is_dropped(path: str) -> None:
    accounts = ("metadata", "prompt_cache_retention", "service_tier", "store", "user")
    sent: Json = {name: {} if name == "metadata" else name == "store" or "x" for name in accounts}
    samplers = {"temperature": 0.1, "top_p": 0.1, "top_k": 1, "min_p": 0.9, "length_penalty": 2}
    status, _, (asked,) = send(path, {**PLAIN[path], **sent, **samplers})
    _, _, (plain,) = send(path, PLAIN[path])
    assert status == 200
    assert asked == plain


FORWARDED: Json = {
    "n": 2,
    "seed": 3,
    "stop": ["x"],
    "stop_sequences": ["x"],
    "stop_token_ids": [5],
    "parallel_tool_calls": True,
    "top_logprobs": 2,
    "reasoning_effort": "low",
    "chat_template_kwargs": {"tone": 1},
    "max_tokens": 9,
    "max_completion_tokens": 9,
    "max_output_tokens": 9,
    "skip_special_tokens": False,
    "logprobs": 2,
}
KNOWN = {
    *("model", "messages", "prompt", "max_tokens", "temperature", "top_p", "logprobs"),
    *(FORWARDED.keys() - {"stop_sequences", "max_output_tokens"}),
}


@settings(deadline=None, max_examples=examples(150))
@given(
    path=st.sampled_from(list(PLAIN)),
    extra=st.dictionaries(
        st.text(min_size=1, max_size=12) | st.sampled_from([*CONTROL, *CONSTRAINTS, *FORCED]),
        json_values,
        max_size=3,
    ),
    listed=st.dictionaries(st.sampled_from(list(FORWARDED)), json_values, max_size=2),
    kept=st.lists(st.sampled_from(list(FORWARDED)), max_size=3),
)
def test_no_field_arrives_that_is_not_listed(
    path: str, extra: Json, listed: Json, kept: list[str]
) -> None:
    """Listed fields may hold anything: they arrive as they should be, or the request is refused."""
    asked_for = {name: FORWARDED[name] for name in kept} | listed | extra | PLAIN[path]
    status, answer, asked = send(path, asked_for)
    assert status in (200, 400)
    assert bool(answer.get("error")) == (status == 400) == (not asked)
    for body in asked:
        assert body.keys() <= KNOWN


@DIALECTS
@pytest.mark.parametrize(
    "wrong",
    [
        {"seed": 2**63},
        {"seed": "1"},
        {"n": 129},
        {"n": True},
        {"stop": ["x"] * 65},
        {"stop": "x" * 1025},
        {"stop_sequences": ["x"] * 65},
        {"stop_token_ids": [-1]},
        {"stop_token_ids": [5] * 65},
        {"top_logprobs": 10**6},
        {"max_tokens": 2**31},
        {"chat_template_kwargs": {"chat_template": "x"}},
        {"chat_template_kwargs": {"tokenize": True}},
        {"chat_template_kwargs": {"a": "x" * 20_000}},
        {"reasoning_effort": "x" * 65},
        {"tools": [{}] * 1025},
        {"response_format": {"type": "json_object", "a": "x" * 300_000}},
        {"stream": "yes"},
    ],
)
def test_listed_fields_have_types_and_bounds(path: str, wrong: Json) -> None:
    refused(path, {**PLAIN[path], **wrong}, next(iter(wrong)))


@DIALECTS
def test_a_run_may_pass_on_more_and_its_calls_say_so(path: str) -> None:
    allowed: Any = {"constraints": "all", "extra_fields": ["priority", "best_of", "model"]}
    _, _, (asked,) = send(path, {**PLAIN[path], "priority": 5, "logit_bias": {"5": 1}}, **allowed)
    assert (asked["priority"], asked["logit_bias"], asked["model"]) == (5, {"5": 1}, "tiny")
    refused(path, {**PLAIN[path], "request_id": "x"}, "request_id", **allowed)
    refused(path, {**PLAIN[path], "best_of": 5}, "best_of", **allowed)
    refused(path, {**PLAIN[path], "logit_bias": {"x": 1}}, "logit_bias.x", **allowed)
    refused(path, {**PLAIN[path], "logit_bias": {"5": "x"}}, "logit_bias.5", **allowed)


def test_a_run_may_pass_on_what_is_dropped_otherwise() -> None:
    body = {**PLAIN[CHAT], "service_tier": "flex", "user": "me"}
    _, _, (asked,) = send(CHAT, body, extra_fields=["service_tier"])
    assert (asked["service_tier"], "user" in asked) == ("flex", False)


def test_only_listed_fields_of_a_tool_go_on() -> None:
    function = {"name": "a", "description": "A.", "parameters": {"type": "object"}}
    extra = {"url": METADATA, "server_label": "x"}
    tool = {"type": "function", "function": {**function, **extra}, **extra}
    _, _, (asked,) = send(CHAT, {**PLAIN[CHAT], "tools": [tool]})
    assert asked["tools"] == [{"type": "function", "function": function}]
    refused(CHAT, {**PLAIN[CHAT], "tools": [{"type": "mcp", **extra}]}, "tools[0].type 'mcp'")


@pytest.mark.parametrize(
    ("written", "arrives"),
    [(r'{"a": "\udabc!"}', "\ufffd!"), (r'{"a": "\ud83d\ude00"}', "\U0001f600")],
)
def test_half_a_surrogate_pair_in_arguments_is_replaced(written: str, arrives: str) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": written}}
    said = {"role": "assistant", "content": None, "tool_calls": [call]}
    answer = {"role": "tool", "tool_call_id": "c", "content": "1"}
    _, _, (asked,) = send(CHAT, {"messages": [*PLAIN[CHAT]["messages"], said, answer]})
    arguments = asked["messages"][1]["tool_calls"][0]["function"]["arguments"]
    assert json.loads(arguments) == {"a": arrives}
