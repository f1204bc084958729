"""The environment `code`: its tasks and where they come from, its agent, its cheats.

Rows of the data sets are in test_code_environment.toml.
"""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from envserver_environments.code.data_sets import HUBS, read_problem
from envserver_environments.code.env import Code
from envserver_environments.code.known import SLOW, fenced, written
from support.cases import cases_of, write_jsonl
from support.code_house import code
from support.scripted_run import ScriptedRun, call, says

from envserver import Message, Result, Sandboxes, Task

ROWS = cases_of(__file__)
BAD = ROWS.pop("bad")
OPC = ROWS["opc"]["row"]


async def reward(env: Code, task: Task, output: Any) -> float | None:
    return (await env.score(task, Result(output=output))).reward


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


@pytest.mark.parametrize("name", HUBS)
async def test_rows_of_each_shape_become_tasks_that_their_references_solve(
    rooms: Sandboxes, name: str, tmp_path: Path
) -> None:
    row = ROWS[name]["row"]
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
    write_jsonl(tmp_path / "train.jsonl", rows)
    env = code(rooms, data_set="opc", data_path=tmp_path)
    (task,) = env.tasks("train")
    assert task.hidden["code"] == OPC["code"]
    assert env.rows.dropped.total() == len(rows) - 1
    assert env.rows.dropped["the reference fails its own tests"] == 3
    assert (
        env.rows.dropped["it has no reference solution (--env.check_references false keeps it)"]
        == 1
    )
    unchecked = Code(Code.Config(data_set="opc", data_path=tmp_path, check_references=False))
    assert len(list(unchecked.tasks("train"))) == 5


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


@pytest.mark.thorough
async def test_endless_programs_end_and_say_so(rooms: Sandboxes) -> None:
    endless = [call(name, code="while True: pass") for name in ("python", "run_tests")]
    run, _ = await played(rooms, *endless, SUBMIT)
    first, second = run.told()
    assert "CPU time" in first or "too long" in first  # on a busy machine
    assert "too long" in second
