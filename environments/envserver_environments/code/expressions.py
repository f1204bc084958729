"""Evaluates the rest of an assert once its calls are replaced by values. Pure and bounded.

In: an expression, and the values that the calls returned (built-in types only, see `values`). Out:
its value. The expression comes from a data set and the values from a hostile program, so this is a
separate interpreter for a small part of Python: no attributes except the listed methods, no
formatting, a time limit, and size checks before anything large is built. It always ends soon, and
the values contain no code that could run.

`why_unsupported` tells whether an expression can be evaluated here, before any value is known.
"""

from __future__ import annotations

import ast
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from .values import BadValue
from .vocabulary import (
    BINARY,
    COMPARISONS,
    CONSTANTS,
    FUNCTIONS,
    GUARDED_METHODS,
    MATH,
    MAX_ITEMS,
    METHODS,
    UNARY,
    Unevaluable,
    made_dict,
    made_set,
)

MAX_CPU_SECONDS = 1.0

_PARTS_OF_NUMBERS = ("real", "imag")
_ATTRIBUTES = {*METHODS, *GUARDED_METHODS, *_PARTS_OF_NUMBERS}

Scope = Mapping[str, Any]


class _Evaluator:
    """Evaluates one expression, within its time."""

    def __init__(self) -> None:
        self._end = time.thread_time() + MAX_CPU_SECONDS

    def value(self, node: ast.expr, scope: Scope) -> Any:
        if time.thread_time() > self._end:
            raise Unevaluable("the expression takes too long")
        return _EVALUATORS[type(node)](self, node, scope)

    def items(self, value: Any) -> list[Any]:
        """Returns the items of an iteration over `value`."""
        items = list(islice(iter(value), MAX_ITEMS + 1))
        if len(items) > MAX_ITEMS:
            raise Unevaluable("too many items")
        return items

    def all_values(self, nodes: Sequence[ast.expr], scope: Scope) -> list[Any]:
        values: list[Any] = []
        for node in nodes:
            if isinstance(node, ast.Starred):
                values += self.items(self.value(node.value, scope))
            else:
                values.append(self.value(node, scope))
        return values


def evaluate(expression: ast.expr, values: Scope) -> Any:
    """Returns the value of `expression`.

    Args:
        values: by name; a missing name is a call without a value.
    """
    try:
        return _Evaluator().value(expression, values)
    except (BadValue, KeyError, RecursionError, MemoryError) as error:
        raise Unevaluable(str(error)) from error


def why_unsupported(expression: ast.AST, known: set[str]) -> str | None:
    """Returns why `expression` cannot be evaluated here, or None if it can.

    Args:
        known: names that will have values.
    """
    bound = known | set(FUNCTIONS) | set(CONSTANTS)
    for node in ast.walk(expression):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                bound.add(name)
    for node in ast.walk(expression):
        reason = _why_unsupported_node(node, bound)
        if reason:
            return reason
    return None


def _why_unsupported_node(node: ast.AST, bound: set[str]) -> str | None:
    match node:
        case ast.Name(id=name):
            return None if name in bound else f"it needs {name}"
        case ast.Call(func=ast.Name(id=name)):
            return None if name in FUNCTIONS else f"it calls {name}"
        case ast.Call(func=function) if not isinstance(function, ast.Attribute):
            return f"it calls a {type(function).__name__}"
        case ast.Attribute(value=ast.Name(id="math"), attr=name):
            return None if name in MATH else f"it needs math.{name}"
        case ast.Attribute(attr=name):
            return None if name in _ATTRIBUTES else f"it needs .{name}"
        case ast.comprehension(is_async=1):
            return "it is asynchronous"
        case ast.expr() if type(node) not in _EVALUATORS and not isinstance(node, ast.Starred):
            return f"it has a {type(node).__name__}"
    return None


def _name(run: _Evaluator, node: ast.Name, scope: Scope) -> Any:
    if node.id in scope:
        return scope[node.id]
    if node.id in FUNCTIONS:
        return FUNCTIONS[node.id]
    return CONSTANTS[node.id]


def _dict(run: _Evaluator, node: ast.Dict, scope: Scope) -> dict[Any, Any]:
    pairs: list[tuple[Any, Any]] = []
    for key, value in zip(node.keys, node.values, strict=True):
        if key is None:
            pairs += dict(run.value(value, scope)).items()
        else:
            pairs.append((run.value(key, scope), run.value(value, scope)))
    return made_dict(pairs)


def _boolean(run: _Evaluator, node: ast.BoolOp, scope: Scope) -> Any:
    value: Any = None
    for part in node.values:
        value = run.value(part, scope)
        if bool(value) is isinstance(node.op, ast.Or):
            return value
    return value


def _binary(run: _Evaluator, node: ast.BinOp, scope: Scope) -> Any:
    left, right = run.value(node.left, scope), run.value(node.right, scope)
    return BINARY[type(node.op)](left, right)


