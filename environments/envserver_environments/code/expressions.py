"""Evaluates the claim of a test, a small part of Python, on values that a hostile program returned.
Pure; it always ends soon: a time limit, no attributes but the listed methods, no formatting, and a
check before anything large is built (a power, a product, a range, colliding hashes)."""

from __future__ import annotations

import ast
import builtins
import cmath
import functools
import math
import operator
import sys
import time
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from envserver_environments.demonstrations import table_beside

from .values import BadValue, checked_hashes, made_set

# The arguments are built-in values that a hostile program chose. So whatever could produce
# something much larger than its input (a power, a product, a range, a set of colliding hashes, a
# format) is checked first or left out.

MAX_ITEMS = 200_000
"""Maximum size of any collection or text in an expression."""
MAX_BITS = 70_000
"""Maximum size of any integer in an expression."""


class Unevaluable(Exception):
    """The expression is not supported or too large, or one of its calls has no value."""


def made_dict(pairs: list[Any]) -> dict[Any, Any]:
    checked_hashes(key for key, _ in pairs)
    return dict(pairs)


def _numbers(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` of numbers only: with texts, `%` would format and `//` has no meaning."""

    def checked(*values: Any) -> Any:
        if not all(isinstance(value, int | float | complex) for value in values):
            raise TypeError("these are not numbers")
        return function(*values)

    return checked


def _sized(value: Any) -> int:
    return len(value) if isinstance(value, _SIZED) else 0


def _bits(value: Any) -> int:
    return value.bit_length() if isinstance(value, int) else 64


def _add(left: Any, right: Any) -> Any:
    if _sized(left) + _sized(right) > MAX_ITEMS:
        raise Unevaluable("the sum is too large")
    return left + right


def _multiply(left: Any, right: Any) -> Any:
    for value, other in ((left, right), (right, left)):
        if isinstance(value, _SIZED) and isinstance(other, int) and len(value) * other > MAX_ITEMS:
            raise Unevaluable("the product is too large")
    if _bits(left) + _bits(right) > MAX_BITS:
        raise Unevaluable("the product is too large")
    return left * right


def _power(base: Any, exponent: Any, modulus: Any = None) -> Any:
    if modulus is None and isinstance(exponent, int) and _bits(base) * exponent > MAX_BITS:
        raise Unevaluable("the power is too large")
    if modulus is not None and max(map(_bits, (base, exponent, modulus))) > 2048:
        raise Unevaluable("the power is too large")
    return (
        _numbers(operator.pow)(base, exponent) if modulus is None else pow(base, exponent, modulus)
    )


def _shift(left: Any, right: Any) -> Any:
    if not isinstance(right, int) or abs(right) + _bits(left) > MAX_BITS:
        raise Unevaluable("the shift is too large")
    return left << right


def _round(number: Any, digits: Any = None) -> Any:
    if isinstance(digits, int) and abs(digits) > 1000:
        raise Unevaluable("so many digits are not rounded to")
    return round(number) if digits is None else round(number, digits)


def _range(*bounds: Any) -> range:
    found = range(*bounds)
    if max(map(_bits, bounds)) > 62 or len(found) > MAX_ITEMS:
        raise Unevaluable("the range is too long")
    return found


def _joined(separator: str, items: Iterable[str]) -> str:
    parts = list(items)
    if len(separator) * len(parts) + sum(map(len, parts)) > MAX_ITEMS:
        raise Unevaluable("the text is too long")
    return separator.join(parts)


def _replaced(text: str, old: str, new: str) -> str:
    if (text.count(old) + 1) * len(new) > MAX_ITEMS:
        raise Unevaluable("the text is too long")
    return text.replace(old, new)


def _bytes(value: Any) -> bytes:
    if isinstance(value, int):
        raise TypeError("bytes of a number are not made here")
    return bytes(value)


def _set_of(value: Any = ()) -> set[Any]:
    return made_set(list(value))


def _frozen_set_of(value: Any = ()) -> frozenset[Any]:
    return frozenset(made_set(list(value)))


def _dict_of(value: Any = (), **more: Any) -> dict[Any, Any]:
    pairs = list(value.items() if isinstance(value, dict) else value)
    return {**made_dict(pairs), **more}


def _counter_of(value: Any = ()) -> Counter[Any]:
    if isinstance(value, dict):
        return Counter(value)
    items = list(value)
    checked_hashes(items)
    return Counter(items)


def _sum(items: Iterable[Any], start: Any = 0) -> Any:
    """Sums numbers only: adding lists takes quadratic time."""
    number = _numbers(lambda value: value)
    return sum(map(number, items), start=number(start))


def _is_instance(value: Any, kinds: Any) -> bool:
    return isinstance(value, _as_types(kinds))


def _as_types(kinds: Any) -> tuple[type, ...]:
    if isinstance(kinds, tuple):
        return tuple(kind for part in kinds for kind in _as_types(part))
    kind = _TYPE_OF.get(kinds, kinds) if callable(kinds) else kinds
    if not isinstance(kind, type):
        raise TypeError("isinstance needs types")
    return (kind,)


def _type(value: Any) -> Any:
    return _NAME_OF_TYPE.get(type(value), type(value))


def close(value: Any, wanted: Any, tolerance: float = 1e-6) -> bool:
    """Compares values; floats may differ a little, at any depth."""
    match value, wanted:
        case int() | float() | complex(), float() | complex():
            if value == wanted or (value != value and wanted != wanted):  # nan
                return True
            return abs(value) <= _LARGEST and cmath.isclose(
                value, wanted, rel_tol=1e-7, abs_tol=tolerance
            )
        case dict(), dict() if value.keys() == wanted.keys():
            return all(close(value[key], wanted[key], tolerance) for key in wanted)
        case set() | frozenset(), set() | frozenset():
            return close(sorted(value, key=repr), sorted(wanted, key=repr), tolerance)
        case list() | tuple(), list() | tuple():
            same = len(value) == len(wanted)
            return same and all(close(*pair, tolerance) for pair in zip(value, wanted, strict=True))
    return bool(value == wanted)


_LARGEST = sys.float_info.max
_SIZED = (str, bytes, list, tuple, set, frozenset, dict, deque)

_KINDS = {kind.__name__: kind for kind in (*_SIZED, int, float, complex)}
_ALLOWED = table_beside(__file__)

FUNCTIONS: dict[str, Any] = {
    **{name: getattr(builtins, name) for name in _ALLOWED["builtins"]},
    **{name: getattr(math, name) for name in _ALLOWED["math_functions"]},
    "bytes": _bytes, "close": close, "deque": deque, "defaultdict": defaultdict,
    "dict": _dict_of, "divmod": _numbers(divmod), "frozenset": _frozen_set_of,
    "isinstance": _is_instance, "pow": _power, "range": _range, "round": _round, "set": _set_of,
    "sum": _sum, "type": _type, "Counter": _counter_of, "OrderedDict": OrderedDict,
}  # fmt: skip
CONSTANTS: dict[str, Any] = {
    "inf": math.inf, "nan": math.nan, "pi": math.pi, "math": None, "object": object,
    "NotImplemented": NotImplemented, "Ellipsis": Ellipsis,
}  # fmt: skip
MATH: dict[str, Any] = {name: getattr(math, name) for name in _ALLOWED["math"]}
METHODS: dict[str, tuple[type, ...]] = {
    name: tuple(_KINDS[kind] for kind in group["of"])
    for group in _ALLOWED["methods"]
    for name in group["names"]
}
"""Methods by name, with the types that have them. None makes much more than it gets."""

GUARDED_METHODS: dict[str, Callable[..., Any]] = {"join": _joined, "replace": _replaced}
"""Methods of texts that could make more than they get."""

_TYPE_OF: dict[Any, type] = {
    _set_of: set, _frozen_set_of: frozenset, _dict_of: dict, _bytes: bytes, _range: range,
    _counter_of: Counter,
}  # fmt: skip
_NAME_OF_TYPE = {kind: name for name, kind in _TYPE_OF.items()}

UNARY: dict[type, Callable[[Any], Any]] = {
    ast.Not: operator.not_, ast.USub: operator.neg, ast.UAdd: operator.pos,
    ast.Invert: operator.invert,
}  # fmt: skip
BINARY: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: _add, ast.Sub: operator.sub, ast.Mult: _multiply, ast.Div: _numbers(operator.truediv),
    ast.FloorDiv: _numbers(operator.floordiv), ast.Mod: _numbers(operator.mod), ast.Pow: _power,
    ast.LShift: _shift, ast.RShift: operator.rshift, ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_, ast.BitXor: operator.xor,
}  # fmt: skip
COMPARISONS: dict[type, Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le,
    ast.Gt: operator.gt, ast.GtE: operator.ge, ast.Is: operator.is_, ast.IsNot: operator.is_not,
    ast.In: lambda item, items: item in items, ast.NotIn: lambda item, items: item not in items,
}  # fmt: skip


MAX_CPU_SECONDS = 1.0

_PARTS_OF_NUMBERS = ("real", "imag")
_ATTRIBUTES = {*METHODS, *GUARDED_METHODS, *_PARTS_OF_NUMBERS}

Scope = Mapping[str, Any]


class _Evaluator:
    def __init__(self) -> None:
        self._end = time.thread_time() + MAX_CPU_SECONDS

    def value(self, node: ast.expr, scope: Scope) -> Any:
        if time.thread_time() > self._end:
            raise Unevaluable("the expression takes too long")
        return _EVALUATORS[type(node)](self, node, scope)

    def items(self, value: Any) -> list[Any]:
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
    try:
        return _Evaluator().value(expression, values)
    except (BadValue, KeyError, RecursionError, MemoryError) as error:
        raise Unevaluable(str(error)) from error


def bound_names(expression: ast.AST) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(expression):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                names.add(name)
    return names


def why_unsupported(expression: ast.AST, known: set[str]) -> str | None:
    bound = bound_names(expression).union(known, FUNCTIONS, CONSTANTS)
    reasons = (_why_unsupported_node(node, bound) for node in ast.walk(expression))
    return next(filter(None, reasons), None)


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
