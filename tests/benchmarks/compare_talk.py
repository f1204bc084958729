"""The environment of `compare.py`: a question, and "Go on." after each answer but the last."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from envserver import Environment, PublicTask, Result, Rollout, Score, Task


class Talk(Environment):
    class Config(Environment.Config):
        turns: int = 1
        more: int = 0

    config: Config

    def tasks(self, split: str) -> Iterator[Task]:
        for number in itertools.count():
            yield Task(str(number), {"question": f"Question {number}: say hello."}, {})

    async def rollout(self, task: PublicTask, run: Rollout) -> str | None:
        messages: list[dict[str, Any]] = [{"role": "user", "content": task.public["question"]}]
        for turn in range(self.config.turns):
            if turn:
                messages.append({"role": "user", "content": "Go on." + self.config.more * " more"})
            reply = await run.chat(messages)
            messages.append({"role": "assistant", "content": reply.content})
        return reply.content

    def score(self, task: Task, result: Result) -> Score:
        return Score(reward=float(bool(result.output)))
