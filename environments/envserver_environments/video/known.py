"""Answers with a known reward: correct ones in every accepted form, and cheats. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from envserver import KnownResult, Result, Task

from .demonstrations import right_answer


def known_answers(task: Task) -> Iterator[KnownResult]:
    """Returns the known results of any task here."""
    gold = right_answer(task)
    yield _right("gold, by finish", answer=gold)
    yield _right("gold, in a box", text=f"So it is \\boxed{{{gold}}}.")
    yield _right("gold, after FINAL", text=f"THOUGHT: I see.\nFINAL: {gold}")
    yield _right("gold, of an organizer", text=json.dumps({"reasoning": "so", "answer": gold}))
    yield _wrong("gold, only thought", text=f"<think>Answer: {gold}</think> I do not know.")
    yield _wrong("gold, thoughts without end", text=f"<think>Answer: {gold}")
    yield _wrong("gold, of experts only", experts={"captions": gold}, final_answer=gold)
    yield _wrong("no answer", answer="cannot tell")
    yield _wrong("several answers, one right", answer=f"{gold} or {_other(gold)}")
    yield KnownResult(
        "gold, cut off",
        Result(output=_output(answer=gold), finish_reason="length", truncated=True),
    )
    if task.public["options"]:
        yield from _of_options(gold, task.public["options"])
    else:
        yield from _of_words(gold, task.public)


def _of_options(gold: str, options: list[str]) -> Iterator[KnownResult]:
    place = ord(gold) - ord("A")
    letters = [chr(ord("A") + index) for index in range(len(options))]
    yield _right("gold's text, by finish", answer=options[place].upper())
    yield _right("gold with its text", text=f"Answer: {gold}) {options[place]}")
    yield _right("gold with a reason", text=f"Answer: {gold} because it shows")
    yield _right("gold, corrected", text=f"Answer: {_other(gold)}\nNo.\nFinal answer: ({gold})")
    yield _wrong("every option", text=f"Answer: {', '.join(letters)}")
    yield _wrong("every option, by finish", answer=" and ".join(letters))
    yield _wrong("every text", answer="; ".join(options))
    numbers = {"gold's place instead of its letter": place + 1, "gold's place from 0": place}
    for name, number in numbers.items():
        if options[place] != str(number):
            yield _wrong(name, text=f"Answer: {number}")
    yield _wrong("beyond the options", answer=chr(ord("A") + len(options)))
    yield _wrong("a sentence with gold's letter first", text=f"{gold} person can be seen there.")
    yield _wrong("gold, then another", text=f"\\boxed{{{gold}}} or \\boxed{{{_other(gold)}}}")
    yield _wrong("JSON with a number", text=json.dumps({"answer": place}))
    for letter in letters:
        if letter != gold:
            yield _wrong("another option", answer=letter)


def _of_words(gold: str, public: dict[str, Any]) -> Iterator[KnownResult]:
    yield _right("gold, in other letters", answer=f"{gold.upper()}!")
    captions = [line["text"] for line in (public["context"] or {}).get("captions", [])]
    yield _wrong("all captions", answer=" ".join(captions))
    yield _wrong("gold, buried in words", answer="there " * 12 + gold)
    yield _wrong("another answer", answer="something else")
    yield _wrong("little words", answer="of the")


def _other(gold: str) -> str:
    """Returns another letter (both are options of any task), or other words."""
    if len(gold) > 1:
        return "another thing"
    return "B" if gold == "A" else "A"


def _right(name: str, **said: Any) -> KnownResult:
    return KnownResult(name, Result(output=_output(**said)), least=1.0, most=1.0)


def _wrong(name: str, **said: Any) -> KnownResult:
    return KnownResult(name, Result(output=_output(**said)))


def _output(
    *,
    answer: str | None = None,
    text: str = "",
    experts: dict[str, str] | None = None,
    final_answer: str = "",
) -> dict[str, Any]:
    """Returns an output of the agents."""
    told = {"experts": experts or {}, "final_answer": final_answer}
    return {"answer": answer, "text": text, **told}
