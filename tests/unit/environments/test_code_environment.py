"""The environment `code`: its tasks and where they come from, its agent, its cheats.

Rows of the data sets are in test_code_environment.toml.
"""

from __future__ import annotations

import asyncio
import json
import sys
import types
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from envserver_environments.code.cheats import SLOW, written
from envserver_environments.code.data_sets import read_problem
from envserver_environments.code.demonstrations import fenced
from envserver_environments.code.env import Code
from envserver_environments.code.loading import HUBS, SAMPLE
from envserver_environments.rows import Division
from support.cases import cases_of
from support.code_house import code
from support.scripted_run import ScriptedRun, call, says

from envserver import ConfigError, InputError, Message, Result, Sandboxes, Task

ROWS = cases_of(__file__)
BAD = ROWS.pop("bad")
OPC, MBPP = ROWS["opc"]["row"], ROWS["mbpp"]["row"]


async def reward(env: Code, task: Task, output: Any) -> float | None:
    return (await env.score(task, Result(output=output))).reward


def test_the_sample_has_the_documented_tasks_and_half_of_their_tests_is_hidden() -> None:
    text = SAMPLE.read_text(encoding="utf-8")
    rows = [json.loads(line) for line in text.splitlines()]
    assert Counter(row["category"] for row in rows) == {
        "strings": 8, "lists": 8, "arithmetic": 6, "dicts": 5, "recursion": 4, "floats": 3,
        "booleans": 3, "sorting": 3,
    }  # fmt: skip
    assert sum(len(row["testcase"]) >= 10 for row in rows) >= 2
    assert [len(row["testcase"]) for row in rows if row.get("visible") == 5] == [10, 10]
    for part in ("< 1e-9", "assert not", "== True", "== set()", "== (", "== {", "import "):
        assert part in text
    assert all(row["code"] in row["output"] and row["code"].isascii() for row in rows)
    tasks = list(Code().tasks("train"))
    assert {task.id for task in tasks} == {row["id"] for row in rows} and len(tasks) == 40
    for task in tasks:
        seen, hidden = task.public["tests"], task.hidden["tests"]
        assert 0 <= len(hidden) - len(seen) <= 2 and not set(seen) & set(hidden)
        known = [result.name for result in Code().known_results(task)]
        assert len(set(known)) == len(known) > 30


async def test_all_references_pass_and_agree_with_themselves(rooms: Sandboxes) -> None:
    env = code(rooms)

    async def check(task: Task) -> None:
        score = await env.score(task, Result(output=task.hidden["output"]))
        assert (score.reward, score.metrics["fuzz_agreement"]) == (1.0, 1.0), task.id

    await asyncio.gather(*(check(task) for task in env.tasks("train")))


async def test_obvious_solutions_pass_all_tests_but_one(rooms: Sandboxes) -> None:
    obvious = {
        "initials": "def initials(n): return ''.join(w[0].upper() + '.' for w in n.split(' '))",
        "leap_years": "def leap_years(a, b): return [y for y in range(a, b + 1) if y % 4 == 0]",
    }
    env = code(rooms)
    for task in env.tasks("test"):
        if program := obvious.pop(task.public["entry_point"], None):
            score = await env.score(task, Result(output=fenced(program)))
            tests = len(task.public["tests"] + task.hidden["tests"])
            assert score.reward == 0.0
            assert score.components["fraction"] == pytest.approx(1 - 1 / tests)
    assert obvious == {}


@pytest.mark.thorough
async def test_no_program_that_never_ends_is_rewarded_or_takes_the_scorer_with_it(
    rooms: Sandboxes,
) -> None:
    env = code(rooms)
    task = next(t for t in env.tasks("test") if t.public["entry_point"] == "is_balanced")
    programs = (fenced(written(program, "is_balanced")) for program in SLOW.values())
    rewards = await asyncio.gather(*(reward(env, task, program) for program in programs))
    assert set(rewards) == {0.0}
    assert await reward(env, task, task.hidden["output"]) == 1.0


