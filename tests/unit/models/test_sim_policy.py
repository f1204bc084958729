"""The simulated policy: correct as often as configured, varied answers, valid calls."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.sim import DEMONSTRATION, TOOLS, ask, engine, post, said, user

from envserver import SimConfig
from envserver.models import RolloutSolver, SimEngine, TextSolver
from envserver.models.sim.spoil import spoiled_answer


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
        [(await post(sim, ask()))["choices"][0]["message"]["content"] for _ in range(20)]
        for sim in (first, second, third)
    ]
    assert texts[0] == texts[1] != texts[2]
    assert len(set(texts[0])) > 15
    seeded = [(await post(first, ask(seed=7, n=2)))["choices"] for _ in range(2)]
    assert [c["token_ids"] for c in seeded[0]] == [c["token_ids"] for c in seeded[1]]
    assert seeded[0][0]["token_ids"] != seeded[0][1]["token_ids"]
    greedy = [(await post(first, ask(temperature=0)))["choices"] for _ in range(2)]
    assert greedy[0][0]["token_ids"] == greedy[1][0]["token_ids"]


async def test_rollouts_are_solved_as_often_as_asked_and_differ_in_length() -> None:
    solver = RolloutSolver()
    sim = SimEngine(SimConfig(latency_seconds=0, solve_probability=0.3), solver)
    played = []
    for number in range(400):
        solver.assign(f"rollout-{number}", DEMONSTRATION)
        played.append(await play(sim, f"rollout-{number}"))
        solver.forget(f"rollout-{number}")
    right = sum(answer == "36" for answer, _ in played)
    assert 80 < right < 160
    assert all(answer.isdigit() for answer, _ in played)
    assert len({tokens for _, tokens in played}) > 10
    assert solver.solve([], "rollout-1") is None


@pytest.mark.parametrize(("probability", "answers"), [(1.0, {"36"}), (0.0, set())])
async def test_certain_success_and_certain_failure(probability: float, answers: set[str]) -> None:
    sim = engine(DEMONSTRATION, solve_probability=probability)
    found = {(await play(sim, f"r{number}"))[0] for number in range(20)}
    assert found == answers if answers else "36" not in found


async def test_without_tools_the_last_call_becomes_the_answer_in_the_text() -> None:
    sim = engine(DEMONSTRATION, solve_probability=1.0)
    message = (await post(sim, ask()))["choices"][0]["message"]
    assert "tool_calls" not in message
    assert message["content"].endswith("The product is known.\n\\boxed{36}")


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
    answer = await post(sim, ask(tools=[measure], n=60, tool_choice="required"))
    for choice in answer["choices"]:
        assert choice["finish_reason"] == "tool_calls"
        for one in choice["message"]["tool_calls"]:
            jsonschema.validate(json.loads(one["function"]["arguments"]), parameters)
    free = await post(sim, ask(tools=[measure], n=60))
    kinds = {choice["finish_reason"] for choice in free["choices"]}
    assert kinds == {"stop", "tool_calls"}


def test_text_solver_takes_the_last_question_of_the_last_user() -> None:
    short, long, other = [said("1")], [said("2")], [said("3")]
    solver = TextSolver([("How many?", short), ("So: How many?", long), ("Who?", other)])

    def solved(*contents: str) -> Any:
        solution = solver.solve([{"role": "user", "content": text} for text in contents], "")
        return solution and solution.turns

    assert solved("Example. Who? Task. How many? Think.") is short
    assert solved("So: How many?") is long
    assert solved("So: How many?", "Who?") is other
    assert solved("Who?", "Go on.") is other
    assert solved("Nothing known") is None
