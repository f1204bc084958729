r"""Decides whether an answer is a plain number, where answers are numbers: boxing the unevaluated
expression `12 \cdot 34` must not pay."""

from __future__ import annotations

import re
from fractions import Fraction

from .latex import quantity, readable
from .units import measure

_INTEGER = r"[-+]?\d+"
_EXPONENT = rf"10\^(?:\{{\s*{_INTEGER}\s*\}}|\d+)"
_NUMBER = rf"(?:\d+(?:,\d+)*(?:\.\d*)?|\.\d+)(?:\s*(?:\\times|\\cdot|\*)\s*{_EXPONENT})?"
_FRACTION = (
    rf"(?:\d+\s*)?\\[dtc]?frac\s*\{{\s*{_INTEGER}\s*\}}\s*\{{\s*{_INTEGER}\s*\}}|\d+\s*/\s*\d+"
)
_NAME = r"(?:(?!.*\b(?:not|isn)\b)[^=]*[A-Za-z](?:[^=!<>(]|\([^()]*\))*=)"
_LITERAL = re.compile(
    rf"{_NAME}?\s*(?:[-+]\s*)?(?:{_FRACTION}|{_EXPONENT}|{_NUMBER})(?:\s*\\?%)?\s*"
)

_PLAIN = re.compile(
    r"(?P<sign>[-+]?)(?:(?P<decimal>(?:\d{1,30}|\d{1,3}(?:,\d{3}){1,9})(?:\.\d{1,30})?|\.\d{1,30})"
    r"(?:\s*(?:\\times|\\cdot|\*)\s*10\^\{?\s*(?P<exponent>[-+]?\d{1,3})\s*\}?)?"
    r"|\\[dt]?frac\{(?P<top>-?\d{1,9})\}\{(?P<bottom>-?\d{1,9})\}"
    r"|(?P<over>\d{1,9})/(?P<under>\d{1,9}))",
    re.ASCII,
)

PLAIN_NUMBER = r"[-+]?(?:\\[dt]?frac\{-?\d+\}\{-?\d+\}|(?:\d+(?:\.\d+)?|\.\d+)(?:/\d+)?)"
_AROUND = (
    r"(?:[\s()\[\]{}°%$]|\\(?:[{},;!%$ ]|left|right|degree)|\^(?:\\circ|\{\s*\\circ\s*\})"
    r"|\\(?:text|mathrm|mbox)\s*\{[^{}\d]*\}|[A-Za-z]\s*=)*"
)
_LISTED = re.compile(
    rf"{_AROUND}{PLAIN_NUMBER}{_AROUND}(?:[,;]{_AROUND}{PLAIN_NUMBER}{_AROUND})*", re.ASCII
)
_APART = Fraction(1, 1000)

_NO_UNIT = re.compile(
    r"\b(?:or|and|to|is|isn|not|no|than|plus|minus|times|mod|squared|cubed|factorial|dozens?"
    r"|(?:ten|hundred|thousand|million)ths?|k|hundreds?|thousands?|(?:m|b|tr)illions?|one|two|three|four|five|six|seven|eight|nine|ten"
    r"|eleven|twelve|(?:thir|four|fif|six|seven|eigh|nine)teen|(?:twen|thir|for|fif|six|seven|eigh|nine)ty"
    r"|half|halves|at (?:most|least))\b|(?<![a-z^])\d",
    re.IGNORECASE,
)
"""Texts behind a number that change it."""


def plain_number(latex: str) -> Fraction | None:
    r"""Returns the number that a readable text is; None if it is not plain: an integer, a decimal
    (also with thousands commas), `a/b`, `\frac{a}{b}` or `1.2 \times 10^{-5}`, of few digits."""
    found = _PLAIN.fullmatch(latex)
    if found is None:
        return None
    top, bottom = found["top"] or found["over"], found["bottom"] or found["under"]
    if found["decimal"]:
        decimal = Fraction(found["decimal"].replace(",", ""))
        number = decimal * Fraction(10) ** int(found["exponent"] or 0)
    elif int(bottom) == 0:
        return None
    else:
        number = Fraction(int(top), int(bottom))
    return -number if found["sign"] == "-" else number


def listed_numbers(latex: str) -> list[Fraction]:
    """Returns the number that `latex` is, or those listed in it (a list, set, pair or interval),
    each with its unit or name; else nothing."""
    if (number := plain_number(latex)) is not None:
        return [number]
    texts = re.findall(PLAIN_NUMBER, latex) if _LISTED.fullmatch(latex) else []
    numbers = [number for text in texts if (number := plain_number(text)) is not None]
    return numbers if len(numbers) == len(texts) else []


def lists_differ(gold: str, answer: str) -> bool:
    """Returns whether both list numbers in the same form, and surely other ones."""
    if len({re.sub(PLAIN_NUMBER, "", text) for text in (gold, answer)}) > 1:
        return False
    wanted, given = sorted(listed_numbers(gold)), sorted(listed_numbers(answer))
    return len(wanted) == len(given) and any(
        abs(right - other) > max(_APART, _APART * abs(right))
        for right, other in zip(wanted, given, strict=True)
    )


def is_number_literal(answer: str) -> bool:
    """Returns whether `answer` is one number: an integer, a decimal, a fraction of integers (also
    mixed), a power of ten or a number times one; with optional sign, dollar or percent sign, unit,
    degree sign, and `x =` or `f(2) =` before it."""
    value, unit = quantity(readable(answer) if len(answer) <= 300 else "")
    return _LITERAL.fullmatch(value) is not None and not changes_number(unit)


def changes_number(unit: str) -> bool:
    r"""Returns whether a text behind a number changes it, as in `12\text{ or 13}`."""
    return _NO_UNIT.search(unit) is not None and measure(unit) is None
