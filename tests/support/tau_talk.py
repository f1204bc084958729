"""Conversations of the environment `tau` with models that say what a test lays before them."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from envserver_environments.tau.env import Tau

from envserver import LimitReached, Message, Reply, Result, Score, Task


class Seat:
    """A run whose models say what is laid before them; when that is at an end, the turns are."""

    def __init__(self, says: Mapping[str, Iterable[Message]], judge: Any = None) -> None:
        self.says = {name: deque(turns) for name, turns in says.items()}
        self.asked: list[tuple[str, list[Message], Any]] = []
        self.actions: list[tuple[str, Any, Any]] = []
        self.metrics: dict[str, float] = {}
        self.judge = judge

    async def chat(
        self, messages: list[Message], *, tools: Any = None, agent: str = "", stop: Any = None
    ) -> Reply:
        self.asked.append((agent, [dict(message) for message in messages], tools))
        if not self.says.get(agent):
            raise LimitReached("All turns are used up.", limit="turns")
        message = self.says[agent].popleft()
        reason = message.get("finish", "tool_calls" if message.get("tool_calls") else "stop")
        message = {name: value for name, value in message.items() if name != "finish"}
        return Reply(message["content"], message.get("tool_calls") or [], reason, message)

    async def call_tool(self, name: str, arguments: dict[str, Any]) -> Any:
        assert name == "judge"
        return {"verdicts": await self.judge(arguments["messages"])}

    def log_action(
        self, tool: str, input: Any = None, output: Any = None, *, error: str = ""
    ) -> None:
        self.actions.append((tool, input, output))

    def log_metric(self, name: str, value: float) -> None:
        self.metrics[name] = value


def tasks_of(**config: Any) -> tuple[Tau, dict[str, Task]]:
    environment = Tau(Tau.Config(**config))
    return environment, {task.id: task for task in environment.tasks("train")}


def talk(environment: Tau, task: Task, seat: Seat) -> tuple[dict[str, Any], Score]:
    """The output and the score of one live conversation."""
    output = asyncio.run(environment.rollout(task.without_hidden(), seat))  # type: ignore[arg-type]
    output = json.loads(json.dumps(output))  # as it travels
    return output, environment.score(task, Result(output=output))


def says(text: str, **more: Any) -> Message:
    return {"role": "assistant", "content": text, **more}
