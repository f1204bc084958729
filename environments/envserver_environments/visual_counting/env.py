"""The environment `visual_counting`: how many red circles are in the picture?

Tasks: `public` holds a picture (PNG in base64) and a question, `hidden` the count. Every task has a
picture of its own. The answer is the last line, `Answer: N`; an answer that names several is wrong.
"""

from __future__ import annotations

import base64
import random
import re
from collections.abc import Iterator
from typing import Any

from pydantic import Field

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

from .drawing import COLOURS, KINDS, png, scene

_ANSWER = re.compile(r"answer:[ \t]*([0-9]{1,2})[ \t]*", re.IGNORECASE)
_SIZES = {"train": 20_000, "validation": 500, "test": 1_000}


class VisualCounting(Environment):
    """Count shapes of one colour and kind among others, in drawn pictures."""

    name = "visual_counting"

    class Config(Environment.Config):
        """Says what is drawn."""

        most: int = Field(default=6, ge=1, le=9)
        """Largest count; counts from 1 on are equally frequent."""
        grid: int = Field(default=4, ge=3, le=8)
        """Cells a side; each holds one shape at most."""
        cell: int = Field(default=28, ge=12, le=64)
        """Pixels a side of each cell."""

    def tasks(self, split: Split) -> Iterator[Task]:
        config = self.config
        for number in range(_SIZES[split]):
            rng = random.Random(f"visual-counting-{config.seed}-{split}-{number}")
            asked = rng.choice([*COLOURS]), rng.choice(KINDS)
            count = rng.randint(1, config.most)
            drawn = png(
                scene(rng, config.grid, config.cell, count, asked), config.grid, config.cell
            )
            question = f"How many {asked[0]} {asked[1]}s are in the picture?"
            public = {"question": question, "picture": base64.b64encode(drawn).decode()}
            yield Task(f"picture-{number}", public, {"count": count})

    async def rollout(self, task: PublicTask, run: Rollout) -> str:
        return (await run.chat([_asked(task)])).content

    def score(self, task: Task, result: Result) -> Score:
        return Score(reward=float(answer_of(result.output) == task.hidden["count"]))

    def demonstration(self, task: Task) -> list[Message]:
        return [{"role": "assistant", "content": f"Answer: {task.hidden['count']}"}]

    def known_results(self, task: Task) -> Iterator[KnownResult]:
        count = task.hidden["count"]
        every = "\n".join(f"Answer: {one}" for one in range(10))
        right = f"Answer: {count}"
        yield KnownResult("the count", Result(output=right), least=1.0, most=1.0)
        yield KnownResult("one more", Result(output=f"Answer: {count + 1}"))
        yield KnownResult("every count", Result(output=every))
        yield KnownResult("every count, then it", Result(output=f"{every}\n{right}"))
        yield KnownResult("two counts in a line", Result(output=f"{right} or {count + 1}"))
        yield KnownResult("the count, then more", Result(output=f"{right}\nor not"))


def answer_of(output: Any) -> int | None:
    """Returns the count that the last line of an answer names; None if no or several lines do."""
    lines = (
        [line.strip() for line in output.strip().splitlines()] if isinstance(output, str) else []
    )
    found = [match for line in lines if (match := _ANSWER.match(line))]
    if len(found) != 1 or not _ANSWER.fullmatch(lines[-1]):
        return None
    return int(found[0][1])


def _asked(task: PublicTask) -> Message:
    url = f"data:image/png;base64,{task.public['picture']}"
    text = f"{task.public['question']} End with a line: Answer: N"
    picture = {"type": "image_url", "image_url": {"url": url}}
    return {"role": "user", "content": [picture, {"type": "text", "text": text}]}
