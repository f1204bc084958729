"""The environment `my_env`: an agent with tools."""

from __future__ import annotations

import json
import re
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
    ToolError,
    tool,
)

ROWS = Path(__file__).with_name("rows.jsonl")
PRICES = {"apple": 3, "pear": 4, "melon": 11}


class MyEnv(Environment):
    """Ask for prices, and add them up."""

    name = "my_env"
    exact_demonstrations = True  # the simulated engine says nothing before the answer

    def tasks(self, split: Split) -> Iterator[Task]:
        for number, line in enumerate(ROWS.read_text().splitlines()):
            row = json.loads(line)
            hidden = {"answer": row["answer"], "items": row["items"]}
            yield Task(f"row-{number}", {"question": row["question"]}, hidden)

    @tool
    def price(self, item: str, count: int = 1) -> int:
        """Returns what some pieces of an item cost.

        Args:
            item: its name, in the singular.
            count: how many.
        """
        if item not in PRICES:
            raise ToolError(f"there is no {item}; there are: {', '.join(PRICES)}.")
        return PRICES[item] * count

    async def rollout(self, task: PublicTask, run: Rollout) -> str:
        end = await run.loop([{"role": "user", "content": task.public["question"]}])
        return end.text

    def score(self, task: Task, result: Result) -> Score:
        numbers = re.findall(r"-?\d+", str(result.output or ""))
        return Score(reward=float(numbers == [str(task.hidden["answer"])]))

    def demonstration(self, task: Task) -> list[Message]:
        """Returns one call for each item, then the sum."""
        calls = [
            {
                "id": f"call-{number}",
                "type": "function",
                "function": {"name": "price", "arguments": json.dumps(item)},
            }
            for number, item in enumerate(task.hidden["items"])
        ]
        return [
            {"role": "assistant", "content": "", "tool_calls": calls},
            {"role": "assistant", "content": f"It is {task.hidden['answer']}."},
        ]

    def known_results(self, task: Task) -> Iterator[KnownResult]:
        """Yields results for `envserver check`: the right one, and cheats that must not pay."""
        answer = task.hidden["answer"]
        yield KnownResult("the sum", Result(output=f"It is {answer}."), least=1.0, most=1.0)
        every = " ".join(map(str, range(100)))
        yield KnownResult("every number", Result(output=every))
