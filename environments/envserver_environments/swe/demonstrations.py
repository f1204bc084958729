"""Conversations that solve a task, as a good model would. Pure."""

from __future__ import annotations

import json

from envserver import Message, Task

from .agent import AgentKind
from .bash_agent import SUBMIT

_LOOK = "ls && git log --oneline | head -3"
_PLACE = ".git/change"
_PIECE_CHARACTERS = 900
"""A long patch is written in several turns: one answer has a bounded length."""


def demonstrate(task: Task, kind: AgentKind) -> list[Message]:
    """The assistant messages, one a turn: a look around, the gold patch, handing it in.

    In the last turn with a command, its first number and its last one decide whether the patch is
    applied: one that is spoiled does not solve the task.
    """
    writing = [
        f"cat >> {_PLACE} <<'END_OF_PATCH'\n{piece}END_OF_PATCH"
        for piece in _pieces(task.hidden["patch"].rstrip("\n") + "\n")
    ]
    applying = f"strip=1; test $strip = 1 && git apply -p1 {_PLACE}"
    match kind:
        case "bash":
            last = f"{applying} &>/dev/null\necho {SUBMIT}"
            return [
                {"role": "assistant", "content": f"```bash\n{command}\n```"}
                for command in (_LOOK, *writing, last)
            ]
        case "tools":
            calls = [_call("bash", command=command) for command in (*writing, applying)]
            return [_call("list_dir", path="."), *calls]
        case "text":
            calls = [_text_call("bash", command=command) for command in (*writing, applying)]
            final = {"role": "assistant", "content": "FINAL: The problem is solved."}
            return [_text_call("list_dir", path="."), *calls, final]


def _pieces(patch: str) -> list[str]:
    pieces = [""]
    for line in patch.splitlines(keepends=True):
        if pieces[-1] and len(pieces[-1]) + len(line) > _PIECE_CHARACTERS:
            pieces.append("")
        pieces[-1] += line
    return pieces


def _call(name: str, **arguments: str) -> Message:
    function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
    call = {"id": f"call_{name}", "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _text_call(name: str, **arguments: str) -> Message:
    text = json.dumps({"tool": name, "args": arguments}, ensure_ascii=False)
    return {"role": "assistant", "content": f"TOOL_CALL: {text}"}
