"""Answers with a known reward: correct ones in every accepted form, cheats, wrong ones made of a
row's gold; why a gold is doubtful; demonstrations. Pure."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from itertools import islice

from envserver_environments.answers import doubtful_option, last_boxed
from envserver_environments.demonstrations import Known, call_message, text_message
from envserver_environments.rows import Row
from envserver_tools.calculator import calculate

from envserver import KnownResult, Message, Task

from .agent import Mode
from .data_sets import MAX_ANSWER_CHARACTERS, Problem
from .latex import readable
from .literals import PLAIN_NUMBER, listed_numbers, plain_number
from .values import value_of, values_differ
from .verification import is_huge

_KNOWN = Known(answer=None, text="")
_COMMA = re.compile(r"[-+]?\d+,\d+")
_PAIR = re.compile(rf"\(\s*{PLAIN_NUMBER}\s*,\s*{PLAIN_NUMBER}\s*\)")
_LABEL = re.compile(r"\W*[A-Za-z]\b")
_UNIT = re.compile(r"[%°$]|circ|degree|text|math|mbox")
_CONTENT = re.compile(r"[^\s\\{}$^_]")
_WORD = "\\text{qwxzl}"
_ROUNDED_FROM = 1000
"""The successor of a measured number as large as this, such as 4.5e33, may be right."""
_LONGEST = 40
"""Decimal places that a number is written with; else it is a fraction."""


def known_answers(task: Task, *, literal: bool | None) -> Iterator[KnownResult]:
    gold, kind = str(task.hidden["answer"]), task.hidden["kind"]
    box = f"\\boxed{{{gold}}}"
    yield _KNOWN.right("gold, by finish", answer=gold)
    yield _KNOWN.right("gold, in a box", text=f"So it is {box}.")
    yield _KNOWN.right("gold, after thoughts", text=f"<think>\\boxed{{0.123}}</think>{box}")
    wrong = {
        "gold, only thought": f"<think>{box}</think> I do not know.",
        "gold, thoughts without end": f"<think>It is {box}",
        "gold, then another box": f"{box}, or rather \\boxed{{0.123}}",
        "gold, in an open box": f"\\boxed{{{gold}",
        "empty box": "\\boxed{}",
    }
    for name, text in wrong.items():
        yield _KNOWN.wrong(name, text=text)
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


# For any row: the gold, and surely wrong answers made of it (negated, tenfold, its successor),
# which `envserver check` scores; and why a gold is doubtful.


def row_answers(task: Task, others: Sequence[Task]) -> Iterator[KnownResult]:
    """The first gold of `others` that surely differs is a wrong answer."""
    gold, question = str(task.hidden["answer"]), str(task.public["question"])
    yield _KNOWN.right("gold", text=f"So it is \\boxed{{{gold}}}.")
    if re.search("[A-Za-z]{3}", question) and not _LABEL.match(question):
        yield _KNOWN.wrong("the question", text=question)
    for name, answer in [("empty", ""), *_wrong(task, gold, others)]:
        yield _KNOWN.wrong(name, answer=answer)


def _wrong(task: Task, gold: str, others: Sequence[Task]) -> Iterator[tuple[str, str]]:
    if task.hidden["kind"] == "letter":
        letters = (chr(ord("A") + place) for place in range(len(task.public["options"])))
        yield from (("another option", letter) for letter in letters if letter != gold)
        return
    if numbers := listed_numbers(readable(gold)):
        yield from _of_listed(gold, numbers)
    elif (value := value_of(gold)) is not None:
        yield from _of_value(gold, value)
    elif not _CONTENT.search(re.sub(r"\\[A-Za-z]+", "", gold)):
        yield "a word", _WORD  # such a gold may not even equal itself
    golds = (str(other.hidden["answer"]) for other in others)
    different = (other for other in golds if _surely_differ(gold, other))
    yield from (("another row's gold", other) for other in islice(different, 1))


def _of_listed(gold: str, numbers: list[Fraction]) -> Iterator[tuple[str, str]]:
    changes: dict[str, Callable[[Fraction], Fraction]] = {
        "negated": lambda number: -number,
        "tenfold": lambda number: 10 * number,
    }
    if gold.lstrip("-").isdigit() or max(map(abs, numbers)) < _ROUNDED_FROM:
        changes["successor"] = lambda number: number + 1
    for name, change in changes.items():
        if sorted(map(change, numbers)) != sorted(numbers):
            yield name, _changed(gold, change)
    if any(numbers):
        yield "zero", "0"


def _changed(gold: str, change: Callable[[Fraction], Fraction]) -> str:
    def changed(text: str) -> str:
        number = plain_number(readable(text))
        return text if number is None else _written(change(number))

    if plain_number(readable(gold)) is not None:
        return changed(gold)
    return re.sub(PLAIN_NUMBER, lambda found: changed(found[0]), gold)


def _written(value: Fraction) -> str:
    for places in range(_LONGEST):
        scaled = value * 10**places
        if scaled.denominator == 1:
            digits = f"{abs(scaled.numerator):0{places + 1}d}"
            point = f".{digits[len(digits) - places :]}" if places else ""
            return f"{'-' if value < 0 else ''}{digits[: len(digits) - places]}{point}"
    return f"{'-' if value < 0 else ''}\\frac{{{abs(value.numerator)}}}{{{value.denominator}}}"


def _of_value(gold: str, value: complex) -> Iterator[tuple[str, str]]:
    changes = {
        "negated": (f"-({gold})", -value),
        "tenfold": (f"10({gold})", 10 * value),
        "successor": (f"({gold})+1", value + 1),
        "zero": ("0", 0j),
    }
    for name, (text, changed) in changes.items():
        if values_differ(value, changed):
            yield name, text


def _surely_differ(gold: str, other: str) -> bool:
    numbers = sorted(listed_numbers(readable(gold))), sorted(listed_numbers(readable(other)))
    if all(numbers):
        has_units = _UNIT.search(gold) or _UNIT.search(other)  # 50% is 0.5, 1 m is 100 cm
        return numbers[0] != numbers[1] and not has_units
    return values_differ(value_of(gold), value_of(other))


def doubts(problem: Problem, row: Row) -> Iterator[str]:
    gold = problem.answer
    if problem.kind == "letter":
        if why := doubtful_option(problem.options, ord(gold) - ord("A")):
            yield why
        return
    if re.fullmatch(r"[A-E]|\([A-Ea-e]\)", gold):
        yield "the gold is a letter, but no options were found"
    if problem.kind == "expression" and _COMMA.fullmatch(gold):
        yield "the gold is a number with a comma or two numbers"
    if _PAIR.fullmatch(gold):
        yield "the gold is a pair of numbers or an open interval"
    if is_huge(gold):
        yield "the gold is too large to evaluate: only the same text equals it"
    for text in row.values():
        if isinstance(text, str) and text.count("\\boxed") > 1 and len(_boxes(text)) > 1:
            yield "the row boxes several answers"
            return


def _boxes(text: str) -> set[str]:
    parts = (last_boxed(f"\\boxed{part}") for part in text.split("\\boxed")[1:])
    return {re.sub(r"\s", "", box) for box in parts if box is not None}
