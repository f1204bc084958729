"""The environment `my_env`: one question, one answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from envserver import (
    Environment,
    KnownResult,
    Message,
    PublicTask,
    Result,
    Rollout,
    Score,
    Split,
    Task,
)

ROWS = Path(__file__).with_name("rows.jsonl")


class MyEnv(Environment):
    """Answer a question in one word."""

    name = "my_env"
    exact_demonstrations = True  # the simulated engine says nothing before the answer

    def tasks(self, split: Split) -> Iterator[Task]:
        for number, line in enumerate(ROWS.read_text().splitlines()):
            row = json.loads(line)
            # The first part goes to the agent; the second never leaves the server and the scorer.
            yield Task(f"row-{number}", {"question": row["question"]}, {"answer": row["answer"]})

    async def rollout(self, task: PublicTask, run: Rollout) -> str:
        asked = f"{task.public['question']} Answer in one word."
        reply = await run.chat([{"role": "user", "content": asked}])
        return reply.content

    def score(self, task: Task, result: Result) -> Score:
        # The output is None when a limit ended the rollout (result.limit).
        said = str(result.output or "").strip(" .\n").lower()
        return Score(reward=float(said == task.hidden["answer"].lower()))

    def demonstration(self, task: Task) -> list[Message]:
        """Returns what the simulated engine plays, right or spoiled."""
        return [{"role": "assistant", "content": task.hidden["answer"]}]

    def known_results(self, task: Task) -> Iterator[KnownResult]:
        """Yields results for `envserver check`: the right one, and cheats that must not pay."""
        answer = task.hidden["answer"]
        yield KnownResult("the answer", Result(output=answer), least=1.0, most=1.0)
        yield KnownResult("two answers", Result(output=f"{answer} or another"))
