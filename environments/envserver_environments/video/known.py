"""Answers with a known reward, and conversations that answer a question. Pure."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Iterator, Mapping

from envserver_environments.demonstrations import (
    Known,
    call_message,
    text_message,
    written_call,
)
from envserver_records.tasks import Json

from envserver import KnownResult, Message, Task

from .agent import TOOLS_OF, Protocol
from .context import Modality, VideoContext
from .teams import FINAL_ANSWER, FRAMES, ORGANIZER, Frames, Mode

# In a team, an expert reads the moment that the question is about; where its kind of description
# has nothing there, it says that it cannot tell, and others decide.
CANNOT_TELL = "cannot tell"
_KNOWN = Known(answer=None, text="", experts={}, final_answer="")


def demonstrate(
    task: Task, mode: Mode, protocol: Protocol, *, blind: bool = False, frames: Frames = "off"
) -> list[Message] | Mapping[str, list[Message]]:
    """The assistant messages, one a turn: of the only agent, or of each agent by name."""
    answer = right_answer(task)
    if blind:
        return [text_message(f"Answer: {answer}")]
    context = VideoContext.of_json(task.public["context"] or {})
    seen = [_calls("view_frames", _span(task), protocol)] if frames == "tool" else []
    if not task.public.get("file"):
        frames, seen = "off", []
    if mode == "single":
        reading = [_reads(task, name, protocol) for name in context.modalities]
        # Both ways to end are shown, each for half of the tasks.
        last = _ends(answer, protocol)
        if protocol == "tools" and zlib.crc32(task.id.encode()) % 2 == 0:
            last = text_message(f"The answer is \\boxed{{{answer}}}.")
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
        return text_message(f"FINAL: {answer}")
    return _calls("finish", {"answer": answer}, protocol)


def _decides(task: Task, answer: str) -> Message:
    named = f"Option {answer}" if task.public["options"] else answer
    decision = {"reasoning": "That is what they read.", "answer": named}
    return text_message(json.dumps(decision, ensure_ascii=False))


def _asks(experts: Iterable[str], answer: str, protocol: Protocol) -> list[Message]:
    messages = [
        _calls("route", {"next": name, "comment": "What do you find?"}, protocol)
        for name in experts
    ]
    if protocol == "text":
        return [*messages, _ends(answer, protocol)]
    final = {"next": FINAL_ANSWER, "comment": "That is what they read.", "answer": answer}
    return [*messages, _calls("route", final, protocol)]


def _calls(name: str, arguments: Json, protocol: Protocol) -> Message:
    if protocol == "text":
        return written_call(name, "I look there.", **arguments)
    return call_message(name, **arguments)


def known_answers(task: Task) -> Iterator[KnownResult]:
    gold = right_answer(task)
    yield _KNOWN.right("gold, by finish", answer=gold)
    yield _KNOWN.right("gold, in a box", text=f"So it is \\boxed{{{gold}}}.")
    yield _KNOWN.right("gold, after FINAL", text=f"THOUGHT: I see.\nFINAL: {gold}")
    yield _KNOWN.right(
        "gold, of an organizer", text=json.dumps({"reasoning": "so", "answer": gold})
    )
    yield _KNOWN.wrong("gold, only thought", text=f"<think>Answer: {gold}</think> I do not know.")
    yield _KNOWN.wrong("gold, thoughts without end", text=f"<think>Answer: {gold}")
    yield _KNOWN.wrong("gold, of experts only", experts={"captions": gold}, final_answer=gold)
    yield _KNOWN.wrong("no answer", answer="cannot tell")
    yield _KNOWN.wrong("several answers, one right", answer=f"{gold} or {_other(gold)}")
    yield _KNOWN.cut_off("gold, cut off", answer=gold)
    if task.public["options"]:
        yield from _of_options(gold, task.public["options"])
    else:
        yield from _of_words(gold, task.public)


def _of_options(gold: str, options: list[str]) -> Iterator[KnownResult]:
    place = ord(gold) - ord("A")
    letters = [chr(ord("A") + index) for index in range(len(options))]
    yield _KNOWN.right("gold's text, by finish", answer=options[place].upper())
    yield _KNOWN.right("gold with its text", text=f"Answer: {gold}) {options[place]}")
    yield _KNOWN.right("gold with a reason", text=f"Answer: {gold} because it shows")
    yield _KNOWN.right(
        "gold, corrected", text=f"Answer: {_other(gold)}\nNo.\nFinal answer: ({gold})"
    )
    yield _KNOWN.wrong("every option", text=f"Answer: {', '.join(letters)}")
    yield _KNOWN.wrong("every option, by finish", answer=" and ".join(letters))
    yield _KNOWN.wrong("every text", answer="; ".join(options))
    numbers = {"gold's place instead of its letter": place + 1, "gold's place from 0": place}
    for name, number in numbers.items():
        if options[place] != str(number):
            yield _KNOWN.wrong(name, text=f"Answer: {number}")
    yield _KNOWN.wrong("beyond the options", answer=chr(ord("A") + len(options)))
    yield _KNOWN.wrong(
        "a sentence with gold's letter first", text=f"{gold} person can be seen there."
    )
    yield _KNOWN.wrong("gold, then another", text=f"\\boxed{{{gold}}} or \\boxed{{{_other(gold)}}}")
    yield _KNOWN.wrong("JSON with a number", text=json.dumps({"answer": place}))
    for letter in letters:
        if letter != gold:
            yield _KNOWN.wrong("another option", answer=letter)


def _of_words(gold: str, public: Json) -> Iterator[KnownResult]:
    yield _KNOWN.right("gold, in other letters", answer=f"{gold.upper()}!")
    captions = [line["text"] for line in (public["context"] or {}).get("captions", [])]
    yield _KNOWN.wrong("all captions", answer=" ".join(captions))
    yield _KNOWN.wrong("gold, buried in words", answer="there " * 12 + gold)
    yield _KNOWN.wrong("another answer", answer="something else")
    yield _KNOWN.wrong("little words", answer="of the")


def _other(gold: str) -> str:
    """Returns another letter (both are options of any task), or other words."""
    if len(gold) > 1:
        return "another thing"
    return "B" if gold == "A" else "A"
