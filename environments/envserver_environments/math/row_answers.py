r"""The gold of a row, wrong answers that are surely wrong, and why a gold is doubtful. Pure.

`envserver check` scores these answers for every row of a file. A wrong answer is made of the gold:
negated, tenfold, its successor. It is left out where it may be right: 0 for a gold that may be 0,
`-x` for `\{-1,1\}`, a number for a formula that may have its value.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction

from envserver_environments.answers import doubtful_option, last_boxed
from envserver_environments.rows import Row

from envserver import KnownResult, Result, Task

from .data_sets import Problem
from .literals import plain_number
from .sizes import is_huge

_NUMBER = r"[-+]?(?:\\[dt]?frac\{-?\d+\}\{-?\d+\}|(?:\d+(?:\.\d+)?|\.\d+)(?:/\d+)?)"
_AROUND = (
    r"(?:[\s()\[\]{}°%$]|\\(?:[{},;!%$ ]|left|right|degree)|\^(?:\\circ|\{\s*\\circ\s*\})"
    r"|\\(?:text|mathrm|mbox)\s*\{[^{}\d]*\}|[A-Za-z]\s*=)*"
)
_ITEM = rf"{_AROUND}{_NUMBER}{_AROUND}"
_NUMBERS = re.compile(rf"{_ITEM}(?:[,;]{_ITEM})*")
"""A number with its unit, or several in a list, a set, a pair or an interval."""
_NO_TERM = re.compile(
    r"[,;=<>|&_~%°]|\\(?:pm|mp|infty|cup|cap|in|leq?|geq?|neq?|lt|gt|begin|emptyset|varnothing|mod"
    r"|approx|text\w*|math\w+|mbox|ldots|dots|cdots)(?![A-Za-z])|\\[%$]|(?<![\\A-Za-z])[A-Za-z]{3}"
)
_KNOWN = re.compile(
    r"\\(?:[dtc]?frac|sqrt|pi|cdot|times|left|right|alpha|beta|gamma|theta|lambda|mu|phi|omega)"
    r"(?![A-Za-z])"
)
_ZERO = re.compile(r"(?<![\d.])0+(?:\.0*)?(?![\d.])")
_MONOMIAL = re.compile(r"\d*(?:\.\d+)?(?:[A-Za-z](?:\^(?:\d|\{\d+\}))?)*")
_COMMA = re.compile(r"[-+]?\d+,\d+")
_PAIR = re.compile(rf"\(\s*{_NUMBER}\s*,\s*{_NUMBER}\s*\)")
_LABEL = re.compile(r"\W*[A-Za-z]\b")
_LONGEST = 40
"""Decimal places that a number is written with; else it is a fraction."""


def row_answers(task: Task, others: Sequence[Task]) -> Iterator[KnownResult]:
    """Yields the gold and wrong answers of a row.

    Args:
        others: tasks whose golds are wrong answers here, the first that surely differs.
    """
    gold, question = str(task.hidden["answer"]), str(task.public["question"])
    box = Result(output={"answer": None, "text": f"So it is \\boxed{{{gold}}}."})
    yield KnownResult("gold", box, 1.0, 1.0)
    for name, answer in {"empty": "", **_wrong(task, gold, question, others)}.items():
        yield KnownResult(name, Result(output={"answer": answer, "text": ""}))


def _wrong(task: Task, gold: str, question: str, others: Sequence[Task]) -> dict[str, str]:
    if task.hidden["kind"] == "letter":
        letters = [chr(ord("A") + place) for place in range(len(task.public["options"]))]
        wrong = {f"option {one}": one for one in letters if one != gold}
        return wrong if _LABEL.match(question) else {**wrong, "the question": question}
    wrong = {"the question": question} if re.search("[A-Za-z]{3}", question) else {}
    values = _values(gold)
    if values is not None:
        wrong |= _of_numbers(gold, values)
    elif not _NO_TERM.search(gold):
        wrong["successor"] = f"({gold})+1"
        if is_nonzero(gold):
            wrong |= {"negated": f"-({gold})", "tenfold": f"10({gold})", "zero": "0"}
    if values is not None or ("zero" in wrong and _has_names(gold)):
        for other in others:
            numbers = _values(str(other.hidden["answer"]))
            if numbers is not None and _differ(numbers, values):
                wrong["another row's gold"] = str(other.hidden["answer"])
                break
    return wrong


def _of_numbers(gold: str, values: list[Fraction]) -> dict[str, str]:
    changes: dict[str, Callable[[Fraction], Fraction]] = {
        "negated": lambda value: -value,
        "tenfold": lambda value: 10 * value,
        "successor": lambda value: value + 1,
    }
    wrong = {
        name: _changed(gold, change)
        for name, change in changes.items()
        if sorted(map(change, values)) != sorted(values)
    }
    return {**wrong, "zero": "0"} if any(values) else wrong


def _values(gold: str) -> list[Fraction] | None:
    """The number that the gold is, or the numbers in it; None if it is something else."""
    if (one := plain_number(gold)) is not None:
        return [one]
    if not _NUMBERS.fullmatch(gold):
        return None
    values = [plain_number(number) for number in re.findall(_NUMBER, gold)]
    return [value for value in values if value is not None] if None not in values else None


def _changed(gold: str, change: Callable[[Fraction], Fraction]) -> str:
    if (one := plain_number(gold)) is not None:
        return _written(change(one))
    return re.sub(_NUMBER, lambda found: _written(change(plain_number(found[0]) or Fraction())), gold)


def _written(value: Fraction) -> str:
    for places in range(_LONGEST):
        scaled = value * 10**places
        if scaled.denominator == 1:
            digits = f"{abs(scaled.numerator):0{places + 1}d}"
            point = f".{digits[len(digits) - places :]}" if places else ""
            return f"{'-' if value < 0 else ''}{digits[: len(digits) - places]}{point}"
    return f"{'-' if value < 0 else ''}\\frac{{{abs(value.numerator)}}}{{{value.denominator}}}"


def _differ(one: list[Fraction], other: list[Fraction] | None) -> bool:
    """Returns whether an answer of numbers is surely not the other one; None is a formula."""
    return other is None or sorted(one) != sorted(other)


def is_nonzero(formula: str) -> bool:
    """Returns whether a formula is surely not zero for all values of its names: a product, a sum of
    terms of one sign, or one in which a product of names occurs once."""
    plain = re.sub(r"\s|\\left|\\right|\\[,;! ]", "", formula)
    if "\\" in _KNOWN.sub("", plain) or _ZERO.search(plain):
        return False
    unsigned = re.sub(r"\^(?:\{[^{}]*\}|.)", "", plain).lstrip("-+")
    signs = set(re.findall(r"(?<=[^{(])[-+]", unsigned)) | set(re.findall(r"^-", plain))
    if not re.search(r"(?<=[^{(])[-+]", unsigned):
        return not re.search(r"[!|]", plain)
    if len(signs) == 1 and not re.search(r"[{(]-", unsigned):
        return not _has_names(formula) and "(" not in plain
    terms = re.split(r"[-+]", plain.lstrip("-+"))
    if not all(map(_MONOMIAL.fullmatch, terms)):
        return False
    products = [re.sub(r"^[\d.]+", "", term) for term in terms]
    return any(one and products.count(one) == 1 for one in products)


def _has_names(formula: str) -> bool:
    return bool(re.search("[A-DF-HJ-Za-df-hj-z]", re.sub(r"\\[A-Za-z]+", "", formula)))


def doubts(problem: Problem, row: Row) -> Iterator[str]:
    """Yields why the gold of a row is doubtful."""
    gold = problem.answer
    if problem.kind == "letter":
        if why := doubtful_option(problem.options, ord(gold) - ord("A")):
            yield why
        return
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
