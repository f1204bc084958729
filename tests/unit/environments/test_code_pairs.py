"""The environment `code` with tests that are inputs and outputs: of programs, and of functions."""

import asyncio
import base64
import json
import pickle
import re
import zlib
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from envserver_environments.code.agent import Workbench
from envserver_environments.code.data_sets import read_problem
from envserver_environments.code.env import Code
from envserver_environments.code.extraction import extract_code
from envserver_environments.code.known import fenced
from envserver_environments.code.prompts import question
from envserver_environments.code.running import SPEC, same_lines
from support.cases import cases_of, write_jsonl
from support.code_house import code
from support.waiting import PATIENCE

from envserver import InputError, Result, Sandboxes

CASES = cases_of(__file__)
ROWS, FUNCTIONS, PUBLISHED = CASES["programs"], CASES["functions"], CASES["published"]
TESTS = ROWS["tests"]
SUM, PAIRS, TEXT = TESTS["code"], TESTS["tests"], TESTS["instruction"]
SUMS = cases_of(__file__, "test_code_scoring.toml")["sums"]
"""Programs by the share of PAIRS that they pass."""


def packed(tests: Any) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(tests)))).decode()


ROWS["cases"]["private_test_cases"] = packed(ROWS["cases"]["private_test_cases"])


@pytest.mark.parametrize("name", ROWS)
async def test_rows_of_programs_become_tasks_that_only_a_solution_solves(
    rooms: Sandboxes, name: str
) -> None:
    env = code(rooms)
    task = env.task_from_row(ROWS[name])
    assert task.public["entry_point"] == ""
    if "lines" not in name:
        assert (task.public["tests"], task.hidden["tests"]) == (PAIRS[:2], PAIRS[2:])
    assert task.hidden["code"] == SUM
    for program, reward in ((SUM, 1.0), (f"{SUM}\nprint(1)", 0.0), ("print(3)", 0.0)):
        assert (await env.score(task, Result(output=fenced(program)))).reward == reward


@pytest.mark.parametrize("name", FUNCTIONS)
async def test_rows_that_name_a_function_are_calls(rooms: Sandboxes, name: str) -> None:
    env = code(rooms)
    task = env.task_from_row(FUNCTIONS[name])
    assert task.public["tests"] == ["assert close(add(*[1, 2]), 3)"]
    assert task.hidden["tests"] == ["assert close(add(*[3, 4]), 7)"]
    hint = ": List[int]" if name == "cases" else ""
    method = f"class Solution:\n    def add(self, a{hint}, b): return a + b"
    programs = {"def add(a, b): return a + b": 1.0, method: 1.0, "def add(a, b): return 3": 0.0}
    for program, reward in programs.items():
        assert (await env.score(task, Result(output=fenced(program)))).reward == reward
    if name == "cases":
        assert "class Solution" in question(task.public, "single", "0")


@pytest.mark.parametrize("name", PUBLISHED)
def test_rows_of_published_layouts_are_read_or_refused_with_a_reason(name: str) -> None:
    case = PUBLISHED[name]
    if "refused" in case:
        with pytest.raises(InputError, match=re.escape(case["refused"])):
            read_problem(case["row"])
        return
    found = read_problem(case["row"])
    assert (found.entry_point, found.tests[-1]) == (case["entry_point"], case["last"])
    assert [found.visible, len(found.tests)] == case["tests"]
    assert (found.code is not None) == case["has_code"]


def test_columns_name_unknown_fields() -> None:
    row = {"task": "Add.", "checks": PAIRS, "answer_key": SUM}
    columns = {"instruction": "task", "tests": "checks", "code": "answer_key"}
    found = read_problem(row, columns=columns)
    assert (found.instruction, found.code, len(found.tests)) == ("Add.", SUM, 4)
    with pytest.raises(InputError, match=r"instruction .*task, checks.*--env.columns"):
        read_problem(row)


def test_rows_that_are_no_pairs_are_refused_and_packed_tests_run_no_code(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "never",))

    for change in CASES["no_cases"]:
        with pytest.raises(InputError):
            Code().task_from_row({**ROWS["apps"], "input_output": change})
    with pytest.raises(InputError):
        Code().task_from_row({**ROWS["apps"], "question": ""})
    for content in (pickle.dumps(Evil()), pickle.dumps([1]), b"no pickle", b""):
        text = base64.b64encode(zlib.compress(content)).decode()
        with pytest.raises(InputError):
            read_problem({**ROWS["cases"], "private_test_cases": text})
    assert not (tmp_path / "never").exists()