def _compare(run: _Evaluator, node: ast.Compare, scope: Scope) -> bool:
    left = run.value(node.left, scope)
    for comparison, part in zip(node.ops, node.comparators, strict=True):
        right = run.value(part, scope)
        if not COMPARISONS[type(comparison)](left, right):
            return False
        left = right
    return True


def _subscript(run: _Evaluator, node: ast.Subscript, scope: Scope) -> Any:
    value = run.value(node.value, scope)
    return value[run.value(node.slice, scope)]


def _slice(run: _Evaluator, node: ast.Slice, scope: Scope) -> slice:
    parts = (node.lower, node.upper, node.step)
    return slice(*(None if part is None else run.value(part, scope) for part in parts))


def _attribute(run: _Evaluator, node: ast.Attribute, scope: Scope) -> Any:
    if isinstance(node.value, ast.Name) and node.value.id == "math" and "math" not in scope:
        return MATH[node.attr]
    value = run.value(node.value, scope)
    if node.attr in _PARTS_OF_NUMBERS and isinstance(value, int | float | complex):
        return getattr(value, node.attr)
    if node.attr in GUARDED_METHODS and isinstance(value, str):
        return functools.partial(GUARDED_METHODS[node.attr], value)
    if isinstance(value, METHODS.get(node.attr, ())):
        return getattr(value, node.attr)
    raise Unevaluable(f"{type(value).__name__} has no {node.attr} here")


def _call(run: _Evaluator, node: ast.Call, scope: Scope) -> Any:
    function = run.value(node.func, scope)
    arguments = run.all_values(node.args, scope)
    keywords = {str(word.arg): run.value(word.value, scope) for word in node.keywords}
    arguments = [
        run.items(argument) if isinstance(argument, Iterator | range) else argument
        for argument in arguments
    ]
    return function(*arguments, **keywords)


def _lambda(run: _Evaluator, node: ast.Lambda, scope: Scope) -> Callable[..., Any]:
    names = [argument.arg for argument in node.args.args]

    def function(*values: Any) -> Any:
        return run.value(node.body, {**scope, **dict(zip(names, values, strict=True))})

    return function


def _generated(
    run: _Evaluator, parts: Sequence[ast.expr], generators: list[ast.comprehension], scope: Scope
) -> Iterator[tuple[Any, ...]]:
    """The values of `parts` for each turn of the loops."""
    if not generators:
        yield tuple(run.value(part, scope) for part in parts)
        return
    first, rest = generators[0], generators[1:]
    for item in run.items(run.value(first.iter, scope)):
        inner = {**scope, **_bound(first.target, item)}
        if all(run.value(test, inner) for test in first.ifs):
            yield from _generated(run, parts, rest, inner)


def _bound(target: ast.expr, item: Any) -> dict[str, Any]:
    match target:
        case ast.Name(id=name):
            return {name: item}
        case ast.Tuple(elts=parts) | ast.List(elts=parts):
            bound: dict[str, Any] = {}
            for part, value in zip(parts, item, strict=True):
                bound |= _bound(part, value)
            return bound
    raise Unevaluable("this loop binds more than names")


def _comprehension(
    run: _Evaluator, node: ast.ListComp | ast.GeneratorExp | ast.SetComp, scope: Scope
) -> Any:
    values = (value for (value,) in _generated(run, [node.elt], node.generators, scope))
    # A generator stays lazy: `all` and `any` stop where Python's do.
    if isinstance(node, ast.GeneratorExp):
        return _Lazy(values)
    return made_set(list(values)) if isinstance(node, ast.SetComp) else list(values)


def _dict_comprehension(run: _Evaluator, node: ast.DictComp, scope: Scope) -> dict[Any, Any]:
    return made_dict(list(_generated(run, [node.key, node.value], node.generators, scope)))


class _Lazy:
    """A generator expression: iterated over once, by the function that gets it."""

    def __init__(self, values: Iterator[Any]) -> None:
        self._values = values

    def __iter__(self) -> Iterator[Any]:
        return self._values


_EVALUATORS: dict[type, Callable[[_Evaluator, Any, Scope], Any]] = {
    ast.Constant: lambda run, node, scope: node.value,
    ast.List: lambda run, node, scope: run.all_values(node.elts, scope),
    ast.Tuple: lambda run, node, scope: tuple(run.all_values(node.elts, scope)),
    ast.Set: lambda run, node, scope: made_set(run.all_values(node.elts, scope)),
    ast.UnaryOp: lambda run, node, scope: UNARY[type(node.op)](run.value(node.operand, scope)),
    ast.IfExp: lambda run, node, scope: run.value(
        node.body if run.value(node.test, scope) else node.orelse, scope
    ),
    ast.Name: _name, ast.Dict: _dict, ast.BoolOp: _boolean, ast.BinOp: _binary,
    ast.Compare: _compare, ast.Subscript: _subscript, ast.Slice: _slice,
    ast.Attribute: _attribute, ast.Call: _call, ast.Lambda: _lambda, ast.ListComp: _comprehension,
    ast.GeneratorExp: _comprehension, ast.SetComp: _comprehension,
    ast.DictComp: _dict_comprehension,
}  # fmt: skip
