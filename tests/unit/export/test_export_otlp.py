"""`export --to otlp`: stored rollouts as traces at a receiver."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from support.delivered import line, write_lines
from support.extent import examples
from support.otlp_receiver import Traces, receiver, values

from envserver import main

CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"x": 1}'}}
TALK = [
    {"role": "system", "content": "You add."},
    {"role": "user", "content": "1 + 1?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "2"},
    {"role": "assistant", "content": "It is 2."},
]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    facts = {"messages": TALK, "usage": {"seconds": 3.0}}
    return write_lines(tmp_path / "run.jsonl", [line(0, (0.25, None), **facts)])


def send(source: Path, url: str, *words: str) -> int:
    return main(["export", str(source), "--to", "otlp", "--otlp_endpoint", url, *words])


def test_a_rollout_is_a_trace_of_calls_tools_and_reward(source: Path) -> None:
    with receiver() as traces:
        assert send(source, traces.url) == 0
        assert not any(b"You add" in body or b"It is 2" in body for body in traces.bodies)
        assert send(source, traces.url, "--otlp_texts") == 0
    assert len(traces.by_trace()) == 2
    for spans in traces.by_trace().values():
        silent, told = spans[: len(spans) // 2], spans[len(spans) // 2 :]
        assert [one.span_id for one in silent] == [one.span_id for one in told]  # sent again
        names = {one.span_id: one.name for one in told}
        assert [(one.name, names.get(one.parent_span_id)) for one in told] == [
            ("task", None),
            ("invoke_agent math", "task"),
            ("chat maker/model-1", "invoke_agent math"),
            ("execute_tool add", "invoke_agent math"),
            ("chat maker/model-1", "invoke_agent math"),
            ("score", "task"),
        ]
        root, agent, first, tool, last, _ = map(values, told)
        for one in (agent, first, tool, last):
            assert one["gen_ai.conversation.id"] == root["envserver.rollout_id"]
        assert json.loads(first["gen_ai.system_instructions"])[0]["content"] == "You add."
        assert tool["gen_ai.tool.call.arguments"] == '{"x": 1}'
        assert tool["gen_ai.tool.call.result"] == "2"
        (answer,) = json.loads(last["gen_ai.output.messages"])
        assert answer["parts"] == [{"type": "text", "content": "It is 2."}]
        begins = [one.start_time_unix_nano for one in told]
        assert begins == sorted(begins)
        assert told[0].end_time_unix_nano - told[0].start_time_unix_nano > 3_000_000_000
    scores = [values(one) for one in traces.spans() if one.name == "score"]
    rewards = {one.get("gen_ai.evaluation.score.value") for one in scores}
    assert rewards == {0.25, None}


JSON = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=4,
)
ANYTHING = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "tool"])},
    optional={
        "content": JSON,
        "reasoning_content": JSON,
        "tool_call_id": JSON,
        "tool_calls": JSON | st.lists(JSON | st.builds(lambda it: {"function": it}, JSON)),
    },
)


@pytest.fixture(scope="module")
def anybody() -> Iterator[Traces]:
    with receiver() as traces:
        yield traces


@settings(max_examples=examples(40), suppress_health_check=list(HealthCheck))
@given(
    messages=st.lists(ANYTHING, max_size=4),
    usage=st.dictionaries(st.sampled_from(["seconds", "scoring_seconds"]), JSON),
    started_at=st.floats(allow_nan=False, allow_infinity=False),
    tools=st.lists(st.dictionaries(st.sampled_from(["function", "name"]), JSON), max_size=2),
)
@example(messages=[], usage={"scoring_seconds": 1.7e10}, started_at=0.0, tools=[])
def test_whatever_a_file_holds_is_sent(
    anybody: Traces, tmp_path_factory: pytest.TempPathFactory, **facts: Any
) -> None:
    source = write_lines(tmp_path_factory.mktemp("in") / "run.jsonl", [line(0, (1.0,), **facts)])
    anybody.bodies.clear()
    assert send(source, anybody.url, "--otlp_texts") == 0
    assert anybody.spans()[0].name == "task"


def test_turns_have_their_own_times_where_they_are_stored(tmp_path: Path) -> None:
    timings = [
        {"kind": "engine", "started": 1.0, "seconds": 0.5, "name": "m", "call": 0},
        {
            "kind": "engine",
            "started": 2.25,
            "seconds": 0.25,
            "name": "m",
            "call": 1,
            "from": 9,
            "to": 12,
        },
    ]
    facts = {"messages": TALK, "usage": {"seconds": 3.0}, "started_at": 1_600_000_000.0}
    facts |= {"timings": timings, "agent_calls": {"": [0, 1]}}
    source = write_lines(tmp_path / "run.jsonl", [line(0, (1.0,), **facts)])
    with receiver() as traces:
        assert send(source, traces.url) == 0
    (spans,) = traces.by_trace().values()
    assert values(spans[0])["envserver.times"] == "measured"
    last = values(spans[4])
    assert (last["gen_ai.usage.input_tokens"], last["gen_ai.usage.output_tokens"]) == (9, 3)

    def seconds(nanoseconds: int) -> float:
        return round(nanoseconds / 1e9 - 1_600_000_000, 3)

    assert [
        (seconds(one.start_time_unix_nano), seconds(one.end_time_unix_nano)) for one in spans[1:5]
    ] == [(0.0, 3.0), (1.0, 1.5), (1.5, 2.25), (2.25, 2.5)]


def test_what_the_receiver_does_not_take_is_an_error(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with receiver() as traces:
        traces.status = 400
        assert send(source, traces.url) != 0
        assert f"{traces.url} did not take 12 spans" in capsys.readouterr().err
        assert send(source, traces.url, "--out", str(tmp_path / "out")) == 2
    assert main(["export", str(source), "--to", "otlp"]) == 2
    assert main(["export", str(source), "--to", "html"]) == 2
