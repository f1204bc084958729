"""The texts that the model gets; the system prompts are files beside this one."""

from __future__ import annotations

import functools

from envserver_environments.demonstrations import prompt_beside

TASK = """The problem:

{problem}

The repository is in /work, the directory that everything starts in. Change its source so that the
problem is solved in general: tests that you do not see will be run. Changes of test files and of
configuration do not count."""


system_prompt = functools.partial(prompt_beside, __file__)


def task_prompt(problem: str) -> str:
    return TASK.format(problem=problem)
