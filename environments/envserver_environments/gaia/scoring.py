"""Judges an answer by the official rules of GAIA, and finds it in a text.

Pure. The truth alone decides how an answer is compared: as a number if it is one, else as a list if
it has a comma or a semicolon, else as text. There is no partial credit and no tolerance.
"""

from __future__ import annotations

import math
import re
import string
from typing import Any

MAX_ANSWER_CHARACTERS = 10_000
"""Longer answers are wrong."""

_MARKER = re.compile(r"final answer:", re.IGNORECASE)
_SEPARATOR = re.compile(r"[,;]")
_SPACE = re.compile(r"\s")
_WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)
_WRAPPERS = (("**", "**"), ("[", "]"), ('"', '"'), ("'", "'"), ("“", "”"), ("‘", "’"))


def question_scorer(model_answer: Any, ground_truth: str) -> bool:
    """Returns the official verdict. It does not strip "FINAL ANSWER:"; see `extract_answer`.

    Args:
        model_answer: text; numbers and lists are converted to text, anything else is wrong.
    """
    answer = as_text(model_answer)
    if answer is None:
        return False
    if is_number(ground_truth):
        return _number(answer) == float(ground_truth)
    if _SEPARATOR.search(ground_truth):
        return _same_lists(_SEPARATOR.split(answer), _SEPARATOR.split(ground_truth))
    return _normalised(answer) == _normalised(ground_truth)


def leaderboard_verdict(submitted: Any, ground_truth: str) -> bool:
    """Returns the verdict of GAIA's leaderboard, which compares the submitted text as it is.

    So what `extract_answer` takes off makes an answer wrong here. A list is wrong, too: a line
    of the leaderboard holds a text or a number.
    """
    return isinstance(submitted, str | int | float) and question_scorer(submitted, ground_truth)


def extract_answer(output: Any) -> str | None:
    """Returns the answer in an agent's final text, or None if there is none.

    It is the text after the last "FINAL ANSWER:", or all of it, without one pair of brackets,
    quotes or double stars around it.
    """
    text = as_text(output)
    if text is None:
        return None
    answer = _unwrapped(_MARKER.split(text)[-1].strip())
    return answer if answer and len(answer) <= MAX_ANSWER_CHARACTERS else None


def is_too_long(output: Any) -> bool:
    """Returns whether the answer in `output` has over MAX_ANSWER_CHARACTERS."""
    text = as_text(output) or ""
    return len(_unwrapped(_MARKER.split(text)[-1].strip())) > MAX_ANSWER_CHARACTERS


def as_text(value: Any) -> str | None:
    """Converts an answer to text; None for None, sets, mappings and objects."""
    match value:
        case str():
            return value
        case bool() | int() | float():
            return _text_of_number(value)
        case list() | tuple():
            parts = [as_text(part) for part in value]
            return None if None in parts else ", ".join(part for part in parts if part is not None)
    return None


def is_number(text: str) -> bool:
    """Returns whether `float` accepts it."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def is_usable_truth(truth: str) -> bool:
    """Returns whether answers can be compared with it: it is not "?", empty, infinite or NaN.

    By the rules any text equals the number "inf", none equals "nan", and only punctuation equals
    the empty text.
    """
    if is_number(truth):
        return math.isfinite(float(truth))
    return bool(_normalised(truth))


def _text_of_number(value: float) -> str | None:
    try:
        return str(value)
    except ValueError:  # an integer with thousands of digits
        return None


def _unwrapped(answer: str) -> str:
    for start, end in _WRAPPERS:
        inner = answer[len(start) : -len(end)]
        if (
            len(answer) > len(start) + len(end)
            and answer.startswith(start)
            and answer.endswith(end)
            and start not in inner
            and end not in inner
        ):
            return inner.strip()
    return answer


def _number(text: str) -> float:
    for character in "$%,":
        text = text.replace(character, "")
    try:
        return float(text)
    except ValueError:
        return math.inf


def _same_lists(answers: list[str], truths: list[str]) -> bool:
    return len(answers) == len(truths) and all(
        _number(answer) == float(truth) if is_number(truth) else _folded(answer) == _folded(truth)
        for answer, truth in zip(answers, truths, strict=True)
    )


def _folded(text: str) -> str:
    return _SPACE.sub("", text).lower()


def _normalised(text: str) -> str:
    return _folded(text).translate(_WITHOUT_PUNCTUATION)
