"""Conversations that solve a task, as a good model would hold them. Pure."""

from __future__ import annotations

import json

from envserver import Message, Task

from .agent import AgentKind
from .bash_agent import SUBMIT

_LOOK = "ls && git log --oneline | head -3"


def demonstrate(task: Task, kind: AgentKind) -> list[Message]:
    """The assistant messages, one a turn: a look around, the gold patch, handing it in."""
    apply = _applying(task.hidden["patch"])
    match kind:
        case "bash":
            return [_block(_LOOK), _block(f"{apply} &>/dev/null\necho {SUBMIT}")]
        case "tools":
            return [_call("list_dir", path="."), _call("bash", command=apply)]
        case "text":
            final = {"role": "assistant", "content": "FINAL: The problem is solved."}
            return [_text_call("list_dir", path="."), _text_call("bash", command=apply), final]


def _applying(patch: str) -> str:
    """A command that applies `patch`; its first number and its last one decide whether it does."""
    return (
        "strip=1\n"
        f"cat > \"$TMPDIR/change\" <<'END_OF_PATCH'\n{patch}END_OF_PATCH\n"
        'test $strip = 1 && git apply -p1 "$TMPDIR/change"'
    )


def _block(command: str) -> Message:
    return {"role": "assistant", "content": f"```bash\n{command}\n```"}


def _call(name: str, **arguments: str) -> Message:
    function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
    call = {"id": f"call_{name}", "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _text_call(name: str, **arguments: str) -> Message:
    text = json.dumps({"tool": name, "args": arguments}, ensure_ascii=False)
    return {"role": "assistant", "content": f"TOOL_CALL: {text}"}
