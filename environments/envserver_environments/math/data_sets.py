"""Converts rows of data sets to `Problem`s, by what their fields are. Pure.

The answer ("gold") is the row's answer, else what its solution boxes or ends with after `####`:
several are listed with commas; a letter is found from a letter, an option's text or an index from
0; a number loses commas, its unit in `9 (apples)`, and the point where it is whole.
"""

from __future__ import annotations

import hashlib
import re
import string
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from math import isfinite
from pathlib import Path
from typing import Any, Literal

from envserver_environments.answers import last_boxed
from envserver_environments.rows import (
    DataSets,
    FirstOption,
    Row,
    by_label,
    decoded,
    last_message,
    missing,
    published,
    roles_of,
    value_at,
)
from envserver_records.tasks import Json

from envserver import InputError

from .latex import quantity, readable
from .literals import is_number_literal, plain_number
from .units import measure

Kind = Literal["number", "expression", "letter"]

MAX_ANSWER_CHARACTERS = 300
ROLES, HUBS = published(__file__)
"""Fields that certainly hold the gold come before `answer`, which may be a model's. A `choice` is
the answer only of a question with options; in other rows it may be a mark."""
_LETTERS = string.ascii_uppercase
_NO_ANSWERS = ("proof", "notfound", "n/a", "none", "nan")
_LABEL = re.compile(r"^\s*(?:[(（]\s*([A-Za-z])\s*[)）]|([A-Za-z])\s*[).:．、：])\s*")
_MARKED = re.compile(r"####\s*(\S[^\n]*?)\s*\Z")
_LETTER = re.compile(r"\(?([A-J])[).:]?(?:\\?\s.*)?")
_TEX = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\s*\{([^{}]*)\}")
_INSIDE = re.compile(
    r"(?:\\(?:text|textbf|mathrm|mathbf)\s*\{\s*|(?<=[\s$}])|^)"
    r"(?:[(（]([A-J])[)）]|([A-J])(?:[.):](?=[\s}$\\])|[．、：]))(?:[\\\s]*\})?\s*"
)
_WRONG = re.compile(r"(?i)(?:incorrect|wrong)[ _]answer[ _]?\d+|distractor[ _]?\d+")
_SPLIT = re.compile(r"\s*,\s*(?=[a-jA-J]\s*\))|\n\s*(?=\(?[A-Ja-j][).:]\s)")
_COLUMN = re.compile(r"(?i:opt?|option|choice|ending)[ _]?(\d|[A-Ja-j])|([A-J])")
_LONE_BACKSLASH = re.compile(r"(?<!\\)\\(?![\\\"]|u[0-9a-fA-F]{4})")
"""In a JSON text, where `\frac` would be a form feed and `rac`."""
_UNIT = re.compile(r"\A\s*(?:\\times\s*)?(10\^(?:\{-?\d+\}|-?\d+))?\s*(.*?)\s*\Z", re.DOTALL)
_MARKS = ("correct", "is_correct", "label")
_SAID = re.compile(r"(?i)the (?:final )?answer is:?\s*(\S[^\n]*?)\.?\s*\Z")
_PROSE = re.compile(
    r"(?:(?<![\\A-Za-z{])[A-Za-z']+[,;:.]?\s+){5}[A-Za-z]"
    r"|####|\b[A-Za-z]+\s+(?:is|are|was|were|has|have|had|will)\s[^$\\]*\d"
)
"""Six words one after the other, or a verb before a number: a sentence, which no answer equals."""
_BEFORE_THE_QUESTION = re.compile(
    r"\A\s*Solve the following math problem step by step\. The last line of your response should"
    r"[^\n]*\n+"
)
_ABOUT_THE_ANSWER = re.compile(
    r"\s*Remember to put your answer on its own line after \"Answer:\"\.?\s*\Z"
    r"|\s*Let's think step by step and output the final answer (?:after|within)[^\n]*\Z"
    r"|[ \n]*[^\n.?!]*\b(?:answer|response)\b[^\n]*\\boxed\{[^{}]*\}[^\n\w]*\Z"
)
"""Instructions that published sets add to a question; our prompts have their own."""
_LONGEST_INSTRUCTION = 500


@dataclass(frozen=True)
class Problem:
    """A problem with its answer."""

    question: str  # without the options
    answer: str  # the gold: a number, LaTeX, or a letter
    kind: Kind  # number: a plain number is wanted; expression: any LaTeX; letter: an option
    data_set: str
    options: list[str] = field(default_factory=list)
    expression: str | None = None  # arithmetic that gives the answer


