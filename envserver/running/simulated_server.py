"""Gives the simulated engine the demonstrations of an environment, by their questions."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from envserver_local.simulated.policy import TextSolver
from envserver_records.records import Message, Split, Task

from ..environment import Environment
from ..rollouts.agents import demonstrated

_QUESTION_NAMES = ("question", "problem", "prompt", "instruction", "query", "text")


def demonstration_solver(
    environment: Environment, split: Split = "train", *, max_tasks: int = 10_000
) -> TextSolver:
    tasks = itertools.islice(environment.tasks(split), max_tasks)
    exact = environment.exact_demonstrations
    return TextSolver(_demonstrations(environment, tasks), exact=exact)


def question_text(task: Task) -> str:
    """Returns the text that identifies a prompt about `task`: its question, or its longest text."""
    texts = {name: value for name, value in task.public.items() if isinstance(value, str)}
    for name in _QUESTION_NAMES:
        if texts.get(name):
            return texts[name]
    return max(texts.values(), key=len, default="")


def _demonstrations(
    environment: Environment, tasks: Iterator[Task]
) -> Iterator[tuple[str, list[Message]]]:
    for task in tasks:
        roles = {name: role.trained for name, role in environment.agents().items()}
        for turns in list(demonstrated(environment, task, roles).values())[:1]:
            yield question_text(task), turns
