r"""Converts the rows of each data set to `Problem`. Pure; loads nothing.

Ten formats of rows are known, each by the field names of its data set. A row names its format by a
key `data_set`, `dataset` or `source` with a known name, else its fields show it. The answer
("gold") is taken as the data set documents it:

    gsm8k      after the last `####`, without commas
    math       inside of the last balanced \boxed{} of the solution
    svamp      a decimal, whole numbers without a point
    mawps      without `_`
    mathqa     a letter; the options are one string or a list
    aqua       a letter
    aime       an integer, without leading zeros
    others     unchanged
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from typing import Literal

from envserver_environments.answers import last_boxed
from envserver_environments.rows import Row

from envserver import InputError

from .literals import is_number_literal

Kind = Literal["number", "expression", "letter"]

MAX_ANSWER_CHARACTERS = 300


@dataclass(frozen=True)
class Problem:
    """A problem with its answer.

    Args:
        question: the question, without the options.
        answer: the gold: a number, LaTeX, or a letter.
        kind: number: the answer must be a plain number; expression: any LaTeX; letter: an option.
        options: texts of the options A, B, C ... of a letter problem.
        expression: arithmetic that gives the answer, if the data set has it.
    """

    question: str
    answer: str
    kind: Kind
    data_set: str
    options: list[str] = field(default_factory=list)
    expression: str | None = None


@dataclass(frozen=True)
class Shape:
    """The format of one data set's rows.

    Args:
        fields: required fields; alternatives are separated by `|`.
        question, answer: read from a row; `answer` is None if there is no gold.
    """

    name: str
    fields: tuple[str, ...]
    kind: Kind
    question: Callable[[Row], str]
    answer: Callable[[Row], str | None]
    options: Callable[[Row], list[str]] = lambda row: []
    expression: Callable[[Row], str | None] = lambda row: None

    def missing(self, row: Row) -> list[str]:
        """The fields that `row` lacks."""
        return [name for name in self.fields if not any(key in row for key in name.split("|"))]


def read_problem(row: Row, data_set: str | None = None) -> Problem:
    """The problem in `row`.

    Args:
        row: with the fields of its data set.
        data_set: whose shape it has; unset: found from the row.

    Raises:
        InputError: the row has no known shape, or no answer.
    """
    shape = SHAPES[data_set] if data_set else shape_of(row)
    missing = shape.missing(row)
    if missing:
        raise InputError(f"A row of {shape.name} must have {', '.join(missing)}.")
    answer = shape.answer(row)
    options = shape.options(row)
    question = shape.question(row).strip()
    if not answer or not question:
        part = "question" if answer else "answer"
        raise InputError(f"This {shape.name} row holds no {part}.")
    if len(answer) > MAX_ANSWER_CHARACTERS:
        raise InputError(f"The answer of this {shape.name} row is too long.")
    if shape.kind == "letter" and not 0 <= ord(answer) - ord("A") < len(options):
        raise InputError(f"This {shape.name} row has no option {answer}.")
    return Problem(question, answer, shape.kind, shape.name, options, shape.expression(row))


def why_unusable(problem: Problem) -> str | None:
    """Returns why no answer to `problem` could ever be right, or None if one can.

    This is the cheap part of checking a gold against itself; the rest is done where
    answers are verified.
    """
    gold = problem.answer
    if problem.kind == "number" and not is_number_literal(gold):
        return "the gold is not a number"
    if last_boxed(f"\\boxed{{{gold}}}") != gold:
        return "the gold's braces are not balanced"
    return None


def shape_of(row: Row) -> Shape:
    """The shape of `row`: the one that it names, else the one that its fields show.

    Raises:
        InputError: it has no known shape.
    """
    for key in ("data_set", "dataset", "source"):
        name = _known_name(row.get(key))
        if name:
            return SHAPES[name]
    for name in _ORDER:
        if not SHAPES[name].missing(row) and (name != "aime" or _looks_like_aime(row)):
            return SHAPES[name]
    raise InputError(
        f"The fields {', '.join(map(str, list(row)[:12])) or '(none)'} are those of no data set.",
        hint=f"Known: {', '.join(SHAPES)}; a key data_set says which one is meant.",
    )


def _known_name(value: object) -> str | None:
    if not isinstance(value, str):
        return None
    plain = re.sub(r"[^a-z0-9]", "", value.rsplit("/", 1)[-1].lower())
    return _ALIASES.get(plain)


def _looks_like_aime(row: Row) -> bool:
    """Returns whether the answer is 0 to 999; a row with a solution must name AIME."""
    if not re.fullmatch(r"\d{1,3}", _text(row["answer"])):
        return False
    return "solution" not in row or "year" in row or "aime" in str(row.get("url", "")).lower()


def _text(value: object) -> str:
    """A text or a number as text; anything else is not an answer."""
    if isinstance(value, str):
        return value.strip()
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    return ""


def _first(row: Row, *keys: str) -> str:
    return next((_text(row[key]) for key in keys if key in row), "")


def _gsm8k_answer(row: Row) -> str | None:
    _, mark, after = _text(row["answer"]).rpartition("####")
    return after.strip().replace(",", "") if mark else None


def _gsm8k_expression(row: Row) -> str | None:
    """The right-hand calculation of the last `<<48/2=24>>` mark."""
    marks = re.findall(r"<<([^=<>]+)=[^<>]*>>", _text(row["answer"]))
    return str(marks[-1]) if marks else None


def _math_answer(row: Row) -> str | None:
    gold = last_boxed(_text(row["solution"]))
    return gold.strip() if gold else None


def _decimal_answer(row: Row) -> str | None:
    try:
        number = Decimal(_text(row["Answer"]).replace(",", ""))
    except InvalidOperation:
        return None
    # Written out, 1e999999999 would fill the memory.
    if not number.is_finite() or abs(number.adjusted()) > MAX_ANSWER_CHARACTERS:
        return None
    whole = number == number.to_integral_value()
    return f"{number:.0f}" if whole else f"{number.normalize():f}"


def _aime_answer(row: Row) -> str | None:
    try:
        return str(int(_text(row["answer"])))
    except ValueError:
        return None


def _letter(row: Row) -> str | None:
    letter = _text(row["correct"]).upper()
    return letter if re.fullmatch("[A-Z]", letter) else None


def _options(row: Row) -> list[str]:
    """The texts of `options`: a list, or one string in either of MathQA's two spellings."""
    raw = row["options"]
    if isinstance(raw, str) and raw.lstrip().startswith("["):
        try:
            raw = ast.literal_eval(raw.strip())
        except (ValueError, SyntaxError):
            return []
    elif isinstance(raw, str):
        raw = re.split(r"\s*,\s*(?=[a-eA-E]\s*\))", raw)
    if not isinstance(raw, list) or not all(isinstance(option, str | int) for option in raw):
        return []
    return [re.sub(r"^\s*\(?[a-eA-E]\s*\)\s*", "", str(option)).strip() for option in raw]


