"""A `run` whose model follows a script: what it says is given, what it is sent and told is kept."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

from envserver import Reply, Sandbox, Sandboxes, SandboxSpec
from envserver.workers.run import AttemptRun

Said = str | dict[str, Any]


class ScriptedRun:
    """Says what is `left` of the script, and its last words again and again at its end.

    Args:
        rooms: where it opens sandboxes, by `spec` where the agent names none.
        finish_reason: of each reply; by default "tool_calls" for calls and "stop" for words.
    """

    loop = AttemptRun.loop

    def __init__(
        self,
        script: Sequence[Said],
        rooms: Sandboxes | None = None,
        *,
        spec: SandboxSpec | None = None,
        max_turns: int = 12,
        finish_reason: str = "",
    ) -> None:
        self.left, self.max_turns = list(script), max_turns
        self.asked: list[list[dict[str, Any]]] = []
        self.tools: Any = None
        self.metrics: dict[str, float] = {}
        self._last: Said = ""
        self._rooms, self._spec, self._finish_reason = rooms, spec, finish_reason

    async def chat(self, messages: list[dict[str, Any]], tools: Any = None, **_: Any) -> Reply:
        self.asked.append([dict(message) for message in messages])
        self.tools = tools
        if self.left:
            self._last = self.left.pop(0)
        said = self._last
        message = {"role": "assistant", "content": said} if isinstance(said, str) else said
        calls = message.get("tool_calls") or []
        reason = self._finish_reason or ("tool_calls" if calls else "stop")
        return Reply(message["content"], calls, reason, message)

    def open_sandbox(self, spec: SandboxSpec | None = None) -> AbstractAsyncContextManager[Sandbox]:
        assert self._rooms is not None
        return self._rooms.open(spec or self._spec or SandboxSpec())

    def log_action(self, *_: Any, **__: Any) -> None:
        """Nobody looks at it."""

    def log_metric(self, name: str, value: float) -> None:
        self.metrics[name] = value

    @property
    def answers(self) -> list[str]:
        """What the model was told after each of its messages but the last."""
        return [asked[-1]["content"] for asked in self.asked[1:]]


def call(name: str, arguments: str | None = None, **named: Any) -> dict[str, Any]:
    """A message that calls a tool with `arguments` as they stand, or with those named."""
    function = {"name": name, "arguments": json.dumps(named) if arguments is None else arguments}
    calls = [{"id": "c1", "type": "function", "function": function}]
    return {"role": "assistant", "content": "", "tool_calls": calls}
