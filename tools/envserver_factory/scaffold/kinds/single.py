"""The environment `my_env`: one question, one answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from envserver import (
    Environment,
    Hidden,
    KnownResult,
    Message,
    Result,
    Rollout,
    Score,
    Split,
)

ROWS = Path(__file__).with_name("rows.jsonl")


@dataclass(frozen=True)
class Question:
    """A task. Hidden fields never leave the server and the scorer: `rollout` has none of them."""

    id: str
    question: str
    answer: Hidden[str]


class MyEnv(Environment[Question]):
    """Answer a question in one word."""

    name = "my_env"
    exact_demonstrations = True  # the simulated engine says nothing before the answer

    def tasks(self, split: Split) -> Iterator[Question]:
        for number, line in enumerate(ROWS.read_text().splitlines()):
            yield Question(f"row-{number}", **json.loads(line))

    async def rollout(self, task: Question, run: Rollout) -> str:
        prompt = f"{task.question} Answer in one word."
        reply = await run.chat([{"role": "user", "content": prompt}])
        return reply.content

    def score(self, task: Question, result: Result) -> Score:
        # The output is None when a limit ended the rollout (result.limit).
        said = str(result.output or "").strip(" .\n").lower()
        return Score(reward=float(said == task.answer.lower()))

    def demonstration(self, task: Question) -> list[Message]:
        """Returns what the simulated engine plays, right or spoiled."""
        return [{"role": "assistant", "content": task.answer}]

    def known_results(self, task: Question) -> Iterator[KnownResult]:
        """Yields results for `envserver check`: the right one, and cheats that must not pay."""
        yield KnownResult("the answer", Result(output=task.answer), least=1.0, most=1.0)
        yield KnownResult("two answers", Result(output=f"{task.answer} or another"))
