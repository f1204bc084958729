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
from support.in_process import Run
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


FACTS: dict[str, Any] = {"messages": TALK, "usage": {"seconds": 3.0}}
SEND = "export run.jsonl --to otlp"


def test_a_rollout_is_a_trace_of_calls_tools_and_reward(run: Run) -> None:
    write_lines(Path("run.jsonl"), [line(0, (0.25, None), **FACTS)])
    with receiver() as traces:
        run(f"{SEND} --otlp_endpoint {traces.url}")
        assert not any(b"You add" in body or b"It is 2" in body for body in traces.bodies)
        run(f"{SEND} --otlp_endpoint {traces.url} --otlp_texts")
        traces.status = 400
        said = run(f"{SEND} --otlp_endpoint {traces.url}", status=1)
        assert f"{traces.url} did not take 12 spans" in said
        traces.bodies.pop()
        run(f"{SEND} --otlp_endpoint {traces.url} --out out", status=2)
    run(SEND, status=2)
    run("export run.jsonl --to html", status=2)
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
    words = f"--to otlp --otlp_endpoint {anybody.url} --otlp_texts"
    assert main(["export", str(source), *words.split()]) == 0
    assert anybody.spans()[0].name == "task"


def test_turns_have_their_own_times_where_they_are_stored(run: Run) -> None:
    engine = {"kind": "engine", "name": "m"}
    timings = [
        {**engine, "started": 1.0, "seconds": 0.5, "call": 0},
        {**engine, "started": 2.25, "seconds": 0.25, "call": 1, "from": 9, "to": 12},
    ]
    more = {"started_at": 1_600_000_000.0, "timings": timings, "agent_calls": {"": [0, 1]}}
    write_lines(Path("run.jsonl"), [line(0, (1.0,), **FACTS, **more)])
    with receiver() as traces:
        run(f"{SEND} --otlp_endpoint {traces.url}")
    (spans,) = traces.by_trace().values()
    assert values(spans[0])["envserver.times"] == "measured"
    last = values(spans[4])
    assert (last["gen_ai.usage.input_tokens"], last["gen_ai.usage.output_tokens"]) == (9, 3)
    times = [(one.start_time_unix_nano, one.end_time_unix_nano) for one in spans[1:5]]
    assert [tuple(round(at / 1e9 - 1_600_000_000, 3) for at in span) for span in times] == [
        (0.0, 3.0),
        (1.0, 1.5),
        (1.5, 2.25),
        (2.25, 2.5),
    ]
