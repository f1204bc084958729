"""Conversations that solve a task, as a good model would. Pure."""

from __future__ import annotations

import json
import zlib
from typing import Any

from envserver_tools.calculator import calculate

from envserver import Message, Task

from .agent import Mode


def demonstrate(task: Task, mode: Mode) -> list[Message]:
    """The assistant messages, one a turn: a calculation where the row shows one, the answer."""
    answer = str(task.hidden["answer"])
    expression = _usable(task.hidden.get("expression"))
    # Both ways to end are shown, each for half of the tasks.
    by_call = mode == "tools" and zlib.crc32(task.id.encode()) % 2 == 0
    last = _call("finish", answer=answer) if by_call else _boxed(answer)
    if expression is None or mode == "single":
        return [last]
    if mode == "seed0":
        return [_command(expression), last]
    return [_call("calculate", expression=expression), last]


def _usable(expression: str | None) -> str | None:
    if not expression or calculate(expression).startswith("error:"):
        return None
    return expression


def _boxed(answer: str) -> Message:
    return {"role": "assistant", "content": f"The answer is \\boxed{{{answer}}}."}


def _command(expression: str) -> Message:
    return {
        "role": "assistant",
        "content": f'Let me calculate.\n```bash\npython -c "print({expression})"\n```',
    }


def _call(name: str, **arguments: Any) -> Message:
    function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
    call = {"id": f"call_{name}", "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}
