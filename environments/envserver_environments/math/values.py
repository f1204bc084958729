"""Evaluates formulas in floating point at a point, each name a fixed number, to see that two surely
differ. None for what is no plain term, can be read in two ways, or is not exact enough. Pure."""

from __future__ import annotations

import math
import re
import zlib
from functools import lru_cache

from .latex import readable

_TOKEN = re.compile(r"\d+(?:\.\d+)?|\.\d+|\\[A-Za-z]+|\S")
_LARGEST = 1e9
_APART = 1e-3
_DEEPEST = 30
_CONSTANTS: dict[str, complex] = {"e": math.e, "i": 1j, "\\pi": math.pi}
_NAME = re.compile(
    r"[A-Za-z]|\\(?:alpha|beta|gamma|delta|epsilon|theta|lambda|mu|nu|rho|sigma|tau|phi|omega)"
)
_GROUPS = {"(": ")", "{": "}", "[": "]"}
_FRACTIONS = ("\\frac", "\\dfrac", "\\tfrac", "\\cfrac")
_TIMES = ("\\cdot", "\\times", "*")
_LONG_NAME = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{3}")
"""A word, which is not a product of its letters."""


@lru_cache(maxsize=4096)
def value_of(latex: str) -> complex | None:
    plain = re.sub(r"\\(?:left|right)(?![A-Za-z])|\\[,;! ]", "", readable(latex))
    if _LONG_NAME.search(plain):
        return None
    try:
        return _Reader(_TOKEN.findall(plain)).whole()
    except (ArithmeticError, ValueError):
        return None


def values_differ(left: complex | None, right: complex | None) -> bool:
    """Returns whether both are known and differ by more than rounding explains."""
    if left is None or right is None:
        return False
    return abs(left - right) > _APART * max(1.0, abs(left), abs(right))


class _Reader:
    """Reads tokens; raises ValueError where they are no plain term."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = [*tokens, ""]
        self._at = 0
        self._depth = 0

    def whole(self) -> complex:
        value = self._sum()
        if self._peek():
            raise ValueError(self._peek())
        return value

    def _sum(self) -> complex:
        self._depth += 1
        if self._depth > _DEEPEST:
            raise ValueError("too deep")
        sign = {"-": -1, "+": 1}.get(self._peek(), 0)
        self._at += bool(sign)
        value = (sign or 1) * self._product()
        while (token := self._peek()) in ("+", "-"):
            self._at += 1
            value += self._product() if token == "+" else -self._product()
        self._depth -= 1
        return _bounded(value)

    def _product(self) -> complex:
        value, before = self._power(), ""
        while token := self._peek():
            if token in _TIMES:
                self._at += 1
                value *= self._power()
            elif token == "/" and before != "/":
                self._at += 1
                value /= self._power()
                before = "/"
            elif token in "+-)}]":
                break
            elif before == "/" or self._is_unclear(token):
                raise ValueError(token)
            else:
                value *= self._power()
        return _bounded(value)

    def _is_unclear(self, token: str) -> bool:
        """Whether a factor may be something else: `1 2`, the mixed number `2\\frac12`, `f(x)`."""
        last = self._tokens[self._at - 1]
        after_number = last[-1:].isdigit() and (token[0] in ".0123456789" or token in _FRACTIONS)
        return after_number or (token == "(" and last.isalpha())

    def _power(self) -> complex:
        value = self._atom()
        if self._peek() == "!":
            self._at += 1
            if value not in range(13) or self._peek() == "!":
                raise ValueError("no number that is known, or a double factorial")
            value = math.factorial(int(value.real))
        if self._peek() != "^":
            return value
        self._at += 1
        token = self._peek()
        if token != "{" and len(token) > 1:  # `2^10`: TeX reads 2^1 and 0
            raise ValueError(token)
        return _raised(value, self._atom())

    def _atom(self) -> complex:
        token = self._peek()
        if token in ("(", "{"):
            return self._group(token)
        self._at += 1
        if token in _FRACTIONS:
            return self._group("{") / self._group("{")
        if token == "\\sqrt":
            degree = self._group("[") if self._peek() == "[" else 2
            return _raised(self._group("{"), 1 / degree)
        if _NAME.fullmatch(token):  # math-verify may take a large letter for a small one
            name = token.lower()
            return _CONSTANTS.get(name, 0.5 + zlib.crc32(name.encode()) % 9973 / 4999)
        return _CONSTANTS.get(token) or _bounded(float(token))

    def _group(self, opening: str) -> complex:
        self._expect(opening)
        value = self._sum()
        self._expect(_GROUPS[opening])
        return value

    def _expect(self, token: str) -> None:
        if self._peek() != token:
            raise ValueError(f"no {token}")
        self._at += 1

    def _peek(self) -> str:
        return self._tokens[min(self._at, len(self._tokens) - 1)]


def _raised(base: complex, exponent: complex) -> complex:
    """A power; of what is not positive only whole ones and square roots have one value."""
    is_clear = not exponent.imag and exponent.real in (0.5, *range(1, 20))
    if not is_clear and (base.imag or base.real <= 0):
        raise ValueError("several values")
    return _bounded(base**exponent)


def _bounded(value: complex) -> complex:
    if not abs(value) < _LARGEST:
        raise ValueError("not exact enough")
    return value
