r"""Estimates how large the numbers of a formula are, without evaluating anything. Pure.

In: LaTeX as a model writes it, such as `9^{9^{9}}`, `100000000!` or `\binom{10^6}{5*10^5}`. Out:
whether evaluating it would make a number of over a million digits, or take as long. Sizes are upper
bounds, as decimal logarithms; names and signs count as small numbers. Linear time.
"""

from __future__ import annotations

import math
import re

_MOST_DIGITS = 1_000_000
_MOST_CHOSEN = 20_000
"""A binomial coefficient is multiplied together in so many steps."""
_DEEPEST = 50
_TOKEN = re.compile(r"\d[\d,]*|\*\*|\\[A-Za-z]+|[^\s\\]")
_OPENING = {"{": "}", "(": ")", "[": "]"}
_BINOMIALS = ("\\binom", "\\dbinom", "\\tbinom")


def is_huge(latex: str) -> bool:
    """Returns whether evaluating `latex` would take unreasonable time for its length."""
    tokens = [token for token in _TOKEN.findall(latex) if token not in ("\\left", "\\right")]
    return _Reader(tokens).largest() > _MOST_DIGITS


class _Reader:
    """Reads tokens; every method returns the decimal logarithm of an upper bound."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens
        self._at = 0

    def largest(self) -> float:
        """Reads all tokens, also behind a bracket that nothing opened."""
        size = 0.0
        while self._at < len(self._tokens):
            size += self._sequence("", 0)
        return size

    def _sequence(self, until: str, depth: int) -> float:
        """Reads up to the token `until`; a sum is not larger than its parts multiplied."""
        size = 0.0
        while (token := self._next()) not in ("", until):
            size += self._part(token, depth)
        return size

    def _part(self, token: str, depth: int) -> float:
        size = self._atom(token, depth)
        while self._peek() in ("^", "**", "!"):
            if self._next() == "!":
                size = _factorial(size)
            else:
                exponent = self._argument(depth)
                size = size * _value(exponent) if size else 0.0
        return size

    def _argument(self, depth: int) -> float:
        """Reads what a power or a binomial coefficient applies to."""
        if depth >= _DEEPEST:
            return 0.0
        token = self._next()
        if token == "-":
            token = self._next()
        return self._part(token, depth + 1) if token else 0.0

    def _atom(self, token: str, depth: int) -> float:
        if token in _OPENING:
            return self._sequence(_OPENING[token], depth + 1) if depth < _DEEPEST else 0.0
        if token[0].isdigit():
            digits = token.replace(",", "").lstrip("0")
            return len(digits) - 1 + math.log10(int(digits[0])) if digits else 0.0
        if token in _BINOMIALS:
            upper, lower = self._argument(depth), self._argument(depth)
            return math.inf if min(_value(upper), _value(lower)) > _MOST_CHOSEN else upper
        return 0.0

    def _next(self) -> str:
        self._at += 1
        return self._tokens[self._at - 1] if self._at <= len(self._tokens) else ""

    def _peek(self) -> str:
        return self._tokens[self._at] if self._at < len(self._tokens) else ""


def _factorial(size: float) -> float:
    value = _value(size)
    return math.lgamma(value + 1) / math.log(10) if value < math.inf else math.inf


def _value(size: float) -> float:
    return 10**size if size < 12 else math.inf
