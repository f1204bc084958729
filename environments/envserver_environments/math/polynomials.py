"""Compares written-out polynomials without evaluating anything. Pure."""

from __future__ import annotations

import re
from collections import Counter

Monomial = tuple[tuple[str, int], ...]
"""Variables with their exponents, sorted; () is the constant."""

_FACTOR = r"(?:[0-9]+|[A-Za-z_]+(?:\*\*[0-9]+)?)"
_TERM = re.compile(rf"([+-])({_FACTOR}(?:\*{_FACTOR})*)")
_SUM = re.compile(rf"(?:{_TERM.pattern})+")


def equal_polynomials(one: str, other: str) -> bool:
    """Returns whether both are sums of products (`3*x**2*y - 4`, no parentheses) of equal value."""
    coefficients = _coefficients(one)
    return coefficients is not None and coefficients == _coefficients(other)


def _coefficients(text: str) -> dict[Monomial, int] | None:
    """Returns the coefficients by monomial, without zeros; None if the text is not such a sum."""
    source = re.sub(r"\s*(\*\*|[-+*])\s*", r"\1", text.strip().replace("^", "**"))
    if not source.startswith(("+", "-")):
        source = f"+{source}"
    if not _SUM.fullmatch(source):
        return None
    sums: Counter[Monomial] = Counter()
    for sign, product in _TERM.findall(source):
        coefficient, exponents = int(f"{sign}1"), Counter[str]()
        for factor in product.replace("**", "^").split("*"):
            base, _, exponent = factor.partition("^")
            if base.isdigit():
                coefficient *= int(base)
            else:
                exponents[base] += int(exponent or 1)
        sums[tuple(sorted((x, n) for x, n in exponents.items() if n))] += coefficient
    return {monomial: value for monomial, value in sums.items() if value}