def read_problem(
    row: Row,
    data_set: str = "rows",
    columns: Mapping[str, str] | None = None,
    first: FirstOption = lambda: 0,
) -> Problem:
    found = roles_of(row, ROLES, columns or {})
    truth = row.get((columns or {}).get("answer", "answer"), row.get("Answer"))
    if isinstance(truth, bool):
        found.setdefault("answer", str(truth))
    if isinstance(row.get("choice"), list):
        found.setdefault("options", row["choice"])
    question = _question(row, found)
    options = _with_wrong(row, found) or _options(row, found)
    if "options" in found and not options:
        raise InputError("The row's options cannot be read.")
    if "choice" in found and (options or _LETTER.fullmatch(_text(found["choice"]))):
        found.setdefault("answer", found["choice"])
    said = last_message(row.get("messages", row.get("conversations")), "assistant", "gpt")
    if said:
        found.setdefault("solution", said)
    if not found.keys() & {"answer", "solution"}:
        raise missing(row, ["answer", "solution"])
    if "answer" not in found and {str(row.get(mark)).lower() for mark in _MARKS} & {"0", "false"}:
        raise InputError("The row's solution is marked as wrong.")
    answer, kind = _choice(found, options, first) if options else _gold(row, found)
    if not options and (letter := _LETTER.fullmatch(_TEX.sub(r"\1", answer))):
        stem, inside = _options_inside(question)
        if letter[1] in _LETTERS[: len(inside)]:
            question, options, answer, kind = stem, inside, letter[1], "letter"

    if not answer or answer.lower() in _NO_ANSWERS:
        raise InputError(f"The row has no answer{answer and f': {answer.lower()}'}.")
    if _PROSE.search(answer):
        raise InputError("The answer is a sentence; --env.columns names another field.")
    if len(answer) > MAX_ANSWER_CHARACTERS:
        raise InputError(f"The answer is longer than {MAX_ANSWER_CHARACTERS} characters.")
    unit = _text(row.get("unit"))[:100]
    if unit and kind != "letter" and plain_number(readable(answer)) is not None:
        answer += _unit(answer, unit)
    name = row.get("data_set") or row.get("dataset") or data_set
    return Problem(question, answer, kind, str(name), options, _expression(row, found))


def why_unusable(problem: Problem) -> str | None:
    """Returns why no answer could ever be right, or None. This is the cheap part; a gold is
    compared with itself where answers are verified."""
    gold = problem.answer
    if problem.kind == "number" and not is_number_literal(gold):
        return "the gold is not a number"
    if last_boxed(f"\\boxed{{{gold}}}") != gold:
        return "the gold's braces are not balanced"
    return None


def _question(row: Row, found: Json) -> str:
    question = _BEFORE_THE_QUESTION.sub("", _text(last_message(found.get("question"))))
    start = max(0, len(question) - _LONGEST_INSTRUCTION)
    question = f"{question[:start]}{_ABOUT_THE_ANSWER.sub('', question[start:])}".strip()
    if not question:
        raise missing(row, ["question"])
    setting = _text(found.get("setting"))
    if setting and setting not in question:
        end = "" if setting.endswith((".", "?", "!", ",")) else "."
        question = f"{setting}{end} {question}"
    numbers = str(row.get("Numbers") or "").split()  # MAWPS: "number0 apples", "8.0 2.0"
    return re.sub(
        r"\bnumber(\d+)\b",
        lambda name: _plain(numbers[int(name[1])]) if int(name[1]) < len(numbers) else name[0],
        question,
    )