# Where rows come from.

HUB = {
    "opc": ("OpenCoder-LLM/opc-sft-stage2", "educational_instruct", "train"),
    "mbpp": ("google-research-datasets/mbpp", "full", "test"),
    "mbpp_plus": ("evalplus/mbppplus", None, "test"),
    "humaneval": ("openai/openai_humaneval", None, "test"),
    "humaneval_plus": ("evalplus/humanevalplus", None, "test"),
}


@pytest.mark.parametrize("name", HUBS)
async def test_rows_of_each_shape_become_tasks_that_their_references_solve(
    rooms: Sandboxes, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row, asked = ROWS[name]["row"], []

    def load_dataset(path: str, config: str | None, *, split: str, streaming: bool) -> Any:
        asked.append((path, config, split))
        return [{**row, "n": n} for n in range(20)]

    (tmp_path / "test.jsonl").write_text(json.dumps(row))
    env = code(rooms, data_set=name, data_path=tmp_path)
    (task,) = env.tasks("test")
    assert (task.id, task.public["entry_point"]) == (f"{name}-0", "twice")
    assert len(task.public["tests"] + task.hidden["tests"]) == ROWS[name]["tests"]
    assert env.tests_left_out == (2 if name == "humaneval" else 0)
    assert task.public["data_set"] in (name, name.removesuffix("_plus"))
    (message,) = env.demonstration(task) or []
    assert await reward(env, task, message["content"]) == 1.0
    assert await reward(env, task, fenced("def twice(x): return x")) == 0
    # A bare row is read by its fields.
    assert read_problem(row).entry_point == "twice"
    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    (same,) = code(rooms, data_set=name).tasks("test")
    assert (same.public, same.hidden) == (task.public, task.hidden)
    assert asked == [HUB[name]]


async def test_a_program_has_what_the_prompt_of_its_task_defines(rooms: Sandboxes) -> None:
    env = code(rooms)
    task = env.task_from_row(ROWS["humaneval"]["row"])
    program = "def twice(xs: List[int]) -> List[int]:\n    return [x + x for x in xs]"
    assert await reward(env, task, fenced(program)) == 1.0


async def test_rows_that_are_no_good_are_dropped_and_counted(
    rooms: Sandboxes, tmp_path: Path
) -> None:
    bad = [*BAD.values(), {"instruction": "long " * 1000}]
    rows = [OPC, ["no object"], *({**OPC, **change} for change in bad)]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    env = code(rooms, data_set="opc", data_path=tmp_path)
    (task,) = env.tasks("train")
    assert task.hidden["code"] == OPC["code"]
    assert env.dropped.total() == len(rows) - 1
    assert env.dropped["the reference fails its own tests"] == 3
    assert env.dropped["no reference"] == 1
    unchecked = Code(Code.Config(data_set="opc", data_path=tmp_path, check_references=False))
    assert len(list(unchecked.tasks("train"))) == 5


def test_data_that_does_not_fit_is_a_clear_error(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": 1}\n' * 3)
    for check, words in ((False, "no usable row"), (True, "sandbox")):
        config = Code.Config(data_set="opc", data_path=path, check_references=check)
        with pytest.raises(ConfigError, match=words):
            next(Code(config).tasks("train"))
    for row, words in (
        ({"question": 1}, "no data set"),
        ({**MBPP, "test_setup_code": "root = Node(1)"}, "set-up"),
    ):
        with pytest.raises(InputError, match=words):
            Code().task_from_row(row)
    assert Code().task_from_row({**MBPP, "test_setup_code": "import math"})


def test_one_file_is_divided_into_splits_that_never_meet(tmp_path: Path) -> None:
    rows = [{**OPC, "instruction": f"Write double number {n}."} for n in range(100)]
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(rows))
    splits = ("train", "validation", "test")

    def ids(seed: int) -> list[set[str]]:
        config = Code.Config(data_set="opc", data_path=path, seed=seed, check_references=False)
        return [{task.id for task in Code(config).tasks(split)} for split in splits]

    assert ids(0) == ids(1) and list(map(len, ids(0))) == [85, 10, 5]
    assert len(set.union(*ids(0))) == 100
    assert [len(Division().numbers(8189, split)) for split in splits] == [6962, 818, 409]


# The agent.


async def played(rooms: Sandboxes, *turns: Message, **settings: Any) -> tuple[ScriptedRun, Any]:
    """Returns the run and the output of an agent that doubles numbers."""
    env = code(rooms, **{"mode": "tools", **settings})
    run = ScriptedRun(turns, rooms=rooms)
    run.spec = env.sandbox
    output = await env.rollout(env.task_from_row(OPC).without_hidden(), run)  # type: ignore[arg-type]
    return run, output


WRONG, RIGHT = "def twice(x):\n    return x * x", "def twice(x):\n    return x + x"
SUBMIT = call("submit", code=RIGHT)


async def test_tools_run_visible_tests_and_programs_and_end_by_submit(rooms: Sandboxes) -> None:
    run, output = await played(
        rooms,
        call("run_tests", code=WRONG),
        call("run_tests", code="def twice(x): return {}[x]"),
        call("run_tests", code=RIGHT),
        call("python", code="print(6 * 7)"),
        call("python", code="import os; print(os.listdir('/work')); 1 / 0"),
        SUBMIT,
        call("submit", code=WRONG),
    )
    assert output == {"code": RIGHT, "text": ""} and len(run.asked) == 6
    offered = [tool["function"]["name"] for tool in run.fields[None]["tools"]]
    assert offered == ["run_tests", "python", "submit"]
    results = run.told()
    assert results[0].startswith("0 of 1") and "it gave 1" in results[0]
    assert "KeyError: 1 (line 1)" in results[1]
    assert results[2] == "1 of 1 visible tests passed.\nassert twice(1) == 2\n  passed"
    assert results[3] == "[exit status 0]\n42\n"
    assert "ZeroDivisionError" in results[4] and results[4].startswith("[exit status 1]")
    assert "assert twice(2) == 4" not in json.dumps(run.asked)


async def test_a_text_with_a_block_ends_the_rollout_and_one_without_is_reminded(
    rooms: Sandboxes,
) -> None:
    turns = map(says, ("Let me think.", f"Here:\n{fenced(RIGHT)}", "never asked"))
    run, output = await played(rooms, *turns)
    assert output["code"] is None and RIGHT in output["text"] and len(run.asked) == 2
    assert "submit" in run.told(role="user")[-1]


async def test_turns_and_errors_are_bounded_and_a_cut_off_answer_is_not_acted_on(
    rooms: Sandboxes,
) -> None:
    for said in (
        call("python", code="print(1)"),
        call("shell", code="ls"),
        call("submit", program=RIGHT),
        call("submit", code="x" * 60_000),
    ):
        run, output = await played(rooms, *[said] * 12)
        assert output["code"] is None and len(run.asked) == 10
    _, output = await played(rooms, SUBMIT | {"finish": "length"})
    assert output["code"] is None


@pytest.mark.thorough
async def test_endless_programs_end_and_say_so(rooms: Sandboxes) -> None:
    endless = [call(name, code="while True: pass") for name in ("python", "run_tests")]
    run, _ = await played(rooms, *endless, SUBMIT)
    first, second = run.told()
    assert "CPU time" in first or "too long" in first  # on a busy machine
    assert "too long" in second


async def test_prompts_show_as_many_visible_tests_as_asked(rooms: Sandboxes) -> None:
    for shown, count in ((0, 0), ("1", 1), ("all", 1)):
        run, output = await played(rooms, says("no"), mode="single", show_tests=shown)
        prompt = run.told(role="user")[-1]
        assert output == {"code": None, "text": "no"} and not run.fields[None].get("tools")
        assert prompt.count("assert ") == count and "must be named `twice`" in prompt
