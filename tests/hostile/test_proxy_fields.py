"""What walled code asks of the engine with its own key: only listed fields arrive there.

The engine keeps every request it gets. What constrains what is sampled: the run decides, and
nothing is too hard for the engine.
"""

import asyncio
import base64
import copy
import json
import os
import pty
import re
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import structlog
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from support.commands import ENVSERVER, environment_variables
from support.dialects import json_values, mangled
from support.extent import examples
from support.proxy_house import asgi_answer, house
from support.serving import attempt_spec
from support.waiting import PATIENCE

from envserver import TokensConfig
from envserver.models.engine import EngineRequest
from envserver.proxy.endpoint import EngineEndpoint
from envserver.proxy.server import Proxy
from envserver.telemetry.redaction import BURST_BYTES, BYTES_PER_SECOND

Json = dict[str, Any]

CHAT, TEXT = "v1/chat/completions", "v1/completions"
RESPONSES, MESSAGES = "v1/responses", "v1/messages"
METADATA = "http://169.254.169.254/latest/meta-data"
ANSWER: Json = {
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "Hi."}, "text": "Hi."}],
    "usage": {"completion_tokens": 1, "prompt_tokens": 1},
}
BACKTRACKS = "(a+)+$"
PLAIN: dict[str, Json] = {
    CHAT: {"messages": [{"role": "user", "content": "Hi."}]},
    TEXT: {"prompt": "Hi."},
    RESPONSES: {"input": "Hi."},
    MESSAGES: {"max_tokens": 9, "messages": [{"role": "user", "content": "Hi."}]},
}
CASES: Json = yaml.safe_load((Path(__file__).parent / "hostile_requests.yaml").read_text())
IMAGE = "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAf"
DIALECTS = pytest.mark.parametrize("path", PLAIN)


class RecordingEngine:
    """Answers the same to everything, and keeps what it was asked."""

    kind = "openai"
    exact = False

    def __init__(self) -> None:
        self.asked: list[Json] = []

    async def post(self, request: EngineRequest) -> Json:
        self.asked.append(request.body)
        return copy.deepcopy(ANSWER)

    @asynccontextmanager
    async def stream(self, request: EngineRequest) -> AsyncIterator[AsyncIterator[Json]]:
        raise AssertionError("Nothing here is streamed.")
        yield


def send(path: str, body: Json, **allowed: Any) -> tuple[int, Json, list[Json]]:
    """Returns the status and the answer, and what the engine was asked.

    Args:
        allowed: settings of the run, as of TokensConfig.
    """
    engine = RecordingEngine()
    endpoint = EngineEndpoint(engine, tokens=TokensConfig(**allowed))  # type: ignore[arg-type]

    proxy = Proxy(engine, endpoint=endpoint)  # type: ignore[arg-type]
    key = proxy.open(attempt_spec()).key
    status, answer = asyncio.run(asgi_answer(proxy, key, body, path=path))
    return status, json.loads(answer), engine.asked


def refused(path: str, body: Json, *words: str, **allowed: Any) -> None:
    """The request is refused in its dialect's form, and nothing arrives at the engine."""
    status, answer, asked = send(path, body, **allowed)
    assert (status, asked) == (400, [])
    error = answer["error"]
    assert error["type"] == "invalid_request_error" or error["code"] == "input"
    for word in words:
        assert word in error["message"]


def user(*parts: Json) -> Json:
    return {"role": "user", "content": list(parts)}


def chat(*parts: Json) -> tuple[str, Json]:
    return CHAT, {"messages": [user(*parts)]}


def part(url: Any, kind: str = "image_url") -> Json:
    return {"type": kind, kind: {"url": url}}


def calling(**call: Any) -> Json:
    return {"messages": [{"role": "assistant", "content": None, "tool_calls": [call]}]}


def function(name: str = "a", **fields: Any) -> Json:
    return {"type": "function", "function": {"name": name, **fields}}


# Messages


def shown(url: str) -> dict[str, tuple[str, Json]]:
    """Requests that show the model what lies at `url`."""
    image = {"type": "image", "source": {"type": "url", "url": url}}
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
    }


@pytest.mark.parametrize("way", shown(IMAGE))
def test_the_engine_fetches_nothing_for_an_agent(way: str) -> None:
    for url in CASES["urls"]:
        refused(*shown(url)[way], "url must begin with data:image/", "Let the environment fetch it")
    status, _, (asked,) = send(*shown(IMAGE)[way])  # by value it passes
    assert status == 200
    assert part(IMAGE) in asked["messages"][-1]["content"]


