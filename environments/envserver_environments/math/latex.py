r"""Reads LaTeX as TeX does, and finds answers whose form the gold excludes. Pure.

In: a gold or an answer without `\boxed`. Out: the same mathematics in a form that math-verify
understands: braces around the arguments of `\frac` and `\sqrt`, plain numbers out of `\text{12}`,
and `12 \times 10^{6}` for `12\text{ million}`.
"""

from __future__ import annotations

import re

_TEXT = r"\\(?:text|textbf|textit|textrm|textnormal|mathrm|mathbf|mathit|mbox|fbox)\s*"
_TOKEN = re.compile(r"\\sqrt\s*\[[^\[\]]*\]|\\[A-Za-z]+|\\.|\s+|.", re.DOTALL)
_TWO_ARGUMENTS = ("\\frac", "\\dfrac", "\\tfrac", "\\cfrac")
_NUMBER_IN_TEXT = re.compile(
    rf"{_TEXT}\{{(\s*(?:\\?\$)?\s*[-+−]?\s*(?:\d[\d,.]*|\.\d+)\s*(?:\\?%)?\s*)\}}"
)
_SCALE = re.compile(
    rf"(?<=\d)(?:\\[,;:!> ]|~|\s)*+{_TEXT}\{{\s*(hundred|thousand|million|billion|trillion)\b"
    r"([^{}]*)\}$"
)
_POWERS = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}

_EQUAL = re.compile(r"(?<![<>!:])=")
_ORDER = re.compile(r"[<>]|\\(?:leq?|geq?|lt|gt|leqslant|geqslant)(?![A-Za-z])")
_INTERVAL = re.compile(r"[\[(]|\\(?:in|cup|mathbb)(?![A-Za-z])")
_NAME = re.compile(
    r"\s*(?:[A-Za-z]|\\[A-Za-z]+(?:\{[^{}]*\})?)(?:_(?:\w|\{[^{}]*\}))?'*\s*(?:\([^()]*\))?\s*"
)
_NUMBER = re.compile(r"\s*-?[\d.,]+\s*")
_BASE = re.compile(r".*\d_(?:(\d)|\{\s*(\d+)\s*\})\s*", re.DOTALL)


def readable(latex: str) -> str:
    """Returns `latex` in a form that math-verify reads as TeX does."""
    plain = latex.strip()
    if number := _NUMBER_IN_TEXT.fullmatch(plain):
        return number[1].strip()
    return _SCALE.sub(_power_of_ten, with_braces(plain))


def with_braces(latex: str) -> str:
    r"""Puts braces around arguments without them: `\frac{\sqrt3}2` is `\frac{\sqrt{3}}{2}`.

    As in TeX an argument without braces is one token: `\frac123` is one half, then 3.
    """
    parts: list[str] = []
    missing = 0
    outer: list[int] = []  # arguments that are missing after each open brace
    for token in _TOKEN.findall(latex):
        part = token
        if token == "{":
            outer.append(max(0, missing - 1))
            missing = 0
        elif token == "}":
            missing = outer.pop() if outer else 0
        elif token in _TWO_ARGUMENTS:
            missing = 2
        elif token.startswith("\\sqrt"):
            missing = 1
        elif missing and not token.isspace():
            part, missing = f"{{{token}}}", missing - 1
        parts.append(part)
    return "".join(parts)


def forms_differ(gold: str, answer: str) -> bool:
    """Returns whether `answer` has a form that cannot equal `gold`, though math-verify says so.

    It takes the right side of any equation, and the ends of an interval, for the whole; and it
    drops the base of a number.
    """
    bases = _BASE.fullmatch(gold), _BASE.fullmatch(answer)
    if bases[0] and bases[1] and bases[0].groups() != bases[1].groups():
        return True
    if _ORDER.search(gold):
        return not (_ORDER.search(answer) or _INTERVAL.search(answer))
    equation = _EQUAL.search(gold)
    if equation:
        named = _NAME.fullmatch(gold[: equation.start()])
        return not named and not _EQUAL.search(answer)
    sides = _EQUAL.split(answer)
    return len(sides) == 2 and all(map(_NUMBER.fullmatch, sides)) and sides[0] != sides[1]


def _power_of_ten(found: re.Match[str]) -> str:
    unit = f"\\text{{{found[2]}}}" if found[2].strip() else ""
    return f" \\times 10^{{{_POWERS[found[1]]}}}{unit}"
