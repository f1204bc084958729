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
_TOKEN = re.compile(r"\d[\d,]*(?:\.\d+)?|\*\*|\\[A-Za-z]+|!!?|[^\s\\]")
_OPENING = {"{": "}", "(": ")", "[": "]"}
_POWERS = ("^", "**")
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
        """Reads up to the token `until`, a sum of products."""
        terms = [0.0]
        while (token := self._next()) not in ("", until):
            if token in ("+", "-"):
                terms.append(0.0)
            else:
                terms[-1] += self._part(token, depth)
        return max(terms) + math.log10(len(terms))

    def _part(self, token: str, depth: int) -> float:
        size = self._atom(token, depth)
        while (sign := self._peek()) in (*_POWERS, "!", "!!"):
            self._next()
            size = _factorial(size) if sign[0] == "!" else self._power(size, depth)
        return size

    def _power(self, base: float, depth: int) -> float:
        exponent = self._argument(depth)
        if depth < _DEEPEST and self._peek() in _POWERS:
            self._next()
            exponent = self._power(exponent, depth + 1)
        return base * _value(exponent) if base else 0.0

    def _argument(self, depth: int) -> float:
        """Reads what a power, an index or a binomial coefficient applies to: in TeX one token."""
        if depth >= _DEEPEST:
            return 0.0
        token = self._next()
        if token in ("+", "-"):
            token = self._next()
        return self._atom(token, depth + 1) if token else 0.0

    def _atom(self, token: str, depth: int) -> float:
        if token in _OPENING:
            return self._sequence(_OPENING[token], depth + 1) if depth < _DEEPEST else 0.0
        if token[0].isdecimal():
            whole, _, decimals = token.replace(",", "").partition(".")
            digits = whole.lstrip("0")
            first = float(f"{digits[:15] or 0}.{decimals[:15]}")
            return max(0, len(digits) - 15) + max(0.0, math.log10(first or 1))
        if token in _BINOMIALS:
            upper, lower = self._argument(depth), self._argument(depth)
            return math.inf if min(_value(upper), _value(lower)) > _MOST_CHOSEN else upper
        if token == "_":  # an index, or the limits of a sum
            limits = [self._argument(depth)]
            if self._peek() == "^":
                self._next()
                limits.append(self._argument(depth))
            return max(limits)
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
