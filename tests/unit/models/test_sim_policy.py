"""The simulated policy: correct as often as configured, wrong at declared rates, valid calls.

It plays exactly what it is given, and recordings.
"""

from __future__ import annotations

import json
import random
from datetime import date
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from envserver_records.errors import ConfigError, EngineRefused
from hypothesis import given
from hypothesis import strategies as st
from support.sim import DEMONSTRATION, TOOLS, ask, call, engine, post, said, tool, user

from envserver import SimConfig, aio
from envserver.models import RolloutSolver, SimEngine
from envserver.models.sim.faulty_answers import REFUSALS
from envserver.models.sim.spoil import spoiled_answer

SIZES = tool(
    "choose",
    size={"enum": ["small", "large"]},
    count={"type": "integer", "minimum": 1},
    day={"type": "string", "format": "date"},
)


def playing(turns: list[dict[str, Any]], **config: Any) -> SimEngine:
    """An engine whose rollout `r` has these turns."""
    solver = RolloutSolver()
    solver.assign("r", turns, exact=True)
    return SimEngine(SimConfig(latency_seconds=0, **config), solver)


async def choices(sim: SimEngine, rollout_id: str = "r", **fields: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = (await post(sim, ask(**fields), rollout_id=rollout_id))["choices"]
    return found


async def message(sim: SimEngine, rollout_id: str = "r", **fields: Any) -> dict[str, Any]:
    found: dict[str, Any] = (await choices(sim, rollout_id, **fields))[0]["message"]
    return found


async def after(
    sim: SimEngine, messages: list[dict[str, Any]], rollout_id: str = "r", **fields: Any
) -> dict[str, Any]:
    """What is said after `messages`."""
    answer = await post(sim, ask(**fields) | {"messages": messages}, rollout_id=rollout_id)
    found: dict[str, Any] = answer["choices"][0]["message"]
    return found


def arguments_of(message: dict[str, Any]) -> list[Any]:
    return [json.loads(one["function"]["arguments"]) for one in message["tool_calls"]]


async def play(sim: SimEngine, rollout_id: str) -> tuple[str, int]:
    """The answer an agent with tools is given in the end, and how many tokens it took."""
    messages, tokens = user(), 0
    for _ in range(3):
        answer = await post(sim, ask(tools=TOOLS) | {"messages": messages}, rollout_id=rollout_id)
        message = answer["choices"][0]["message"]
        tokens += answer["usage"]["completion_tokens"]
        messages.append(message)
        for one in message["tool_calls"]:
            if one["function"]["name"] == "finish":
                return json.loads(one["function"]["arguments"])["answer"], tokens
            messages.append({"role": "tool", "tool_call_id": one["id"], "content": "36"})
    raise AssertionError("the demonstration ends after two turns")


async def test_the_same_seed_answers_alike_and_samples_differ() -> None:
    first, second, third = engine(seed=1), engine(seed=1), engine(seed=2)
    texts = [
        [(await message(sim, ""))["content"] for _ in range(20)] for sim in (first, second, third)
    ]
    assert texts[0] == texts[1] != texts[2]
    assert len(set(texts[0])) > 15
    seeded, again = [await choices(first, seed=7, n=2) for _ in range(2)]
    assert [c["token_ids"] for c in seeded] == [c["token_ids"] for c in again]


async def test_rollouts_are_solved_as_often_as_asked_and_differ_in_length() -> None:
    solver = RolloutSolver()
    sim = SimEngine(SimConfig(latency_seconds=0, solve_probability=0.3), solver)
    played = []
    for number in range(400):
        solver.assign(f"rollout-{number}", DEMONSTRATION)
        played.append(await play(sim, f"rollout-{number}"))
        solver.forget(f"rollout-{number}")
    assert 80 < sum(answer == "36" for answer, _ in played) < 160
    assert all(answer.isdigit() for answer, _ in played)
    assert len({tokens for _, tokens in played}) > 10
    assert solver.solve([], "rollout-1") is None


@given(st.one_of(st.integers().map(str), st.sampled_from(
    ["B", "yes", "True", "\\frac{1}{2}", "(1,2)", "\\pi", "Paris", "x", "0.50", "1,234", "", "∅"])),
    st.integers())  # fmt: skip
def test_a_spoiled_answer_is_never_the_answer(answer: str, seed: int) -> None:
    spoiled = spoiled_answer(answer, random.Random(seed))
    assert spoiled.strip().lower() != answer.strip().lower()
    if answer.lstrip("-").isdigit():
        assert int(spoiled) != int(answer)


async def test_babbled_calls_obey_the_schema() -> None:
    parameters = {
        "type": "object",
        "properties": {
            "unit": {"enum": ["metre", "mile"]},
            "count": {"type": "integer", "minimum": 3, "exclusiveMaximum": 6},
            "share": {"type": "number", "multipleOf": 0.25, "maximum": 1},
            "note": {"type": ["string", "null"], "minLength": 8, "maxLength": 12},
            "tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}, "minItems": 2},
            "either": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
        },
        "required": ["unit", "count", "share", "note", "tags", "either"],
        "additionalProperties": False,
        "$defs": {"tag": {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}},
    }
    measure = {"type": "function", "function": {"name": "measure", "parameters": parameters}}
    sim = engine()
    for choice in await choices(sim, "", tools=[measure], n=60, tool_choice="required"):
        assert choice["finish_reason"] == "tool_calls"
        for arguments in arguments_of(choice["message"]):
            jsonschema.validate(arguments, parameters)
    free = await choices(sim, "", tools=[measure], n=60)
    assert {choice["finish_reason"] for choice in free} == {"stop", "tool_calls"}


async def test_a_spoiled_call_is_wrong_and_still_one_of_the_tool() -> None:
    right = {"size": "small", "count": 3, "day": "2024-05-17"}
    sim = engine([said(None, call("choose", right))], solve_probability=0.0)
    for choice in await choices(sim, "", tools=[SIZES], n=40):
        arguments = arguments_of(choice["message"])[0]
        jsonschema.validate(arguments, SIZES["function"]["parameters"])
        assert arguments != right
    for choice in await choices(engine(), "", tools=[SIZES], n=10, tool_choice="required"):
        assert date.fromisoformat(arguments_of(choice["message"])[0]["day"])


async def test_rates_of_one_make_every_answer_go_wrong() -> None:
    turns = [said('{"answer": 36}')]
    assert (await message(playing(turns, refusal_rate=1.0)))["content"] in REFUSALS
    answer = await post(playing(turns, repetition_rate=1.0), ask(max_tokens=500), rollout_id="r")
    choice = answer["choices"][0]
    assert (choice["finish_reason"], answer["usage"]["completion_tokens"]) == ("length", 500)
    assert len(set(choice["token_ids"])) < 40
    for seed in range(20):
        text = (await message(playing(turns, broken_json_rate=1.0, seed=seed)))["content"]
        with pytest.raises(json.JSONDecodeError):
            json.loads(text)


async def test_malformed_calls_are_cut_off_unknown_or_incomplete() -> None:
    kinds = set()
    for seed in range(30):
        sim = playing(DEMONSTRATION, malformed_call_rate=1.0, seed=seed)
        answer = await message(sim, tools=TOOLS)
        calls = answer.get("tool_calls") or []
        if not calls:
            assert answer["content"].startswith("<tool_call>")
            kinds.add("cut off")
        elif calls[0]["function"]["name"] != "calculate":
            kinds.add("unknown")
        else:
            assert arguments_of(answer)[0] == {}
            kinds.add("incomplete")
        forced = await message(sim, tools=TOOLS, tool_choice="required")
        assert forced["tool_calls"][0]["function"]["name"] == "calculate"
    assert kinds == {"cut off", "unknown", "incomplete"}


async def test_a_transcript_is_played_turn_by_turn(tmp_path: Path) -> None:
    first = [*user(), said(None, call("calculate", {"expression": "3*12"})), said("It is 36.")]
    first.insert(2, {"role": "tool", "tool_call_id": "call_1", "content": "36"})
    recorded = [first, [*user(), said("No idea.")]]
    path = tmp_path / "recorded.jsonl"
    path.write_text("".join(json.dumps({"messages": one}) + "\n" for one in recorded))
    sim = SimEngine(SimConfig(latency_seconds=0, transcript=path))
    turn = await message(sim, "a", tools=TOOLS)
    assert turn["tool_calls"][0]["function"]["name"] == "calculate"
    assert (await message(sim, "b", tools=TOOLS))["content"] == "No idea."  # the other rollout
    assert (await message(sim, "a", tools=TOOLS))["tool_calls"]  # its retry: the same again
    history = [*user(), turn, {"role": "tool", "tool_call_id": "x", "content": "36.0"}]
    # A tool may answer differently now; without a rollout (HTTP) what was said so far decides.
    for rollout_id in ("a", ""):
        assert (await after(sim, history, rollout_id, tools=TOOLS))["content"] == "It is 36."
    with pytest.raises(EngineRefused, match="no turn 3"):
        await after(sim, [*history, said("It is 36."), *user("More?")], "a")
    with pytest.raises(EngineRefused, match="begins so: 'Who"):
        await message(sim, "c", text="Who are you?")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "holds no conversation"),
        ('{"messages": []}\n{"messages"', "line 2: it is not JSON"),
        ('{"messages": [{"content": "no role"}]}', "role"),
        (None, "cannot be read"),
    ],
)
def test_a_transcript_without_answers_is_refused_with_its_place(
    tmp_path: Path, content: str | None, words: str
) -> None:
    if content is not None:
        (tmp_path / "bad.jsonl").write_text(content)
    with pytest.raises(ConfigError, match=words):
        SimEngine(SimConfig(transcript=tmp_path / "bad.jsonl"))


@pytest.mark.thorough
async def test_a_file_of_process_is_its_own_transcript(tmp_path: Path) -> None:
    """Every rollout says again what it said, with several agents, and has the same rewards."""

    async def rewards(**sim: Any) -> list[Any]:
        out = tmp_path / f"{len(sim)}.jsonl"
        done = await aio.process(
            "kuhn",
            model="sim",
            env={"total_steps": 3, "group_size": 2, "data_path_to_save_groups": out},
            sim={"latency_seconds": 0, **sim},
        )
        return [
            sorted(trajectory.score.reward for trajectory in group.trajectories)
            for group in sorted(done.groups, key=lambda group: group.index)
        ]

    recorded = await rewards(seed=5)
    assert await rewards(seed=6, transcript=tmp_path / "1.jsonl") == recorded
