"""The texts that the model gets; the system prompts are files beside this one."""

from __future__ import annotations

import functools
from pathlib import Path

TASK = """The problem:

{problem}

The repository is in /work, the directory that everything starts in. Change its source so that the
problem is solved in general: tests that you do not see will be run. Changes of test files and of
configuration do not count."""


@functools.cache
def system_prompt(kind: str) -> str:
    return (Path(__file__).parent / f"{kind}.txt").read_text(encoding="utf-8").strip()


def task_prompt(problem: str) -> str:
    return TASK.format(problem=problem)
