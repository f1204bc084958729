"""Inspect tasks with local data: plain questions, a tool, a sandbox, and what may go wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from inspect_ai import Task, task
from inspect_ai.dataset import Sample, json_dataset
from inspect_ai.scorer import Score, accuracy, includes, scorer
from inspect_ai.solver import generate, prompt_template, solver, use_tools
from inspect_ai.tool import bash
from inspect_ai.util import sandbox

DATA = str(Path(__file__).parent / "questions.jsonl")


@task
def questions():
    """Sums and differences, scored by two scorers."""
    return Task(
        dataset=json_dataset(DATA),
        solver=[prompt_template("{prompt} Count {unit}."), generate()],
        scorer=[includes(), graded_parts()],
    )


@scorer(metrics=[accuracy()])
def graded_parts():
    async def score(state: Any, target: Any) -> Score:
        right = float(target.text in state.output.completion)
        return Score(value={"right": right, "short": 0.5, "unit": state.metadata["unit"] != ""})

    return score


@scorer(metrics=[accuracy()])
def file_holds_answer():
    async def score(state: Any, target: Any) -> Score:
        text = await sandbox().read_file("answer.txt")
        return Score(value="C" if text.strip() == target.text else "P")

    return score


@task
def files(message_limit: int = 20, kind: str = "local"):
    """Write an answer into a file."""
    sample = Sample(
        id="file",
        input="Write 42 into answer.txt.",
        target="42",
        files={"answer.txt": "0"},
        setup="echo ready > state.txt",
    )
    return Task(
        dataset=[sample],
        solver=[use_tools(bash(timeout=20)), generate()],
        scorer=file_holds_answer(),
        sandbox=kind,
        message_limit=message_limit,
    )


@scorer(metrics=[accuracy()])
def broken():
    async def score(state: Any, target: Any) -> Score:
        raise RuntimeError("the grader's library is missing")

    return score


@task
def unscorable():
    """A task whose scorer raises."""
    return Task(dataset=json_dataset(DATA)[:1], scorer=broken())


@solver
def peeks():
    async def solve(state: Any, generate: Any) -> Any:
        state.messages[-1].content += f" (It is {state.target.text}.)"
        return await generate(state)

    return solve


@task
def told():
    """A task whose solver needs the target."""
    return Task(dataset=json_dataset(DATA)[:1], solver=peeks(), scorer=includes())
