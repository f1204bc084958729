"""The simulated engine plays exactly what it is given, goes wrong at declared rates, and plays
recordings."""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from envserver_records.errors import ConfigError, EngineRefused
from support.sim import DEMONSTRATION, TOOLS, ask, call, engine, post, said, tool, user

from envserver import SimConfig, aio
from envserver.models import RolloutSolver, SimEngine
from envserver.models.sim.faulty_answers import REFUSALS

SIZES = tool(
    "choose",
    size={"enum": ["small", "large"]},
    count={"type": "integer", "minimum": 1},
    day={"type": "string", "format": "date"},
)


def playing(turns: list[dict[str, Any]], *, exact: bool = True, **config: Any) -> SimEngine:
    """An engine whose rollout `r` has these turns."""
    solver = RolloutSolver()
    solver.assign("r", turns, exact=exact)
    return SimEngine(SimConfig(latency_seconds=0, **config), solver)


async def message(sim: SimEngine, rollout_id: str = "r", **fields: Any) -> dict[str, Any]:
    answer = await post(sim, ask(**fields), rollout_id=rollout_id)
    found: dict[str, Any] = answer["choices"][0]["message"]
    return found


async def test_an_exact_demonstration_is_played_word_for_word() -> None:
    moves = [said("bet"), said("pass")]
    sim = playing(moves, solve_probability=1.0)
    seen = [(await message(sim))["content"] for _ in range(20)]
    assert seen == ["bet"] * 20
    history = [*user(), said("bet"), *user("Next?")]
    for _ in range(3):  # after the last turn it is said again, without words of its own
        answer = await post(sim, ask() | {"messages": history}, rollout_id="r")
        assert answer["choices"][0]["message"]["content"] == "pass"
        history += [said("pass"), *user("Next?")]
    worded = [(await message(playing(moves, exact=False)))["content"] for _ in range(20)]
    assert any(text != "bet" for text in worded)


async def test_a_spoiled_call_is_wrong_and_still_one_of_the_tool() -> None:
    right = {"size": "small", "count": 3, "day": "2024-05-17"}
    answer = await post(
        engine([said(None, call("choose", right))], solve_probability=0.0),
        ask(tools=[SIZES], n=40),
    )
    wrong = [
        json.loads(one["message"]["tool_calls"][0]["function"]["arguments"])
        for one in answer["choices"]
    ]
    for arguments in wrong:
        jsonschema.validate(arguments, SIZES["function"]["parameters"])
        assert arguments != right
    drawn = await post(engine(), ask(tools=[SIZES], n=10, tool_choice="required"))
    for one in drawn["choices"]:
        call_of = one["message"]["tool_calls"][0]["function"]
        assert date.fromisoformat(json.loads(call_of["arguments"])["day"])


async def test_rates_of_one_make_every_answer_go_wrong() -> None:
    play = [said('{"answer": 36}')]
    refused = await message(playing(play, refusal_rate=1.0))
    assert refused["content"] in REFUSALS

    answer = await post(playing(play, repetition_rate=1.0), ask(max_tokens=500), rollout_id="r")
    choice = answer["choices"][0]
    assert (choice["finish_reason"], answer["usage"]["completion_tokens"]) == ("length", 500)
    assert len(set(choice["token_ids"])) < 40

    for seed in range(20):
        text = (await message(playing(play, broken_json_rate=1.0, seed=seed)))["content"]
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
            assert json.loads(calls[0]["function"]["arguments"]) == {}
            kinds.add("incomplete")
        forced = await message(sim, tools=TOOLS, tool_choice="required")
        assert forced["tool_calls"][0]["function"]["name"] == "calculate"
    assert kinds == {"cut off", "unknown", "incomplete"}


async def test_a_share_of_the_answers_goes_wrong_and_the_others_are_as_before() -> None:
    plain, some = playing([said("36")], seed=3), playing([said("36")], seed=3, refusal_rate=0.3)
    pairs = [[(await message(sim))["content"] for sim in (plain, some)] for _ in range(200)]
    changed = [now for then, now in pairs if now != then]
    assert 30 < len(changed) < 90 and set(changed) <= set(REFUSALS)


def recording(path: Path, *conversations: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps({"messages": one}) + "\n" for one in conversations))
    return path


async def test_a_transcript_is_played_turn_by_turn(tmp_path: Path) -> None:
    first = [*user(), said(None, call("calculate", {"expression": "3*12"})), said("It is 36.")]
    first.insert(2, {"role": "tool", "tool_call_id": "call_1", "content": "36"})
    path = recording(tmp_path / "recorded.jsonl", first, [*user(), said("No idea.")])
    sim = SimEngine(SimConfig(latency_seconds=0, transcript=path))
    turn = await message(sim, "a", tools=TOOLS)
    assert turn["tool_calls"][0]["function"]["name"] == "calculate"
    assert (await message(sim, "b", tools=TOOLS))["content"] == "No idea."  # the other rollout
    assert (await message(sim, "a", tools=TOOLS))["tool_calls"]  # its retry: the same again
    result = {"role": "tool", "tool_call_id": "x", "content": "36.0"}
    # A tool may answer differently now; without a rollout (HTTP) what was said so far decides.
    for rollout_id in ("a", ""):
        body = ask(tools=TOOLS) | {"messages": [*user(), turn, result]}
        answer = await post(sim, body, rollout_id=rollout_id)
        assert answer["choices"][0]["message"]["content"] == "It is 36."
    history = [*user(), turn, result, said("It is 36."), *user("More?")]
    with pytest.raises(EngineRefused, match="no turn 3"):
        await post(sim, ask() | {"messages": history}, rollout_id="a")
    with pytest.raises(EngineRefused, match="begins so: 'Who"):
        await message(sim, "c", text="Who are you?")


async def test_a_transcript_without_answers_is_refused_with_its_place(tmp_path: Path) -> None:
    for content, words in (
        ("", "holds no conversation"),
        ('{"messages": []}\n{"messages"', "line 2: it is not JSON"),
        ('{"messages": [{"content": "no role"}]}', "role"),
    ):
        (tmp_path / "bad.jsonl").write_text(content)
        with pytest.raises(ConfigError, match=words):
            SimEngine(SimConfig(transcript=tmp_path / "bad.jsonl"))
    with pytest.raises(ConfigError, match="cannot be read"):
        SimEngine(SimConfig(transcript=tmp_path / "missing.jsonl"))


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
