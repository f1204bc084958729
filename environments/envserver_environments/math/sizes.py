r"""Estimates how large the numbers of a formula are, without evaluating anything. Pure.

In: LaTeX as a model writes it, such as `9^{9^{9}}`, `100000000!` or `\binom{10^6}{5*10^5}`. Out:
whether evaluating it would make a number of over a million digits, or take as long: roots of large
numbers are sought among their divisors, and powers of sums with names are multiplied out. Sizes are
upper bounds; names and signs count as small numbers. Linear time.
"""

from __future__ import annotations

import math
import re
from typing import NamedTuple

_MOST_DIGITS = 1_000_000
_MOST_CHOSEN = 20_000
"""A binomial coefficient is multiplied together in so many steps."""
_MOST_DIGITS_OF_ROOTS = 1000
_MOST_TERMS = 250
_DEEPEST = 50
_TOKEN = re.compile(r"\d[\d,]*(?:\.\d+)?|\*\*|\\[A-Za-z]+|!!?|[^\s\\]")
_OPENING = {"{": "}", "(": ")", "[": "]"}
_POWERS = ("^", "**")
_BINOMIALS = ("\\binom", "\\dbinom", "\\tbinom")
_ROOTS = ("\\sqrt", "\\ln", "\\log")
_FRACTIONS = ("/", "\\frac", "\\dfrac", "\\tfrac", "\\cfrac")
_OF_NUMBERS = (*_FRACTIONS, "\\cdot", "\\times", "\\div")


def is_huge(latex: str) -> bool:
    """Returns whether evaluating `latex` would take unreasonable time for its length."""
    tokens = [token for token in _TOKEN.findall(latex) if token not in ("\\left", "\\right")]
    return _Reader(tokens).largest() > _MOST_DIGITS


class _Size(NamedTuple):
    """The decimal logarithm of a formula's value, and its terms when multiplied out: 0 of nothing,
    1 of a number."""

    digits: float = 0.0
    terms: int = 0
    names: frozenset[str] = frozenset()

    def times(self, other: _Size) -> _Size:
        """The size of the product; its terms are those of polynomials of one name."""
        terms = max(self.terms, other.terms, self.terms + other.terms - 1)
        return _Size(self.digits + other.digits, terms, self.names | other.names)


_ENDLESS = _Size(math.inf, 1)


class _Reader:
    """Reads tokens; every method returns upper bounds."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens
        self._at = 0

    def largest(self) -> float:
        """Reads all tokens, also behind a bracket that nothing opened."""
        digits = 0.0
        while self._at < len(self._tokens):
            digits += self._sequence("", 0).digits
        return digits

    def _sequence(self, until: str, depth: int) -> _Size:
        """Reads up to the token `until`, a sum of products."""
        products = [_Size()]
        while (token := self._next()) not in ("", until):
            if token in ("+", "-"):
                products.append(_Size())
            else:
                products[-1] = products[-1].times(self._part(token, depth))
        named = sum(size.terms for size in products if size.names)
        numbers = any(size.terms for size in products if not size.names)
        digits = max(size.digits for size in products) + math.log10(len(products))
        names = frozenset[str]().union(*(size.names for size in products))
        return _Size(digits, named + numbers, names)

    def _part(self, token: str, depth: int) -> _Size:
        size = self._atom(token, depth)
        while (sign := self._peek()) in (*_POWERS, "!", "!!"):
            self._next()
            size = _factorial(size) if sign[0] == "!" else self._power(size, depth)
        return size

    def _power(self, base: _Size, depth: int) -> _Size:
        start = self._at
        exponent = self._argument(depth)
        if depth < _DEEPEST and self._peek() in _POWERS:
            self._next()
            exponent = self._power(exponent, depth + 1)
        is_root = any(token in _FRACTIONS for token in self._tokens[start : self._at])
        if exponent.digits > _MOST_DIGITS_OF_ROOTS or (is_root and _is_long(base)):
            return _ENDLESS
        times = _value(exponent.digits)
        if base.names and base.terms > 1 and not exponent.names:
            terms = _terms_of_power(base, int(times)) if times <= _MOST_TERMS else math.inf
            if terms > _MOST_TERMS:
                return _ENDLESS
            base = base._replace(terms=int(terms))
        return base._replace(digits=base.digits * times if base.digits else 0.0)

    def _argument(self, depth: int) -> _Size:
        """Reads what a power, an index or a binomial coefficient applies to: in TeX one token."""
        if depth >= _DEEPEST:
            return _Size()
        token = self._next()
        if token in ("+", "-"):
            token = self._next()
        return self._atom(token, depth + 1) if token else _Size()

    def _atom(self, token: str, depth: int) -> _Size:
        if token in _OPENING:
            return self._sequence(_OPENING[token], depth + 1) if depth < _DEEPEST else _Size()
        if token[0].isdecimal():
            whole, _, decimals = token.replace(",", "").partition(".")
            digits = whole.lstrip("0")
            first = float(f"{digits[:15] or 0}.{decimals[:15]}")
            return _Size(max(0, len(digits) - 15) + max(0.0, math.log10(first or 1)), 1)
        if token in _BINOMIALS:
            upper, lower = self._argument(depth), self._argument(depth)
            chosen = min(_value(upper.digits), _value(lower.digits))
            return _ENDLESS if chosen > _MOST_CHOSEN else upper
        if token in _ROOTS:
            if self._peek() in ("[", "_"):
                self._argument(depth)
            radicand = self._argument(depth)
            return (
                _ENDLESS
                if _is_long(radicand)
                else radicand._replace(terms=1, names=radicand.names | {token})
            )
        if token == "_":  # an index, or the limits of a sum
            limits = [self._argument(depth)]
            if self._peek() == "^":
                self._next()
                limits.append(self._argument(depth))
            return max(limits)
        is_name = token.isalpha() or (token[0] == "\\" and token not in _OF_NUMBERS)
        return _Size(terms=int(is_name), names=frozenset([token] if is_name else []))

    def _next(self) -> str:
        self._at += 1
        return self._tokens[self._at - 1] if self._at <= len(self._tokens) else ""

    def _peek(self) -> str:
        return self._tokens[self._at] if self._at < len(self._tokens) else ""


def _is_long(size: _Size) -> bool:
    return size.digits > _MOST_DIGITS_OF_ROOTS


def _terms_of_power(base: _Size, exponent: int) -> int:
    if len(base.names) == 1:
        return (base.terms - 1) * exponent + 1
    return math.comb(exponent + base.terms - 1, exponent)


def _factorial(size: _Size) -> _Size:
    value = _value(size.digits)
    digits = math.lgamma(value + 1) / math.log(10) if value < math.inf else math.inf
    return size._replace(digits=digits)


def _value(digits: float) -> float:
    return 10**digits if digits < 12 else math.inf
