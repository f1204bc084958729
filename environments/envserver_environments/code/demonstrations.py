"""Conversations that solve a task, as a good model would. Pure."""

from __future__ import annotations

import json
import zlib

from envserver import Message, Task

from .agent import Mode


def demonstrate(task: Task, mode: Mode) -> list[Message] | None:
    """Returns the assistant messages, one per turn, or None if the task has no reference."""
    code, output = task.hidden.get("code"), task.hidden.get("output")
    if not code:
        return None
    answer: Message = {"role": "assistant", "content": output or fenced(code)}
    if mode == "single":
        return [answer]
    # Both ways to end are shown, each for half of the tasks.
    by_call = zlib.crc32(task.id.encode()) % 2 == 0
    return [_call("run_tests", code), _call("submit", code) if by_call else answer]


def fenced(code: str) -> str:
    """`code` as a model writes it in a text."""
    return f"```python\n{code.strip()}\n```"


def _call(name: str, code: str) -> Message:
    function = {"name": name, "arguments": json.dumps({"code": code}, ensure_ascii=False)}
    call = {"id": f"call_{name}", "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}
