"""Real files of published sets: which rows are read, and that their answers and no others are paid.

They are not part of this repository: ENVSERVER_PUBLISHED_ROWS names their folder.
"""

import asyncio
import os
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

import pytest
from envserver_environments.code.known import fenced
from envserver_environments.math.env import Math
from envserver_records.tasks import Json
from support.cases import cases_of
from support.code_house import code

from envserver import Result, Sandboxes, Task
from envserver.rows.sources import Source

ROOT = Path(__file__).parents[3]
FOLDER = Path(os.environ.get("ENVSERVER_PUBLISHED_ROWS") or ROOT.parent / "shared/data/published")
CASES = cases_of(__file__)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not FOLDER.is_dir(), reason=f"{FOLDER} has no published rows"),
]


def wrong_answers(task: Task) -> list[str]:
    """Other options; negated, tenfold and next numbers, where these differ by more than 1e-6."""
    gold: str = task.hidden["answer"]
    if options := task.public["options"]:
        return [letter for letter in "ABCDEFGHIJ"[: len(options)] if letter != gold]
    try:
        number = Decimal(gold)
    except InvalidOperation:
        return []
    others = (-number, 10 * number, number + 1)
    return [f"{other:f}" for other in others if abs(other - number) > abs(number) / 10**6]


def count_and_causes(rows: Any, used: int) -> Json:
    causes = {cause.partition(" (")[0]: count for cause, count in rows.dropped.items()}
    counted: Json = {"rows": used + rows.dropped.total(), "used": used}
    return counted | ({"causes": causes} if causes else {})


@pytest.mark.parametrize("name", CASES["math"])
def test_real_rows_of_mathematics_are_read_and_only_their_answers_are_paid(name: str) -> None:
    env = Math(Math.Config(data_path=FOLDER / name))
    tasks = list(env.tasks("train" if name == "mawps_csv" else "test"))
    assert count_and_causes(env.rows, len(tasks)) == CASES["math"][name]
    mistakes = [
        (task.hidden["answer"], answer)
        for task in tasks
        for answer in (task.hidden["answer"], *wrong_answers(task))
        if env.score(task, Result(output={"answer": answer, "text": ""})).reward
        != float(answer == task.hidden["answer"])
    ]
    assert mistakes == []


async def test_real_rows_of_programs_are_solved_by_their_references_only(rooms: Sandboxes) -> None:
    env = code(rooms, data_path=FOLDER / "humaneval" / "HumanEval.jsonl.gz")
    tasks = await asyncio.to_thread(lambda: list(env.tasks("test")))
    assert count_and_causes(env.rows, len(tasks)) == CASES["humaneval"]
    for task in tasks:
        name = task.public["entry_point"]
        empty = Result(output=fenced(f"def {name}(*given): pass"))
        assert (await env.score(task, empty)).reward == 0.0


def test_marks_of_real_answers_are_the_same_but_for_an_error_of_the_marker() -> None:
    env, rows = Math(), Source(str(FOLDER / "math_outputs" / "math_cot_100.jsonl")).open("test")
    others = []
    for row in map(rows.read, range(rows.count)):
        task = env.task_from_row({"question": row["question"], "answer": row["gt"]})
        for text, mark in zip(row["code"], row["score"], strict=True):
            if (env.score(task, env.response_from_row(text, [])).reward == 1.0) != mark:
                others.append(row["gt"])
    assert (rows.count, others) == (100, ["10{,}000"])