def _svamp_question(row: Row) -> str:
    body, question = _text(row["Body"]), _text(row["Question"])
    if not body or not question:
        return question
    return f"{body}{'' if body.endswith(('.', '?', '!', ',')) else '.'} {question}"


def _shapes() -> dict[str, Shape]:
    def question(row: Row) -> str:
        return _first(row, "question", "problem")

    def answer(row: Row) -> str:
        return _text(row["answer"])

    shapes = [
        Shape(
            "gsm8k", ("question", "answer"), "number", question, _gsm8k_answer,
            expression=_gsm8k_expression,
        ),
        Shape("math", ("problem", "solution"), "expression", question, _math_answer),
        Shape("math500", ("problem", "answer"), "expression", question, answer),
        Shape(
            "svamp", ("Body", "Question", "Answer"), "number", _svamp_question, _decimal_answer,
            expression=lambda row: _text(row.get("Equation")) or None,
        ),
        Shape(
            "mawps", ("question", "result"), "number", question,
            lambda row: _text(row["result"]).replace("_", ""),
            expression=lambda row: _text(row.get("expression")) or None,
        ),
        Shape(
            "mathqa", ("Problem", "options", "correct"), "letter",
            lambda row: _text(row["Problem"]), _letter, _options,
        ),
        Shape("aqua", ("question", "options", "correct"), "letter", question, _letter, _options),
        Shape("aime", ("problem", "answer"), "number", question, _aime_answer),
        Shape(
            "deepmath", ("question", "final_answer"), "expression", question,
            lambda row: _text(row["final_answer"]),
        ),
        Shape(
            "mathx", ("problem|question", "expected_answer"), "expression", question,
            lambda row: _text(row["expected_answer"]),
        ),
    ]  # fmt: skip
    return {shape.name: shape for shape in shapes}


SHAPES = _shapes()

_ORDER = (
    "svamp", "mathqa", "aqua", "deepmath", "mathx", "mawps", "aime", "math500", "math", "gsm8k",
)  # fmt: skip

_ALIASES = {name: name for name in SHAPES} | {
    "hendrycksmath": "math",
    "calcsvamp": "svamp",
    "calcmawps": "mawps",
    "aquarat": "aqua",
    "aime2024": "aime",
    "aime2025": "aime",
    "aime25": "aime",
    "deepmath103k": "deepmath",
    "mathx5m": "mathx",
}
