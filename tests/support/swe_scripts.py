"""Agents of `swe` that follow a script: what they say is given, what they are told is kept."""

from __future__ import annotations

import json
from typing import Any

from envserver_environments.swe.agent import AgentKind, solve
from envserver_environments.swe.rules import AgentOptions
from envserver_environments.swe.sample import sample_tasks

from envserver import PublicTask, Reply, Sandboxes, SandboxSpec

ROMAN = next(task for task in sample_tasks() if task.name == "roman-subtractive")


class Scripted:
    """A `run` whose model says what a script says, again and again at its end."""

    def __init__(self, rooms: Sandboxes, script: list[Any], max_turns: int = 12) -> None:
        self.max_turns = max_turns
        self.asked: list[list[dict[str, Any]]] = []
        self.metrics: dict[str, float] = {}
        self._rooms, self._script = rooms, script

    def open_sandbox(self, spec: SandboxSpec) -> Any:
        return self._rooms.open(spec)

    def log_action(
        self, tool: str, input: Any = None, output: Any = None, *, error: str = ""
    ) -> None: ...

    def log_metric(self, name: str, value: float) -> None:
        self.metrics[name] = value

    async def chat(self, messages: list[dict[str, Any]], **_: Any) -> Reply:
        self.asked.append([dict(message) for message in messages])
        said = self._script[min(len(self.asked), len(self._script)) - 1]
        message = said if isinstance(said, dict) else {"role": "assistant", "content": said}
        calls = message.get("tool_calls") or []
        reason = "tool_calls" if calls else "stop"
        return Reply(message["content"], calls, reason, message)

    @property
    def answers(self) -> list[str]:
        """What the model was told after each of its messages but the last."""
        return [asked[-1]["content"] for asked in self.asked[1:]]


async def attempt(
    rooms: Sandboxes, kind: AgentKind, *script: Any, **public: Any
) -> tuple[dict[str, Any], Scripted]:
    run = Scripted(rooms, list(script))
    task = PublicTask("t", public or ROMAN.task().public)
    return await solve(task, run, kind, AgentOptions()), run  # type: ignore[arg-type]


def bash(command: str) -> str:
    return f"I do this.\n```bash\n{command}\n```"


def call(name: str, **arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    calls = [{"id": "c", "type": "function", "function": function}]
    return {"role": "assistant", "content": "", "tool_calls": calls}


SUBMIT = bash("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")
