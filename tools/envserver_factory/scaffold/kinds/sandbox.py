"""The environment `my_env`: a program of the model runs in a sandbox."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from envserver import (
    Environment,
    KnownResult,
    Message,
    PublicTask,
    Result,
    Rollout,
    SandboxLimits,
    SandboxSpec,
    Score,
    Split,
    Task,
)

ROWS = Path(__file__).with_name("rows.jsonl")
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)


class MyEnv(Environment):
    """Write a Python program that prints the right line for each input."""

    name = "my_env"
    exact_demonstrations = True  # the simulated engine says nothing before the answer
    sandbox = SandboxSpec(limits=SandboxLimits(wall_seconds=5.0, cpu_seconds=2.0))

    def tasks(self, split: Split) -> Iterator[Task]:
        for number, line in enumerate(ROWS.read_text().splitlines()):
            row = json.loads(line)
            hidden = {"cases": row["cases"], "solution": row["solution"]}
            yield Task(f"row-{number}", {"question": row["question"]}, hidden)

    async def rollout(self, task: PublicTask, run: Rollout) -> str:
        prompt = f"{task.public['question']} Write the program in a ```python block."
        return (await run.chat([{"role": "user", "content": prompt}])).content

    async def score(self, task: Task, result: Result) -> Score:
        blocks = BLOCK.findall(str(result.output or ""))
        if not blocks:
            return Score(reward=0.0)
        cases: list[dict[str, Any]] = task.hidden["cases"]
        passed = 0
        # What is expected stays here: the program sees its input only.
        async with self.sandboxes.open(self.sandbox or SandboxSpec()) as sandbox:
            for case in cases:
                ran = await sandbox.run_python(blocks[-1], stdin=case["input"].encode())
                passed += ran.ok and ran.stdout.decode(errors="replace").strip() == case["output"]
        return Score(reward=float(passed == len(cases)), metrics={"passed": passed / len(cases)})

    def demonstration(self, task: Task) -> list[Message]:
        return [{"role": "assistant", "content": _program(task.hidden["solution"])}]

    def known_results(self, task: Task) -> Iterator[KnownResult]:
        """Yields results for `envserver check`: the right one, and cheats that must not pay."""
        right = Result(output=_program(task.hidden["solution"]))
        yield KnownResult("the solution", right, least=1.0, most=1.0)
        first = task.hidden["cases"][0]["output"]
        yield KnownResult("one case by heart", Result(output=_program(f"print({first!r})")))
        yield KnownResult("ends the process", Result(output=_program("import os\nos._exit(0)")))


def _program(code: str) -> str:
    return f"```python\n{code}\n```"