@pytest.mark.parametrize("hostile", CASES["parts"])
def test_no_other_part_of_a_message_names_what_the_engine_loads(hostile: Json) -> None:
    refused(*chat(hostile), "messages[0].content[0]")


@pytest.mark.parametrize("text", CASES["texts"])
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


LONG = "c" * 70_000
NESTED = [
    *CASES["nested"],
    (CHAT, calling(id=LONG, **function(arguments="")), "tool_calls[0].id"),
    (CHAT, {"messages": [{"role": "x" * 65, "content": "a"}]}, "messages[0].role"),
    (CHAT, {"messages": [{"role": "tool", "content": "a", "tool_call_id": LONG}]}, "tool_call_id"),
    (RESPONSES, {"input": "a", "reasoning": {"effort": "x" * 65}}, "reasoning.effort"),
    (TEXT, {"prompt": ["a"] * 128, "n": 2}, "n "),
    (
        "v1/messages/count_tokens",
        {"messages": [user()], "chat_template_kwargs": {"a": "x" * 20_000}},
        "chat_template_kwargs",
    ),
]


@pytest.mark.parametrize(("path", "body", "place"), NESTED)
def test_what_is_nested_has_types_and_bounds(path: str, body: Json, place: str) -> None:
    refused(path, body, place)


def test_only_listed_fields_of_what_is_nested_go_on() -> None:
    extra = {"uuid": "another rollout's image", "image_embeds": "x", "url": METADATA}
    held = {"type": "image_url", "image_url": {**extra, "url": IMAGE, "detail": "low"}, **extra}
    message = {**user(held, {"type": "text", "text": "a", **extra}), **extra, "media": [METADATA]}
    image = {"type": "image_url", "image_url": {"url": IMAGE, "detail": "low"}}
    call = {"id": "c", "type": "function", "function": {"name": "a", "arguments": "{}"}}
    made = {**call, "function": {"name": "a", "arguments": "{}", **extra}, **extra}
    said = {"role": "assistant", "content": None}
    tool = {"description": "A.", "parameters": {"type": "object"}}
    body = {
        "messages": [message, {**said, "tool_calls": [made], "reasoning_details": [extra]}],
        "tools": [{**function(**tool, **extra, server_label="x"), **extra}],
        "tool_choice": {**function(**extra), **extra},
    }
    status, _, (asked,) = send(CHAT, body)
    assert status == 200
    assert asked["messages"] == [
        user(image, {"type": "text", "text": "a"}),
        {**said, "tool_calls": [call]},
    ]
    assert (asked["tools"], asked["tool_choice"]) == ([function(**tool)], function())


def test_a_chat_may_allow_some_of_its_tools() -> None:
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [function()]}}
    body = {"messages": [user()], "tools": [function(), function("b")], "tool_choice": choice}
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


@DIALECTS
@pytest.mark.parametrize("name", CASES["control"])
def test_what_steers_the_engine_is_refused_by_name(path: str, name: str) -> None:
    refused(path, {**PLAIN[path], name: CASES["control"][name]}, name)


@DIALECTS
def test_what_clients_send_by_themselves_is_dropped(path: str) -> None:
    status, _, (asked,) = send(path, {**PLAIN[path], **CASES["dropped"]})
    _, _, (plain,) = send(path, PLAIN[path])
    assert (status, asked) == (200, plain)


FORWARDED: Json = CASES["forwarded"]
KNOWN = {
    *("model", "messages", "prompt", "max_tokens", "temperature", "top_p", "logprobs"),
    *(FORWARDED.keys() - {"stop_sequences", "max_output_tokens"}),
}