def _gold(row: Row, found: Json) -> tuple[str, Kind]:
    value = found.get("answer")
    held = decoded(_LONE_BACKSLASH.sub(r"\\\\", value) if isinstance(value, str) else value)
    kind = str(row.get("answer_type", row.get("Answer_type")))  # TheoremQA: list of integer
    is_list = isinstance(held, list) and (isinstance([*held, ""][0], str) or "list" in kind)
    if isinstance(held, Mapping) or is_list:
        value = held  # [0, 1] in a text is an interval
    if isinstance(value, list):
        parts = list(dict.fromkeys(_unwrapped(_text(part)) for part in value))
        if len(parts) > 1 and _same_value(parts):
            parts = parts[:1]
        return ", ".join(parts) if all(parts) else "", "expression"
    text = _text(value)
    source = text or _text(_one(found.get("solution")))
    if marked := _MARKED.search(source):
        is_formula = "\\" in marked[1] or marked[1][0] in "([{"
        if is_number_literal(number := marked[1].replace(",", "")) or (text and not is_formula):
            return number, "number"
        source, text = (marked[1], marked[1]) if text else (source, "")
    said = _SAID.search(source)
    if not text:
        lone = source if is_number_literal(source) else ""
        text = last_boxed(source) or (said[1] if said else lone)
        return _unwrapped(f"\\boxed{{{text}}}"), "expression"
    answer = _unwrapped(said[1] if said else text)
    if "result" in row:
        answer = answer.replace("_", "")  # MAWPS: 12_000
    if (named := re.fullmatch(r"(.*\S)\s*\([A-Za-z][^()]*\)", answer)) and _is_number(named[1]):
        answer = named[1]
    is_contest = "problem" in row and (  # AIME, AMC
        "solution" not in found or "year" in row or "aime" in str(row.get("url", "")).lower()
    )
    is_gsm8k = "####" in _text(value_at(row, "extra_info.answer"))  # as verl holds it
    is_number = is_gsm8k or isinstance(value, float) or "expression" in found
    if is_contest and re.fullmatch(r"\d{1,3}", answer):
        return str(int(answer)), "number"
    if not _is_number(answer) or not _plain(answer):
        is_literal = is_number and is_number_literal(answer)  # 13/20
        return "" if _is_number(answer) else answer, "number" if is_literal else "expression"
    return (_plain(answer), "number") if is_number else (answer, "expression")


def _unit(number: str, text: str) -> str:
    r"""Returns ` \times 10^{-3}\text{ kg}` for the unit `$10^{-3}$kg` of a number (SciBench)."""
    power, name = _UNIT.findall(text.replace("$", ""))[0]
    power = power and f" \\times {power}"
    name = name if "\\" in name or "%" in name else f"\\text{{ {name}}}"
    value, unit = quantity(readable(f"{number}{name}"))
    return f"{power}{name}" if measure(unit) or value.endswith("%") else power


def _same_value(parts: list[str]) -> bool:
    numbers = {plain_number(readable(part)) for part in parts}
    return len(numbers) == 1 and None not in numbers


def _one(value: Any) -> Any:
    return value[0] if isinstance(value, list) and value else value


def _is_number(text: str) -> bool:
    return re.fullmatch(r"[-+]?[\d,]*\.?\d+(?:[eE][-+]?\d+)?", text) is not None


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value.strip()
    if isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value):
        return str(value)
    return ""


def _unwrapped(text: str) -> str:
    if (boxed := last_boxed(text)) is not None:
        text = boxed.strip()
    if text.count("$") % 2 == 0 and "\\$" not in text:  # one formula, or several: "$8$, $4$"
        text = text.replace("$", "").strip()
    return re.sub(r"\\[()\[\]]", "", text).strip()


def _plain(text: str) -> str:
    """A number without thousands commas, and without a point where it is whole; else ""."""
    try:
        number = Decimal(text.replace(",", ""))
    except InvalidOperation:
        return ""
    # Written out, 1e999999999 would fill the memory.
    if not number.is_finite() or abs(number.adjusted()) > MAX_ANSWER_CHARACTERS:
        return ""
    whole = number == number.to_integral_value()
    return f"{number:.0f}" if whole else f"{number.normalize():f}"


def _expression(row: Row, found: Json) -> str | None:
    """Arithmetic that gives the answer: a set's own, or in GSM8K the last `<<48/2=24>>`."""
    marks = re.findall(r"<<([^=<>]+)=[^<>]*>>", _text(found.get("answer")))
    text = str(marks[-1]) if marks else _text(found.get("expression")).partition("=")[0].strip()
    return (
        text if re.search(r"\d\s*\)*\s*[-+*/]", text) and not re.search(r"[a-zA-Z]", text) else None
    )


def _options(row: Row, found: Json) -> list[str]:
    value: Any = by_label(found.get("options"))
    if isinstance(value, str):
        value = _SPLIT.split(value)
    columns = value if isinstance(value, Mapping) else {}
    if value is None:
        matches = {name: _COLUMN.fullmatch(str(name)) for name in row}
        columns = {label[1] or label[2]: row[name] for name, label in matches.items() if label}
    if not isinstance(value, list):
        names = sorted((name for name in columns if columns[name] is not None), key=str)
        found["labels"] = names
        value = [columns[name] for name in names] if all(len(str(n)) == 1 for n in names) else []
    texts = [str(option).strip() for option in value if isinstance(option, str | int | float)]
    if len(texts) != len(value) or len(texts) > len(_LETTERS):
        return []
    labels = [_LABEL.match(text) for text in texts]
    named = "".join(_name(label) for label in labels if label)
    if texts and named == _LETTERS[: len(texts)]:
        texts = [
            text[label.end() :].strip() for text, label in zip(texts, labels, strict=True) if label
        ]
    return texts if len(texts) > 1 else []


