"""Removes the expected answers from tests, so that the tested code cannot read them. Pure.

In: the source of a test module. Out: the same tests, in which each `assert EXPRESSION == LITERAL`
only tells what EXPRESSION was, and the answers. The comparison is done elsewhere, on values of
exact built-in types: an object that equals everything, a patched `assert`, a forged report gain
nothing.

    assert total([1, 2]) == 3      ->   seen(total([1, 2]))       and Answer("==", 3)
    assert not closed(door)        ->   seen(closed(door))        and Answer("is", False)
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


class NotHoistable(ValueError):
    """A test's assertion has an answer that is not a literal, or may run repeatedly."""


@dataclass(frozen=True)
class Answer:
    """The condition of one assertion on the value: `value OPERATOR literal`."""

    operator: str
    literal: Any

    def accepts(self, value: Any) -> bool:
        """Returns whether the test passes with `value`, which is of exact built-in types."""
        match self.operator:
            case "==" | "is":
                return same(value, self.literal)
            case "in":
                return any(same(value, item) for item in self.literal)
            case "!=" | "is not":
                return not same(value, self.literal)
        if type(value) not in (int, float) or type(self.literal) not in (int, float):
            return False
        return bool(_ORDERS[self.operator](value, self.literal))


@dataclass(frozen=True)
class HoistedTests:
    """A module without answers, and those of each of its tests, by `name` or `Class::name`."""

    source: str
    answers: dict[str, tuple[Answer, ...]]


def hoist(source: str, seen: str) -> HoistedTests:
    """The tests of `source`, which call `seen` instead of asserting."""
    module = ast.parse(source)
    answers: dict[str, tuple[Answer, ...]] = {}
    for prefix, body in _bodies(module):
        for function in body:
            if isinstance(function, ast.FunctionDef) and function.name.startswith("test"):
                answers[prefix + function.name] = _hoisted(function, seen)
    left = [node.lineno for node in ast.walk(module) if isinstance(node, ast.Assert)]
    if left:
        raise NotHoistable(f"the assertion in line {left[0]} is not directly in a test")
    return HoistedTests(ast.unparse(ast.fix_missing_locations(module)) + "\n", answers)


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


def same_keys(left: Any, right: Any) -> bool:
    """Returns whether two collections hold the same hashable items, types included."""
    return sorted(map(_typed, left)) == sorted(map(_typed, right))


def _typed(item: Any) -> str:
    try:
        return f"{type(item).__name__} {item!r}"
    except ValueError:  # Python writes no integers of that many digits
        return f"{type(item).__name__} {hash(item)}"


_ORDERS: dict[str, Callable[[Any, Any], Any]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_OPERATORS: dict[type[ast.cmpop], str] = {
    ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=",
    ast.In: "in", ast.Is: "is", ast.IsNot: "is not",
}  # fmt: skip


def _bodies(module: ast.Module) -> list[tuple[str, list[ast.stmt]]]:
    classes = [node for node in module.body if isinstance(node, ast.ClassDef)]
    return [("", module.body), *((f"{node.name}::", node.body) for node in classes)]


def _hoisted(function: ast.FunctionDef, seen: str) -> tuple[Answer, ...]:
    answers: list[Answer] = []
    for place, statement in enumerate(function.body):
        if isinstance(statement, ast.Assert):
            value, answer = _answer(statement.test)
            call = ast.Call(ast.Name(seen, ast.Load()), [value], [])
            function.body[place] = ast.copy_location(ast.Expr(call), statement)
            answers.append(answer)
    if not answers:
        raise NotHoistable(f"{function.name} asserts nothing")
    return tuple(answers)


def _answer(test: ast.expr) -> tuple[ast.expr, Answer]:
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return test.operand, Answer("is", False)
    if not isinstance(test, ast.Compare):
        return test, Answer("is", True)
    symbol = _OPERATORS.get(type(test.ops[0]))
    if len(test.ops) != 1 or symbol is None:
        raise NotHoistable(f"the comparison in line {test.lineno} is of no known kind")
    try:
        return test.left, Answer(symbol, ast.literal_eval(test.comparators[0]))
    except ValueError as error:
        raise NotHoistable(f"the answer in line {test.lineno} is not a literal") from error
