"""Expected answers, which `veiling` takes out of tests: no tested code can read them. Pure.

Values are compared outside of the sandbox, if they are of built-in types: an object that equals
everything, a patched `assert` or a forged report gains nothing. An object of another class is
compared in the sandbox with the answer among decoys, each several times, in a random order.
"""

from __future__ import annotations

import ast
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .judging import DECOYS, OPERATIONS, decoys, mixed


def same(left: Any, right: Any) -> bool:
    """Compares values and their exact types at all levels."""
    if type(left) is not type(right):
        return False
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict):
        return (
            len(left) == len(right)
            and all(key in right and same(value, right[key]) for key, value in left.items())
            and same_keys(left, right)
        )
    if isinstance(left, set | frozenset):
        return same_keys(left, right)
    return bool(left == right) or (left != left and right != right)


def _differs(left: Any, right: Any) -> bool:
    return not same(left, right)


def same_keys(left: Any, right: Any) -> bool:
    """Returns whether two collections hold the same hashable items, types included."""
    return sorted(map(_typed, left)) == sorted(map(_typed, right))


def _typed(item: Any) -> str:
    try:
        return f"{type(item).__name__} {item!r}"
    except ValueError:  # Python writes no integers of that many digits
        return f"{type(item).__name__} {hash(item)}"


OPERATORS: dict[type[ast.cmpop], str] = {
    ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=",
    ast.In: "in", ast.Is: "is", ast.IsNot: "is not",
}  # fmt: skip


_CHECKS: dict[str, Callable[[Any, Any], Any]] = {
    **OPERATIONS,
    "is": same,
    "is not": _differs,
    "in": lambda value, literal: value in literal,
}
_EXACT: dict[str, Callable[[Any, Any], Any]] = {
    "==": same,
    "is": same,
    "!=": _differs,
    "is not": _differs,
    "in": lambda value, literal: any(same(value, item) for item in literal),
}
"""Checks that compare types, too, at all levels; those of order are of numbers only."""
_CONTAINERS = (list, tuple, set, frozenset, dict)
_below = secrets.randbelow
_STRANGERS = ("no such text", ("no", "such", "row"), b"no such bytes")
_LONG = 500
"""Characters of an answer of which there are only a few decoys."""


@dataclass(frozen=True)
class Answer:
    """The condition of an assertion: `value OPERATOR literal`, as Python means it or, if `exact`,
    only for a value of the literal's type."""

    operator: str
    literal: Any
    exact: bool = False

    def accepts(self, value: Any) -> bool:
        if self.exact and self.operator in _EXACT:
            return bool(_EXACT[self.operator](value, self.literal))
        ordered = self.operator != "contains"
        if self.exact and ordered and not {type(value), type(self.literal)} <= {int, float}:
            return False
        try:
            return bool(_CHECKS[self.operator](value, self.literal))
        except (TypeError, ValueError):
            return False

    def candidates(self) -> list[Any]:
        """Returns what an object is compared with, another list each time."""
        if self.operator == "in":
            items = list(self.literal) if isinstance(self.literal, _CONTAINERS) else []
            count = DECOYS if len(items) < DECOYS else 1
            others = [other for item in items for other in decoys(item, _below, count)]
            return mixed(items, [other for other in others if other not in items], _below)
        if self.operator not in ("==", "contains"):
            return [self.literal, *self._extreme()]
        others = decoys(self.literal, _below, DECOYS if len(repr(self.literal)) < _LONG else 3)
        if self.operator == "contains" and not isinstance(self.literal, str | bytes):
            others = [*others, *_STRANGERS]
        return mixed([self.literal], others, _below)

    def accepts_comparisons(self, candidates: list[Any], said: list[Any]) -> bool:
        """Returns whether the assertion holds for an object that said so of each candidate."""
        if len(said) != len(candidates) or not candidates:
            return False
        pairs = list(zip(candidates, said, strict=True))
        if self.operator == "in":
            chosen = [candidate for candidate, yes in pairs if yes is True]
            right = all(candidate in self.literal for candidate in chosen)
            return (
                bool(chosen) and right and said == [candidate in chosen for candidate in candidates]
            )
        if self.operator == "contains":
            right = all(yes is True for candidate, yes in pairs if candidate == self.literal)
            others = [yes for candidate, yes in pairs if candidate != self.literal]
            # An endless set of numbers holds the decoys, too, but nothing of another kind.
            least = len(others) // 2 if isinstance(self.literal, str | bytes) else 1
            return right and others.count(False) >= least
        if self.operator == "==":
            return said == [candidate == self.literal for candidate in candidates]
        return said == [True, *(False for _ in self._extreme())]

    def _extreme(self) -> list[float]:
        if self.operator[0] not in "<>" or type(self.literal) not in (int, float):
            return []
        return [-1e300 if self.operator[0] == "<" else 1e300]
