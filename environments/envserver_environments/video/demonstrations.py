"""Conversations that answer a question, as good models would. Pure.

Each agent of a team has its own. An expert reads the moment that the question is about; where its
kind of description has nothing there, it says that it cannot tell, and others decide.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

from envserver import Message, Task

from .agent import Protocol
from .context import Modality, VideoContext
from .teams import FINAL_ANSWER, FRAMES, ORGANIZER, Frames, Mode
from .tools import TOOLS_OF

CANNOT_TELL = "cannot tell"


def demonstrate(
    task: Task, mode: Mode, protocol: Protocol, *, blind: bool = False, frames: Frames = "off"
) -> list[Message] | Mapping[str, list[Message]]:
    """The assistant messages, one a turn: of the only agent, or of each agent by name."""
    answer = right_answer(task)
    if blind:
        return [_said(f"Answer: {answer}")]
    context = VideoContext.of_json(task.public["context"] or {})
    seen = [_calls("view_frames", _span(task), protocol)] if frames == "tool" else []
    if not task.public.get("file"):
        frames, seen = "off", []
    if mode == "single":
        reading = [_reads(task, name, protocol) for name in context.modalities]
        # Both ways to end are shown, each for half of the tasks.
        boxed = protocol == "tools" and zlib.crc32(task.id.encode()) % 2 == 0
        last = _said(f"The answer is \\boxed{{{answer}}}.") if boxed else _ends(answer, protocol)
        return [*seen, *reading, last]
    team = {
        str(name): [
            _reads(task, name, protocol),
            _ends(answer if context.lines(name, **_span(task)) else CANNOT_TELL, protocol),
        ]
        for name in context.modalities
    }
    if frames != "off":
        team[FRAMES] = [*seen, _ends(answer, protocol)]
    organizer = [_decides(task, answer)] if mode == "report" else _asks(team, answer, protocol)
    return {ORGANIZER: organizer, **team}


def right_answer(task: Task) -> str:
    """The letter of the right option, or the first right answer in words."""
    if task.public["options"]:
        return chr(ord("A") + task.hidden["answer"])
    return str(task.hidden["golds"][0])


def _span(task: Task) -> dict[str, float]:
    spans = task.hidden["evidence"]
    if not spans:
        return {}
    return {"t0": min(start for start, _ in spans), "t1": max(end for _, end in spans)}


def _reads(task: Task, modality: Modality, protocol: Protocol) -> Message:
    return _calls(TOOLS_OF[modality][0], _span(task), protocol)


def _ends(answer: str, protocol: Protocol) -> Message:
    if protocol == "text":
        return _said(f"FINAL: {answer}")
    return _calls("finish", {"answer": answer}, protocol)


def _decides(task: Task, answer: str) -> Message:
    named = f"Option {answer}" if task.public["options"] else answer
    decision = {"reasoning": "That is what they read.", "answer": named}
    return _said(json.dumps(decision, ensure_ascii=False))


def _asks(experts: Iterable[str], answer: str, protocol: Protocol) -> list[Message]:
    asked = [
        _calls("route", {"next": name, "comment": "What do you find?"}, protocol)
        for name in experts
    ]
    if protocol == "text":
        return [*asked, _ends(answer, protocol)]
    final = {"next": FINAL_ANSWER, "comment": "That is what they read.", "answer": answer}
    return [*asked, _calls("route", final, protocol)]


def _said(text: str) -> Message:
    return {"role": "assistant", "content": text}


def _calls(name: str, arguments: dict[str, Any], protocol: Protocol) -> Message:
    if protocol == "text":
        call = json.dumps({"tool": name, "args": arguments})
        return _said(f"THOUGHT: I look there.\nTOOL_CALL: {call}")
    function = {"name": name, "arguments": json.dumps(arguments)}
    call_ = {"id": f"call_{name}", "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call_]}
