"""tau2-bench's `calculate`, without its `eval`: the same results and errors, bounded in time.

Upstream evaluates what consists of digits, + - * / ( ) . and blanks as Python and rounds to two
decimals. Here the tree is walked instead; what differs is only that numbers of more than 100,000
bits are refused at once, in the words with which Python would refuse the outcome after minutes.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from typing import Any, NoReturn

_ALLOWED = "0123456789+-*/(). "
_MAX_BITS = 100_000


def calculate(expression: str) -> str:
    """The value of `expression`, rounded to two decimals, as a float is printed."""
    if not all(character in _ALLOWED for character in expression):
        raise ValueError("Invalid characters in expression")
    tree = ast.parse(expression.lstrip(" \t"), filename="<string>", mode="eval")
    return str(round(float(_value(tree.body)), 2))


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Tuple(elts=[]):
            return ()
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return +_value(operand)
        case ast.BinOp(left=left, op=op, right=right):
            return _binary(op, _value(left), _value(right))
        case ast.Call(func=function, args=arguments):
            _refuse_call(_value(function), arguments)
    raise ValueError("Invalid characters in expression")


def _refuse_call(function: Any, arguments: list[ast.expr]) -> NoReturn:
    """Raises what Python says of calling a number."""
    for argument in arguments:
        if isinstance(argument, ast.Starred):
            kind = type(_value(argument.value)).__name__
            raise TypeError(f"{function} argument after * must be an iterable, not {kind}")
        _value(argument)
    raise TypeError(f"{type(function).__name__!r} object is not callable")


def _binary(op: ast.operator, left: Any, right: Any) -> Any:
    if isinstance(op, ast.Pow) and _too_large(left, right):
        raise OverflowError("int too large to convert to float")
    return _OPERATORS[type(op)](left, right)


def _too_large(base: Any, exponent: Any) -> bool:
    if not (isinstance(base, int) and isinstance(exponent, int)) or abs(base) <= 1:
        return False
    return base.bit_length() * exponent > _MAX_BITS


_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Pow: operator.pow,
}
