"""The environment `my_env`: an agent of smolagents, as it is."""

from __future__ import annotations

import json
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
    Score,
    Split,
    Task,
)

ROWS = Path(__file__).with_name("rows.jsonl")
PRICES = {"apple": 3, "pear": 4, "melon": 11}


class MyEnv(Environment):
    """Ask for prices with a tool of smolagents, and add them up."""

    name = "my_env"
    exact_demonstrations = True  # the simulated engine says nothing before the answer
    isolation = "dedicated"
    """Each rollout has a process of its own: smolagents blocks its thread."""
    preload = ("openai", "smolagents")

    def tasks(self, split: Split) -> Iterator[Task]:
        for number, line in enumerate(ROWS.read_text().splitlines()):
            row = json.loads(line)
            hidden = {"answer": row["answer"], "items": row["items"]}
            yield Task(f"row-{number}", {"question": row["question"]}, hidden)

    def rollout(self, task: PublicTask, run: Rollout) -> str:
        """Runs the agent in a thread; all of its calls are recorded."""
        from smolagents import LogLevel, OpenAIServerModel, ToolCallingAgent, tool

        model = OpenAIServerModel(run.model, api_base=run.base_url, api_key=run.api_key)
        agent = ToolCallingAgent(
            tools=[tool(price)],
            model=model,
            max_steps=self.config.max_turns,
            verbosity_level=LogLevel.OFF,
        )
        return str(agent.run(task.public["question"]))

    def score(self, task: Task, result: Result) -> Score:
        said = str(result.output or "").strip(" .")
        return Score(reward=float(said == str(task.hidden["answer"])))

    def demonstration(self, task: Task) -> list[Message]:
        """Returns one message for each item, then the answer."""
        turns = [_call("price", {"count": 1, **item}) for item in task.hidden["items"]]
        return [*turns, _call("final_answer", {"answer": str(task.hidden["answer"])})]

    def known_results(self, task: Task) -> Iterator[KnownResult]:
        """Yields results for `envserver check`: the right one, and cheats that must not pay."""
        answer = str(task.hidden["answer"])
        yield KnownResult("the sum", Result(output=answer), least=1.0, most=1.0)
        yield KnownResult("every number", Result(output=" ".join(map(str, range(100)))))


def price(item: str, count: int) -> int:
    """Returns what some pieces of an item cost.

    Args:
        item: its name, in the singular.
        count: how many.
    """
    return PRICES[item] * count


def _call(name: str, arguments: dict[str, Any]) -> Message:
    function = {"name": name, "arguments": json.dumps(arguments)}
    call = {"id": f"call-{name}", "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}
