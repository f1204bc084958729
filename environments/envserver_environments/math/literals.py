r"""Decides whether an answer is a plain number, written out.

The rule for data sets whose answers are numbers: it closes the hole of boxing the unevaluated
expression (`\boxed{12 \cdot 34}` would verify as equal).
"""

from __future__ import annotations

import re

from .latex import readable

_SPACE = r"(?:\\[,;:!> ]|~|\s)*+"
_SIGN = rf"(?:[-+−]{_SPACE})?"
_DIGITS = r"(?:\d+(?:(?:,|\{,\}|,\\!)\d+)*(?:\.\d*)?|\.\d+)"
_INTEGER = r"[-+−]?\d+"
_EXPONENT = rf"10\^(?:\{{\s*{_INTEGER}\s*\}}|\d+)"
_UNIT = (
    rf"{_SPACE}(?:\\(?:text|textrm|textnormal|mathrm|mbox)\s*\{{(?P<unit>[^{{}}\\]*)\}}"
    r"(?:\^(?:\{\s*-?\d+\s*\}|\d))?"
    r"|\^(?:\{\s*\\circ\s*\}|\\circ)|°|\\degree)"
)
_NUMBER = rf"(?:\\?\${_SPACE}{_SIGN})?{_DIGITS}(?:{_SPACE}(?:\\times|\\cdot|×){_SPACE}{_EXPONENT})?"
_FRACTION = (
    rf"(?:\d+{_SPACE})?\\[dtc]?frac\s*\{{\s*{_INTEGER}\s*\}}\s*\{{\s*{_INTEGER}\s*\}}"
    rf"|(?:\d+\s+)?\d+\s*/\s*\d+"
)
_LITERAL = re.compile(
    rf"{_SPACE}(?:[A-Za-z]\s*=\s*)?{_SPACE}"
    rf"{_SIGN}(?:{_FRACTION}|{_EXPONENT}|{_NUMBER})"
    rf"(?:{_SPACE}\\?%)?(?:{_UNIT})?{_SPACE}"
)

_NO_UNIT = re.compile(
    r"\b(?:or|and|to|is|isn|not|no|than|plus|minus|times|mod|squared|cubed|factorial|dozens?"
    r"|hundreds?|thousands?|(?:m|b|tr)illions?|one|two|three|four|five|six|seven|eight|nine|ten"
    r"|eleven|twelve|half|halves)\b|(?<![a-z])\d",
    re.IGNORECASE,
)
"""Texts behind a number that change it."""


def is_number_literal(answer: str) -> bool:
    r"""Returns whether `answer` is one number and nothing else.

    An integer with optional commas, a decimal, a fraction of integers (also mixed), a power of ten
    or a number times one; each with an optional sign, dollar sign, percent sign, `\text{unit}` or
    degree sign, and an optional `x =` before it.
    """
    found = _literal(answer)
    return found is not None and not _NO_UNIT.search(found["unit"] or "")


def has_false_unit(answer: str) -> bool:
    r"""Returns whether `answer` is a number and a text that changes it, as `12\text{ or 13}`."""
    found = _literal(answer)
    return found is not None and bool(_NO_UNIT.search(found["unit"] or ""))


def _literal(answer: str) -> re.Match[str] | None:
    plain = answer.strip()
    if len(plain) > 2 and plain[0] == plain[-1] == "$":
        plain = plain[1:-1]
    return _LITERAL.fullmatch(readable(plain)) if len(plain) <= 300 else None
