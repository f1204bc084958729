"""Conversations that answer a question, as good models would hold them. Pure.

All agents of a team play the same turns, each leaving out those that call tools of others; the last
turn is played by all. So a turn that reads and finishes is one expert's alone.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from typing import Any, Literal

from envserver import Message, Task

from .agent import Protocol
from .context import VideoContext
from .teams import FINAL_ANSWER, Mode
from .tools import TOOLS_OF

READING_TOOLS = {modality: names[0] for modality, names in TOOLS_OF.items()}


def demonstrate(task: Task, mode: Mode | Literal["blind"], protocol: Protocol) -> list[Message]:
    """The assistant messages, one a turn: what is read, and the answer."""
    answer = right_answer(task)
    if mode == "blind":
        return [_said(f"Answer: {answer}")]
    if protocol == "text":
        # Nobody leaves anything out there: what a team plays must suit all of it.
        reading = [_read_by_text(task)] if mode == "single" else []
        return [*reading, _said(f"FINAL: {answer}")]
    context = VideoContext.of_json(task.public["context"])
    # Both ways are shown, each for half of the tasks: to end, and for a team to agree or not.
    first_half = zlib.crc32(task.id.encode()) % 2 == 0
    reading = list(_readings(task, context))
    match mode:
        case "single":
            last = _calls(("finish", {"answer": answer})) if first_half else _said(_boxed(answer))
            return [*reading, last]
        case "report":
            decision = {"reasoning": "That is what they saw.", "answer": _option(task, answer)}
            unsure = list(_giving_up(context)) if first_half else []
            return [*unsure, *reading, _said(json.dumps(decision, ensure_ascii=False))]
        case "star":
            asked = [
                _calls(("route", {"next": name, "comment": "What do you find?"}))
                for name in context.modalities
            ]
            comment = "That is what they found."
            last = _calls(("route", {"next": FINAL_ANSWER, "comment": comment, "answer": answer}))
            return [*asked, *reading, last]


def right_answer(task: Task) -> str:
    """The letter of the right option, or the first right answer in words."""
    if task.public["options"]:
        return chr(ord("A") + task.hidden["answer"])
    return str(task.hidden["golds"][0])


def _option(task: Task, answer: str) -> str:
    return f"Option {answer}" if task.public["options"] else answer


def _boxed(answer: str) -> str:
    return f"The answer is \\boxed{{{answer}}}."


def _span(task: Task) -> dict[str, float]:
    spans = task.hidden["evidence"]
    if not spans:
        return {}
    return {"t0": min(start for start, _ in spans), "t1": max(end for _, end in spans)}


def _readings(task: Task, context: VideoContext) -> Iterator[Message]:
    """Each modality is read where the evidence shows."""
    for modality in context.modalities:
        yield _calls((READING_TOOLS[modality], _span(task)))


def _giving_up(context: VideoContext) -> Iterator[Message]:
    """An expert reads and says at once that it cannot tell: all but that of the captions."""
    for modality in context.modalities[1:]:
        yield _calls((READING_TOOLS[modality], {}), ("finish", {"answer": "cannot tell"}))


def _read_by_text(task: Task) -> Message:
    call = json.dumps({"tool": "get_captions", "args": _span(task)})
    return _said(f"THOUGHT: I read the captions of that moment.\nTOOL_CALL: {call}")


def _said(text: str) -> Message:
    return {"role": "assistant", "content": text}


def _calls(*calls: tuple[str, dict[str, Any]]) -> Message:
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": f"call_{name}",
                "type": "function",
                "function": {"name": name, "arguments": json.dumps(arguments)},
            }
            for name, arguments in calls
        ],
    }