@settings(deadline=None, max_examples=examples(150))
@given(
    path=st.sampled_from(list(PLAIN)),
    extra=st.dictionaries(
        st.text(min_size=1, max_size=12) | st.sampled_from([*CASES["control"]]),
        json_values,
        max_size=3,
    ),
    listed=st.dictionaries(st.sampled_from(list(FORWARDED)), json_values, max_size=2),
    kept=st.lists(st.sampled_from(list(FORWARDED)), max_size=3),
)
def test_only_listed_fields_arrive(path: str, extra: Json, listed: Json, kept: list[str]) -> None:
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
    allowed: Any = {"constraints": "all"}
    allowed |= {"extra_fields": ["priority", "best_of", "model", "service_tier"]}
    more = {"priority": 5, "logit_bias": {"5": 1}, "user": "me", "service_tier": "flex"}
    _, _, (asked,) = send(path, {**PLAIN[path], **more}, **allowed)
    assert (asked["priority"], asked["logit_bias"], asked["model"]) == (5, {"5": 1}, "tiny")
    if path == CHAT:  # usually both are dropped
        assert (asked["service_tier"], "user" in asked) == ("flex", False)
    refused(path, {**PLAIN[path], "request_id": "x"}, "request_id", **allowed)
    refused(path, {**PLAIN[path], "best_of": 5}, "best_of", **allowed)
    refused(path, {**PLAIN[path], "logit_bias": {"x": 1}}, "logit_bias.x", **allowed)
    refused(path, {**PLAIN[path], "logit_bias": {"5": "x"}}, "logit_bias.5", **allowed)


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


# What constrains what is sampled


@pytest.mark.parametrize(("path", "fields"), CASES["constrained"])
def test_a_run_may_refuse_all_that_constrains_what_is_sampled(path: str, fields: Json) -> None:
    body = {**PLAIN[path], **fields}
    assert send(path, body)[0] == 200
    refused(path, body, "--tokens.constraints forms", constraints="none")
    assert send(path, PLAIN[path], constraints="none")[0] == 200


def enforced(schema: Json) -> list[tuple[str, Json]]:
    """Requests of three APIs whose answers the engine holds to `schema`."""
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    tool = {"type": "function", "name": "add", "parameters": schema, "strict": True}
    output = {"format": {"type": "json_schema", "schema": schema}}
    return [
        (CHAT, {**PLAIN[CHAT], "response_format": form}),
        (RESPONSES, {**PLAIN[RESPONSES], "tools": [tool]}),
        (MESSAGES, {**PLAIN[MESSAGES], "output_config": output}),
    ]


@pytest.mark.parametrize(
    "schema",
    [
        *CASES["schemas"],
        {"properties": {f"p{n}": {"pattern": "a{100}"} for n in range(11)}},
        {"enum": ["x" * 1000] * 280},
    ],
)
def test_a_schema_that_is_hard_for_the_engine_is_refused(schema: Json) -> None:
    for path, body in enforced(schema):
        status, _, asked = send(path, body)
        assert (status, asked) == (400, [])
        assert send(path, body, constraints="all")[0] == (400 if "enum" in schema else 200)


@pytest.mark.parametrize("name", ["$ref", "$dynamicRef", "$recursiveRef"])
@pytest.mark.parametrize("url", [METADATA, "file:///etc/passwd", "other.json", "//host/a#/b", ""])
def test_no_schema_refers_to_one_elsewhere(name: str, url: str) -> None:
    schema = {"type": "object", "properties": {"a": {"anyOf": [{name: url}]}}}
    tools: dict[str, Json] = {
        CHAT: function(parameters=schema),
        RESPONSES: {"type": "function", "name": "a", "parameters": schema},
        MESSAGES: {"name": "a", "input_schema": schema},
    }
    asked = [(path, {**PLAIN[path], "tools": [tool]}) for path, tool in tools.items()]
    space = {"type": "namespace", "name": "a", "tools": [tools[RESPONSES]]}
    asked.append((RESPONSES, {**PLAIN[RESPONSES], "tools": [space]}))
    for path, body in [*asked, *enforced(schema)]:
        for allowed in ("none", "forms", "all"):
            refused(path, body, "anyOf[0]." + name, constraints=allowed)
    refused(TEXT, {**PLAIN[TEXT], "guided_json": schema}, name, constraints="all")
    named = {"properties": {name: {"$ref": "#/$defs/a"}}, "$defs": {"a": {"type": "string"}}}
    assert send(CHAT, {**PLAIN[CHAT], "tools": [function(parameters=named)]})[0] == 200


def test_an_ordinary_pattern_passes_and_any_schema_that_nothing_enforces() -> None:
    for pattern in CASES["patterns"]:
        for path, body in enforced({"type": "string", "pattern": pattern}):
            assert send(path, body)[0] == 200
    itself = {"type": "object", "properties": {"a": {"$ref": "#/properties"}}}
    assert [send(*asked)[0] for asked in enforced(itself)] == [200] * 3
    body = {**PLAIN[CHAT], "tools": [function(parameters={"pattern": BACKTRACKS})]}
    assert send(CHAT, body)[0] == 200
    refused(CHAT, {**body, "tool_choice": "required"}, "parameters.pattern")


