"""The expected answer of an assertion that is compared outside of the sandbox. Pure.

A value of built-in types comes out as it is. Of another object comes out how it compares with a
list of candidates: the answer among decoys, each several times, in a random order.
"""

from __future__ import annotations

import operator
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .hoisting import same
from .judging import DECOYS, decoys, mixed

_CHECKS: dict[str, Callable[[Any, Any], Any]] = {
    "==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt,
    ">=": operator.ge, "is": same, "is not": lambda value, literal: not same(value, literal),
    "in": lambda value, literal: value in literal,
    "contains": lambda value, literal: literal in value,
}  # fmt: skip
_CONTAINERS = (list, tuple, set, frozenset, dict)
_below = secrets.randbelow
_STRANGERS = ("no such text", ("no", "such", "row"), b"no such bytes")
_LONG = 500
"""Characters of an answer of which there are only a few decoys."""


@dataclass(frozen=True)
class VeiledAnswer:
    """The condition of an assertion: `value OPERATOR literal`, as Python means it."""

    operator: str
    literal: Any

    def accepts(self, value: Any) -> bool:
        """Returns whether the assertion holds for `value`, which is of exact built-in types."""
        try:
            return bool(_CHECKS[self.operator](value, self.literal))
        except (TypeError, ValueError):
            return False

    def candidates(self) -> list[Any]:
        """Returns what an object is compared with, another list each time."""
        if self.operator == "in":
            items = list(self.literal) if isinstance(self.literal, _CONTAINERS) else []
            count = DECOYS if len(items) < DECOYS else 1
            others = [one for item in items for one in decoys(item, _below, count)]
            return mixed(items, [one for one in others if one not in items], _below)
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
            chosen = [one for one, yes in pairs if yes is True]
            right = all(one in self.literal for one in chosen)
            return bool(chosen) and right and said == [one in chosen for one in candidates]
        if self.operator == "contains":
            right = all(yes is True for one, yes in pairs if one == self.literal)
            others = [yes for one, yes in pairs if one != self.literal]
            # An endless set of numbers holds the decoys, too, but nothing of another kind.
            least = len(others) // 2 if isinstance(self.literal, str | bytes) else 1
            return right and others.count(False) >= least
        if self.operator == "==":
            return said == [one == self.literal for one in candidates]
        return said == [True, *(False for _ in self._extreme())]

    def _extreme(self) -> list[float]:
        """A number for which an order cannot hold."""
        if self.operator[0] not in "<>" or type(self.literal) not in (int, float):
            return []
        return [-1e300 if self.operator[0] == "<" else 1e300]
