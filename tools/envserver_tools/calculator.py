"""A calculator that is safe to hand to a model: takes arithmetic, returns a string, never raises.

The expression is parsed as Python and its tree is walked with an allow list; the interpreter never
evaluates it. Values that would be too large are refused before they are computed, so the longest
call takes well under a millisecond.

    >>> calculate("(1500 - 300) * 12%7")
    '6'
    >>> calculate("1/0")
    'error: division_by_zero'
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable
from typing import Any, NoReturn

MAX_CHARACTERS = 200
MAX_NODES = 200
MAX_INTEGER_BITS = 4096
MAX_COUNT = 500
"""Largest argument of factorial, comb and perm, and most digits for round."""

CALCULATE: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": (
            "Evaluates an arithmetic expression: + - * / // % ** and parentheses, pi, e, sqrt, "
            "abs, round, min, max, floor, ceil, gcd, lcm, factorial, comb, perm, log, log2, log10, "
            "exp, sin, cos, tan, asin, acos, atan (angles in radians)."
        ),
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string", "maxLength": MAX_CHARACTERS}},
            "required": ["expression"],
            "additionalProperties": False,
        },
    },
}

Number = int | float


class _Refused(Exception):
    """The expression is refused; the only argument is the error class."""


def calculate(expression: str) -> str:
    """Calculates `expression`.

    Args:
        expression: at most 200 characters of arithmetic; `^` means power, and × ÷ − are accepted.

    Returns:
        Integers exactly; other numbers with 12 significant digits, without a trailing ".0"; or
        "error: " and one of syntax, too_long, too_large, operator, call, name, type, math,
        division_by_zero.
    """
    try:
        return _text(_value(_parse(expression)))
    except _Refused as refusal:
        return f"error: {refusal}"
    except ZeroDivisionError:
        return "error: division_by_zero"
    except OverflowError:
        return "error: too_large"


def _parse(expression: str) -> ast.expr:
    if len(expression) > MAX_CHARACTERS:
        _refuse("too_long")
    source = expression.translate(_SPELLINGS).strip()
    try:
        tree = ast.parse(source, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        _refuse("syntax")
    if sum(1 for _ in ast.walk(tree)) > MAX_NODES:
        _refuse("too_long")
    return tree.body


_SPELLINGS = str.maketrans({"^": "**", "×": "*", "÷": "/", "−": "-"})


def _refuse(error_class: str) -> NoReturn:
    raise _Refused(error_class)


def _value(node: ast.expr) -> Number:
    match node:
        case ast.Constant(value=value):
            return _checked(value)
        case ast.Name(id=name):
            return _CONSTANTS[name] if name in _CONSTANTS else _refuse("name")
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _power(_value(left), _value(right))
        case ast.BinOp(left=left, op=op, right=right):
            compute = _OPERATORS.get(type(op)) or _refuse("operator")
            return _checked(compute(_value(left), _value(right)))
        case ast.UnaryOp():
            _refuse("operator")
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in _FUNCTIONS:
            return _call(name, [_value(argument) for argument in arguments])
        case ast.Call():
            _refuse("call")
        case _:
            _refuse("syntax")


def _checked(value: object) -> Number:
    if isinstance(value, bool) or not isinstance(value, int | float):
        _refuse("type")
    if isinstance(value, int):
        if value.bit_length() > MAX_INTEGER_BITS:
            _refuse("too_large")
    elif math.isnan(value):
        _refuse("math")
    elif math.isinf(value):
        _refuse("too_large")
    return value


def _power(base: Number, exponent: Number) -> Number:
    both_integers = isinstance(base, int) and isinstance(exponent, int)
    if both_integers and int(base).bit_length() * int(exponent) > MAX_INTEGER_BITS:
        _refuse("too_large")
    return _checked(base**exponent)


def _call(name: str, arguments: list[Number]) -> Number:
    counts = arguments if name in _COUNTING else arguments[1:] if name == "round" else []
    if any(abs(count) > MAX_COUNT for count in counts):
        _refuse("too_large")
    try:
        return _checked(_FUNCTIONS[name](*arguments))
    except (TypeError, ValueError):
        _refuse("math")


def _text(value: Number) -> str:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return str(value) if isinstance(value, int) else f"{value:.12g}"


_CONSTANTS: dict[str, float] = {"pi": math.pi, "e": math.e}

_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}

_OF_MATH = (
    "sqrt floor ceil gcd lcm factorial comb perm log log2 log10 exp sin cos tan asin acos atan"
)
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "abs": abs,
    "round": round,
    "min": min,
    "max": max,
    **{name: getattr(math, name) for name in _OF_MATH.split()},
}

_COUNTING = frozenset({"factorial", "comb", "perm"})
