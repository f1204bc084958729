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
from .hoisting import Filler

MAX_ITEMS = 1000
Values = dict[str, ast.expr]


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
                    yield from (_bound(target, row) for row in _items(_filled(rows, values)))
        case _:
            yield {}


def _asserts(body: list[ast.stmt], values: Values) -> Iterator[str]:
    """The asserts of a block; `values` are the names that it knows, and changes."""
    for statement in body:
        match statement:
            case ast.Assign(targets=[target], value=value) if bound := _bound(
                target, _filled(value, values)
            ):
                values.update(bound)
            case ast.Assert(test=test):
                yield f"assert {ast.unparse(_filled(test, values))}"
            case ast.Expr(ast.Call(func=ast.Name(id="assertion"), args=[given, wanted, *near])):
                pair = f"{_text(given, values)}, {_text(wanted, values)}"
                yield f"assert close({pair}, max(1e-06, {_text(near[0], values) if near else 0}))"
            case ast.For(target=target, iter=items, body=inner):
                for item in _items(_filled(items, values)):
                    yield from _asserts(inner, {**values, **_bound(target, item)})
            case ast.FunctionDef() | ast.ClassDef() | ast.Import() | ast.ImportFrom():
                continue
            case _:  # it may change what it mentions
                for node in ast.walk(statement):
                    if isinstance(node, ast.Name):
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


def _items(node: ast.expr) -> list[ast.expr]:
    """The turns of a loop over literals; none where they are not known."""
    match node:
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return items[:MAX_ITEMS]
        case ast.Call(func=ast.Name(id="zip"), args=columns):
            rows = zip(*map(_items, columns), strict=False)
            return [ast.Tuple(list(row), ast.Load()) for row in rows]
        case ast.Call(func=ast.Name(id="enumerate"), args=[items]):
            numbered = enumerate(_items(items))
            return [ast.Tuple([ast.Constant(n), item], ast.Load()) for n, item in numbered]
        case ast.Call(func=ast.Name(id="range"), args=[*before, ast.Constant(value=int(end))]):
            match before:
                case []:
                    return [ast.Constant(number) for number in range(min(end, MAX_ITEMS))]
                case [ast.Constant(value=int(start))]:
                    end = min(end, start + MAX_ITEMS)
                    return [ast.Constant(number) for number in range(start, end)]
    return []


def _bound(target: ast.expr, item: ast.expr) -> Values:
    match target, item:
        case ast.Name(id=name), _:
            return {name: item}
        case (
            (ast.Tuple(elts=names) | ast.List(elts=names)),
            (ast.Tuple(elts=items) | ast.List(elts=items)),
        ) if len(names) == len(items):
            pairs = zip(names, items, strict=True)
            return {name: value for part in pairs for name, value in _bound(*part).items()}
    return {}