# What one rollout may write to the log and a terminal is bounded and harmless


async def test_a_rollout_cannot_fill_the_servers_log() -> None:
    async with house() as home:
        attempt, _ = home.open()
        began = time.monotonic()
        with structlog.testing.capture_logs() as logged:
            for _ in range(200):
                body = {"event": "a line", "facts": {"text": "x" * 60_000}}
                assert (await home.post(attempt.key, "log", body))[0] == 204
                assert (await home.post(attempt.key, "v1/embeddings", {}))[0] == 404
            home.proxy.seal(attempt)
            for _ in range(9):
                assert (await home.post(attempt.key, "v1/messages", {}))[0] == 409
    earned = (time.monotonic() - began) * BYTES_PER_SECOND
    assert len(json.dumps(logged)) < BURST_BYTES + earned
    events = [line["event"] for line in logged]
    (dropped,) = (line["lines"] for line in logged if line["event"] == "log_lines_dropped")
    assert events.count("a line") + dropped == 200
    assert events.count("call_after_seal") == 1
    assert attempt.late_calls == 9


FORGING = r"""
from envserver import Environment, Score, Task

FORGED = "\x1b[2J\x1b]0;owned\x07\u202e\n2026-01-01 00:00:00 [error    ] FORGED reward=1.0"

class Forging(Environment):
    def tasks(self, split):
        yield Task("task " + FORGED, {}, {})

    def task_from_question(self, question):
        return next(iter(self.tasks("train")))

    async def rollout(self, task, run):
        await run.chat([{"role": "user", "content": "hi"}])
        run.log("event " + FORGED, fact="fact" + FORGED, facts=[FORGED])
        print("printed " + FORGED.replace("\n", "\r"), flush=True)
        if run.rollout_id.endswith("1") and run.attempt == 1:
            raise ValueError("raised " + FORGED)
        return "an answer " + FORGED

    def score(self, task, result):
        return Score(reward=0.0)
"""


@pytest.mark.parametrize("form", ["console", "json"])
def test_a_rollout_forges_no_line_on_a_terminal(tmp_path: Path, form: str) -> None:
    (tmp_path / "forging.py").write_text(FORGING)
    shown = shown_on_a_terminal(
        tmp_path, "process", "--env", "forging.py", "--model", "sim", "--sim.latency_seconds", "0",
        "--workers.processes", "1", "--env.group_size", "2", "--env.total_steps", "1",
        "--log_format", form, "--env.data_path_to_save_groups", "out.jsonl",
    )  # fmt: skip
    assert_harmless(shown)
    for place in ("event", "fact", "printed", "raised", "task"):
        assert re.search(rf"{place}[ \\]", shown), place


def test_an_answer_is_harmless_on_a_terminal(tmp_path: Path) -> None:
    (tmp_path / "forging.py").write_text(FORGING)
    shown = shown_on_a_terminal(
        tmp_path, "run", "--env", "forging.py", "--model", "sim", "--question", "?"
    )
    assert "an answer" in shown
    assert not re.search(r"\x1b\[2J|\x1b\]|\x07|\u202e", shown)


def assert_harmless(shown: str) -> None:
    assert not re.search(r"\x1b\[2J|\x1b\]|\x07|\u202e", shown)
    lines = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line) for line in re.split(r"[\r\n]", shown)]
    assert not [line for line in lines if line.lstrip().startswith("2026-01-01")]
    assert any("FORGED" in line for line in lines)


def shown_on_a_terminal(folder: Path, *words: str) -> str:
    """Returns the output of the command in a terminal of 200 columns."""
    ours, theirs = pty.openpty()
    variables = environment_variables() | {"TERM": "xterm", "COLUMNS": "200"}
    process = subprocess.Popen(
        [ENVSERVER, *words], cwd=folder, env=variables, stdin=theirs, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    read = bytearray()
    while True:
        try:
            read += os.read(ours, 65536)
        except OSError:  # Linux says so when the last program at the terminal has ended
            break
    os.close(ours)
    assert process.wait(PATIENCE) == 0, read.decode(errors="replace")
    return read.decode(errors="replace")