def test_tests_are_bounded_and_each_is_there_once() -> None:
    large = [{"input": str(n) * 10_000, "output": "x"} for n in range(100)]
    found = read_problem(
        {**TESTS, "tests": [*PAIRS, *PAIRS, *large, {"input": "9" * 2**21, "output": ""}]}
    )
    assert (len(found.tests), found.visible, found.left_out) == (40, 20, 69)
    assert read_problem(ROWS["contests"]).seconds == 2.5
    assert read_problem({**TESTS, "time_limit": 3}).seconds == 3.0


def test_lines_are_compared_but_for_blanks_at_ends_and_nearly_equal_decimals() -> None:
    for name, same in (("same", True), ("other", False)):
        for printed, wanted in CASES["lines"][name]:
            assert same_lines(printed.encode(), wanted) == same, (printed, wanted)
    assert not same_lines(b"\xff", "\xff")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (f"```python\n{SUM}\n```\nIt prints:\n```\n3\n```", f"{SUM}\n"),
        (f"```python\nx = 1\n```\n```python\n{SUM}\n```", f"{SUM}\n"),
        (f"```python\n{SUM}\n```\n```python\nfor x in\n```", f"{SUM}\n"),
        (SUM, None),
    ],
)
def test_the_program_of_an_answer_is_found(text: str, found: str | None) -> None:
    assert extract_code(text, "") == found


@pytest.mark.thorough
async def test_programs_get_the_share_of_tests_that_they_pass_and_no_cheat_is_rewarded(
    rooms: Sandboxes,
) -> None:
    env = code(rooms)
    task = env.task_from_row(TESTS)
    known = list(env.known_results(task))
    assert len(known) > 20
    programs = {
        name: (program, float(Fraction(share)))
        for share, named in SUMS.items()
        for name, program in named.items()
    }
    results = [Result(output=fenced(program)) for program, _ in programs.values()]
    results += [one.result for one in known]
    scores = await asyncio.gather(*(env.score(task, result) for result in results))
    for (name, (_, share)), score in zip(programs.items(), scores, strict=False):
        assert (score.components["fraction"], score.reward) == (share, float(share == 1.0)), name
    wrong = [
        (one.name, score.reward)
        for one, score in zip(known, scores[len(programs) :], strict=True)
        if score.reward is None or not one.least <= score.reward <= one.most
    ]
    assert wrong == []


async def test_slow_programs_take_bounded_time(rooms: Sandboxes) -> None:
    tests = [{"input": str(n), "output": str(n)} for n in range(30)]
    env = code(rooms)
    task = env.task_from_row({**TESTS, "tests": tests, "time_limit": 1})
    async with asyncio.timeout(PATIENCE):
        endless = Result(output=fenced("while True: pass"))
        assert (await env.score(task, endless)).reward == 0.0


async def test_rows_of_a_file_are_tasks_and_bad_ones_are_counted(
    rooms: Sandboxes, tmp_path: Path
) -> None:
    wrong = [{"input": "1", "output": "2"}, {"input": "2", "output": "3"}]
    same = [{"input": "1 2", "output": "3"}, {"input": "3", "output": "3\n"}]
    rows = [
        TESTS, {**TESTS, "question": TEXT, "instruction": "Wrong."},
        {**TESTS, "instruction": "Always the same.", "tests": same},
        {**TESTS, "instruction": "Fails.", "tests": wrong}, {**TESTS, "tests": PAIRS[:1]},
    ]  # fmt: skip
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    env = code(rooms, data_set="pairs", data_path=path)
    assert [task.id for task in env.tasks("train")] == ["pairs-0", "pairs-1"]
    assert dict(env.rows.dropped) == {
        "A program that always gives the same passes its tests.": 1,
        "the reference fails its own tests": 1,
        "The row has fewer than two tests.": 1,
    }


async def test_tools_and_prompts_show_the_visible_pairs_only(rooms: Sandboxes) -> None:
    env = code(rooms)
    task = env.task_from_row(TESTS)
    asked = question(task.public, "single", "1")
    assert "Input:\n```\n1 2\n```\nOutput:\n```\n3\n```" in asked
    assert "3 4 5" not in asked and "named" not in asked and "standard input" in asked
    async with env.sandboxes.open(SPEC) as sandbox:
        bench = Workbench(task.without_hidden(), sandbox)
        run = bench.run_tests.function
        assert (await run(code=SUM)).startswith("2 of 2 visible tests passed.")
        told = await run(code="print(input()[5])")
    assert told.startswith("0 of 2") and "IndexError" in told and "'5\\n'" not in told
    assert "-1 1" not in told
