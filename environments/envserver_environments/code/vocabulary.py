"""The functions, methods and operators that an expression may use; none can be made to hang.

The arguments are built-in values that a hostile program chose. So whatever could produce something
much larger than its input (a power, a product, a range, a set of colliding hashes, a format) is
checked first or left out. Pure.
"""

from __future__ import annotations

import ast
import cmath
import math
import operator
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Any

from .values import checked_hashes

MAX_ITEMS = 200_000
"""Maximum size of any collection or text in an expression."""
MAX_BITS = 70_000
"""Maximum size of any integer in an expression."""


class Unevaluable(Exception):
    """The expression is not supported or too large, or one of its calls has no value."""


def made_set(items: list[Any]) -> set[Any]:
    checked_hashes(items)
    return set(items)


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
    for one, other in ((left, right), (right, left)):
        if isinstance(one, _SIZED) and isinstance(other, int) and len(one) * other > MAX_ITEMS:
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
    return sum((_number(item) for item in items), start=_number(start))


def _number(value: Any) -> Any:
    if not isinstance(value, int | float | complex):
        raise TypeError("only numbers are summed here")
    return value


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
    """Returns the type that a name in an expression denotes."""
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

FUNCTIONS: dict[str, Any] = {
    "abs": abs, "all": all, "any": any, "bool": bool, "bytes": _bytes, "chr": chr, "close": close,
    "complex": complex, "dict": _dict_of, "divmod": _numbers(divmod), "enumerate": enumerate,
    "filter": filter, "float": float, "frozenset": _frozen_set_of, "int": int,
    "isinstance": _is_instance, "len": len, "list": list, "map": map, "max": max, "min": min,
    "ord": ord, "pow": _power, "range": _range, "repr": repr, "reversed": reversed,
    "round": _round, "set": _set_of, "sorted": sorted, "str": str, "sum": _sum, "tuple": tuple,
    "type": _type, "zip": zip, "callable": callable, "hash": hash, "bin": bin, "hex": hex,
    "deque": deque, "Counter": _counter_of, "OrderedDict": OrderedDict, "defaultdict": defaultdict,
    "isclose": math.isclose, "isnan": math.isnan, "isinf": math.isinf, "sqrt": math.sqrt,
}  # fmt: skip
"""Functions of expressions, besides methods and `math`. `close` is defined here."""
CONSTANTS: dict[str, Any] = {
    "inf": math.inf, "nan": math.nan, "pi": math.pi, "math": None, "object": object,
    "NotImplemented": NotImplemented, "Ellipsis": Ellipsis,
}  # fmt: skip
MATH: dict[str, Any] = {
    name: getattr(math, name)
    for name in (
        "pi", "e", "tau", "inf", "nan", "isclose", "isnan", "isinf", "isfinite", "sqrt", "floor",
        "ceil", "trunc", "fabs", "fsum", "log", "log2", "log10", "exp", "sin", "cos", "tan", "asin",
        "acos", "atan", "atan2", "hypot", "degrees", "radians", "gcd", "copysign",
    )
}  # fmt: skip
_TEXT = (str, bytes)
METHODS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(
        (
            "strip", "lstrip", "rstrip", "lower", "upper", "title", "capitalize", "casefold",
            "swapcase", "startswith", "endswith", "split", "rsplit", "splitlines", "find", "rfind",
            "isdigit", "isalpha", "isalnum", "isupper", "islower", "isspace", "istitle",
            "isnumeric", "isdecimal", "isidentifier", "removeprefix", "removesuffix", "partition",
            "rpartition",
        ),
        _TEXT,
    ),
    **dict.fromkeys(("count", "index"), (str, bytes, list, tuple, deque)),
    **dict.fromkeys(("keys", "values", "items", "get"), (dict,)),
    **dict.fromkeys(
        ("issubset", "issuperset", "isdisjoint", "union", "intersection", "difference",
         "symmetric_difference"),
        (set, frozenset),
    ),
    "copy": (list, dict, set, deque),
    "bit_length": (int,),
    "is_integer": (float,),
    "conjugate": (int, float, complex),
    "hex": (bytes, float),
}  # fmt: skip
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