def _with_wrong(row: Row, found: Json) -> list[str]:
    """The right option among the wrong ones, of sets that have them apart, in an order that only
    their texts decide; the answer becomes its letter."""
    wrong, right = decoded(found.get("wrong")), _text(found.get("answer"))
    given, marks = decoded(found.get("options")), found.get("labels")
    marks = marks if isinstance(marks, list) and all(mark in (0, 1) for mark in marks) else []
    if not right and marks.count(1) == 1 and isinstance(given, list):
        right = found["answer"] = _text(given[marks.index(1)])
        wrong = given
    if not isinstance(wrong, list):
        wrong = [row[name] for name in row if _WRONG.fullmatch(str(name))]
    if not wrong or not right:
        return []
    texts = {right, *map(_text, wrong)} - {""}
    options = sorted(texts, key=lambda text: hashlib.sha256(text.encode()).digest())
    found["answer"] = _LETTERS[options.index(right)]
    return options


def _options_inside(question: str) -> tuple[str, list[str]]:
    """Takes the options out of a question that ends with them: "... (A) 3 (B) 4", "A. 3\nB. 4"."""
    labels = list(_INSIDE.finditer(question))
    starts = [place for place, label in enumerate(labels) if _name(label) == "A"]
    run = labels[starts[-1] :] if starts else []
    if len(run) < 2 or "".join(map(_name, run)) != _LETTERS[: len(run)]:
        return question, []
    ends = [*(label.start() for label in run[1:]), len(question)]
    texts = [question[label.end() : end] for label, end in zip(run, ends, strict=True)]
    return question[: run[0].start()].strip(" \n$"), [_untied(text) for text in texts]


def _untied(option: str) -> str:
    r"""Without what TeX sets between options, as in `\ 4 \qquad`, and a lone `$`."""
    text = re.sub(r"^(?:\\[ ,;])+|(?:\\q?quad|\\\\|\\[ ,;]|[\s~;,])+$", "", option.strip()).strip()
    return text.strip("$ ") if text.count("$") % 2 else text


def _name(label: re.Match[str]) -> str:
    return (label[1] or label[2]).upper()


def _choice(found: Json, options: list[str], first: FirstOption) -> tuple[str, Kind]:
    answer = found.get("answer", last_boxed(_text(_one(found.get("solution")))))
    letter = _letter(answer, options, first)
    values, labels = decoded(found.get("options")), found.get("labels")
    if isinstance(labels, list) and len(labels) == len(options):
        known = [_text(label).upper() for label in labels]
        if known.count(_text(answer).upper()) == 1:
            letter = _LETTERS[known.index(_text(answer).upper())]
    elif isinstance(values, list) and isinstance(answer, int) and answer in values:
        by_value = _LETTERS[values.index(answer)]
        letter = by_value if letter in ("", by_value) else ""
    if not letter:
        raise InputError(
            f"The row has no answer: {str(answer)[:40]!r} is no clear option. If numbers of options"
            " begin with 1, set --env.first_option 1."
        )
    return letter, "letter"


def _letter(value: Any, options: list[str], first: FirstOption) -> str:
    """The letter of the right option, from a letter, a text, both, or a number; else ""."""
    numbered: dict[str, str] = {}
    if re.fullmatch(r"\d{1,2}(?:\.0)?", _text(value)):
        numbered = {str(at): name for at, name in enumerate(_LETTERS[: len(options)], first())}
    if isinstance(value, list):
        value = value[0] if len(value) == 1 else None  # several right ones are not asked for
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, int):
        return numbered.get(str(value), "")
    said = _SAID.search(_text(value))
    text = _TEX.sub(r"\1", _unwrapped(said[1] if said else _text(value))).strip("*")
    letters = _LETTERS[: len(options)]
    if len(text) == 1 and text.upper() in letters:
        return text.upper()
    same = [number for number, option in enumerate(options) if option == text]
    if len(same) == 1:
        return letters[same[0]]
    if found := _LABEL.match(text):
        letter, rest = _name(found), text[found.end() :].strip()
        fits = letter in letters and rest in ("", options[letters.index(letter)])
        return letter if fits else ""
    return numbered.get(text, "")


SAMPLE = Path(__file__).parent / "data" / "sample.jsonl"


DATA = DataSets(SAMPLE, HUBS)
