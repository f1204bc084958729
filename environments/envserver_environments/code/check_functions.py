"""Asserts out of Python: scripts, `check(candidate)` of HumanEval, pytest's tests. Pure.

Names that were set before, loops over literals and pytest's parameters are written out, so that
each assert stands for itself. Comparisons of EvalPlus, `assertion(given, wanted, tolerance)`, are
asserts that take near decimals.
"""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Iterator

from .extraction import parsed
from .hoisting import Filler, Values, bound, turns


def asserts_of(source: str, name: str) -> Iterator[str]:
    """The asserts in `source` about the function `name`; some may need more than its calls."""
    tree = parsed(source.strip(), limit=None)
    body = tree.body if tree else []
    values: Values = {}
    yield from _asserts(body, values)
    for function in _functions(body):
        first = [argument.arg for argument in function.args.args[:1]]
        if function.name == "check":
            yield from _asserts(function.body, {**values, **dict.fromkeys(first, ast.Name(name))})
        elif function.name.startswith("test"):
            for parameters in _parameters(function, values):
                yield from _asserts(function.body, {**values, **parameters})


def _functions(body: list[ast.stmt]) -> Iterator[ast.FunctionDef]:
    for statement in body:
        if isinstance(statement, ast.FunctionDef):
            yield statement
        elif isinstance(statement, ast.ClassDef):
            yield from _functions(statement.body)


def _parameters(function: ast.FunctionDef, values: Values) -> Iterator[Values]:
    """The parameters of each of pytest's runs of a test."""
    match function.decorator_list:
        case [ast.Call(func=ast.Attribute(attr="parametrize"), args=[names, rows])]:
            tree = parsed(re.sub("['\"]", "", ast.unparse(names)))
            match tree.body if tree else []:
                case [ast.Expr(value=target)]:
                    yield from turns(target, _filled(rows, values)) or [{}]
        case _:
            yield {}


def _asserts(body: list[ast.stmt], values: Values) -> Iterator[str]:
    """The asserts of a block; `values` are the names that it knows, and changes."""
    for statement in body:
        match statement:
            case ast.Assign(targets=[target], value=value) if names := bound(
                target, _filled(value, values)
            ):
                values.update(names)
            case ast.Assert(
                test=ast.Compare(
                    left=given,
                    ops=[ast.Eq()],
                    comparators=[ast.Call(func=ast.Attribute(attr="approx"), args=[wanted])],
                )
            ):
                yield f"assert close({_text(given, values)}, {_text(wanted, values)})"
            case ast.Assert(test=test):
                yield f"assert {_text(test, values)}"
            case ast.Expr(ast.Call(func=ast.Name(id="assertion"), args=[given, wanted, *near])):
                pair = f"{_text(given, values)}, {_text(wanted, values)}"
                yield f"assert close({pair}, max(1e-06, {_text(near[0], values) if near else 0}))"
            case ast.For(target=target, iter=items, body=inner):
                for turn in turns(target, _filled(items, values)) or [{}]:
                    yield from _asserts(inner, {**values, **turn})
                _forget(statement, values)
            case ast.FunctionDef() | ast.ClassDef() | ast.Import() | ast.ImportFrom():
                continue
            case _:
                _forget(statement, values)


def _forget(statement: ast.stmt, values: Values) -> None:
    """Drops what a statement mentions and may change, but for the function itself."""
    for node in ast.walk(statement):
        if isinstance(node, ast.Name) and not isinstance(values.get(node.id), ast.Name):
            values.pop(node.id, None)


def _filled(node: ast.expr, values: Values) -> ast.expr:
    filled: ast.expr = _Filler(values).visit(copy.deepcopy(node))
    return filled


class _Filler(Filler):
    """Also calls a method of a class Solution, or of the module that is tested, by its name."""

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        filled = self.generic_visit(node)
        match filled:
            case ast.Attribute(
                value=ast.Name(id="solution") | ast.Call(func=ast.Name(id="Solution")), attr=name
            ):
                return ast.Name(name, ast.Load())
        return filled


def _text(node: ast.expr, values: Values) -> str:
    return ast.unparse(_filled(node, values))
