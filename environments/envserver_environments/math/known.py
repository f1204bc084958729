"""Answers with a known reward: correct ones in every accepted form, and cheats; demonstrations."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

from envserver_environments.demonstrations import Known, call_message, text_message
from envserver_tools.calculator import calculate

from envserver import KnownResult, Message, Task

from .agent import Mode
from .data_sets import MAX_ANSWER_CHARACTERS

_KNOWN = Known(answer=None, text="")


def known_answers(task: Task, *, literal: bool | None) -> Iterator[KnownResult]:
    gold, kind = str(task.hidden["answer"]), task.hidden["kind"]
    box = f"\\boxed{{{gold}}}"
    yield _KNOWN.right("gold, by finish", answer=gold)
    yield _KNOWN.right("gold, in a box", text=f"So it is {box}.")
    yield _KNOWN.right("gold, after thoughts", text=f"<think>\\boxed{{0.123}}</think>{box}")
    yield _KNOWN.wrong("gold, only thought", text=f"<think>{box}</think> I do not know.")
    yield _KNOWN.wrong("gold, thoughts without end", text=f"<think>It is {box}")
    yield _KNOWN.wrong("gold, then another box", text=f"{box}, or rather \\boxed{{0.123}}")
    yield _KNOWN.wrong("gold, in an open box", text=f"\\boxed{{{gold}")
    yield _KNOWN.wrong("empty box", text="\\boxed{}")
    yield _KNOWN.wrong("gold, buried in noise", answer="7 " * MAX_ANSWER_CHARACTERS + gold)
    yield _KNOWN.cut_off("gold, cut off", text=box)
    if kind == "letter":
        yield from _of_options(gold, task.public["options"])
    elif kind != "procedural":
        yield _KNOWN.wrong("gold, without a box", text=f"The answer is {gold}")
        yield from _of_numbers(task, gold, literal)


def _of_options(gold: str, options: list[str]) -> Iterator[KnownResult]:
    letters = [chr(ord("A") + index) for index in range(len(options))]
    yield _KNOWN.right(
        "option with its text", text=f"Answer: {gold}) {options[ord(gold) - ord('A')]}"
    )
    yield _KNOWN.wrong("every option", text=f"\\boxed{{{', '.join(letters)}}}")
    yield _KNOWN.wrong("every option, by finish", answer=" or ".join(letters))
    for letter in letters:
        if letter != gold:
            yield _KNOWN.wrong("another option", text=f"\\boxed{{{letter}}}")


def _of_numbers(task: Task, gold: str, literal: bool | None) -> Iterator[KnownResult]:
    is_number = task.hidden["kind"] == "number"
    expression = task.hidden.get("expression")
    if expression and (is_number if literal is None else literal):
        yield _KNOWN.wrong("unevaluated expression", text=f"\\boxed{{{expression}+0}}")
        yield _KNOWN.wrong("unevaluated expression, by finish", answer=f"({expression})")
    if is_number:
        yield _KNOWN.wrong("two numbers", text=f"\\boxed{{{gold} \\text{{ or }} {gold}1}}")
        # Not a digit more at the end: `0.3331` may be right for `0.333`.
        yield _KNOWN.wrong("another number", text=f"\\boxed{{1{gold}}}")
        yield _KNOWN.wrong("equation without a solution", text=f"\\boxed{{{gold}={gold}}}")
    yield _KNOWN.wrong("no number", text="\\boxed{\\text{unknown}}")


def demonstrate(task: Task, mode: Mode) -> list[Message]:
    """The assistant messages, one a turn: a calculation where the row shows one, the answer."""
    answer = str(task.hidden["answer"])
    expression = _usable(task.hidden.get("expression"))
    # Both ways to end are shown, each for half of the tasks.
    by_call = mode == "tools" and zlib.crc32(task.id.encode()) % 2 == 0
    boxed = text_message(f"The answer is \\boxed{{{answer}}}.")
    last = call_message("finish", answer=answer) if by_call else boxed
    if expression is None or mode == "single":
        return [last]
    if mode == "seed0":
        return [_command(expression), last]
    return [call_message("calculate", expression=expression), last]


def _usable(expression: str | None) -> str | None:
    if not expression or calculate(expression).startswith("error:"):
        return None
    return expression


def _command(expression: str) -> Message:
    return text_message(f'Let me calculate.\n```bash\npython -c "print({expression})"\n```')
