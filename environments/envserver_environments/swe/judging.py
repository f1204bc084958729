"""Compares values whose classes may lie. Runs in the sandbox, sent there as text; pure.

A value's plain content is reported, for a comparison outside; of other objects, how they compare
with the answer and with decoys in an unknown order, which find one that equals everything or
guesses. Python 3.9 must be able to run this file; it imports nothing when it runs.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:  # Type checkers take it for true: nothing is imported in the sandbox.
    from collections.abc import Callable
    from typing import Any

DECOYS = 12
REPEATS = 2
"""How often each is compared: an object cannot be right by counting calls."""
MAX_TEXT = 20_000
"""Characters of one plain value; a longer one is compared in the sandbox."""
MAX_REPORT = 200_000
"""Characters of all values of one test."""
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def decoys(value: "Any", below: "Callable[[int], int]", count: int = DECOYS) -> "list[Any]":
    """Returns values that differ from the built-in `value`, each only slightly from another."""
    # A chain, in which the value may be anywhere: nothing shows which of them the others come from.
    ends, others, place = [value, value], [], below(count + 1)
    for number in range(count):
        side = number < place
        ends[side] = other = _changed(ends[side], below)
        if other != value:
            others.append(other)
    return others


def mixed(rights: "list[Any]", others: "list[Any]", below: "Callable[[int], int]") -> "list[Any]":
    """Returns all of them, repeatedly, in random order."""
    left, order = [*rights, *others] * REPEATS, []
    while left:
        order.append(left.pop(below(len(left))))
    return order


def _changed(value: "Any", below: "Callable[[int], int]") -> "Any":
    kind = type(value)
    if kind is bool:
        return not value
    if kind is int:
        step = 1 + abs(value) // 4 + below(max(abs(value), 10))
        return value + (step if below(2) else -step)
    if kind is float or kind is complex:
        return value * (1.5 + below(100)) + 1 + below(9)
    if kind is bytes:
        return _changed(value.decode("latin-1"), below).encode("latin-1", "replace")
    if kind is str:
        places = [n for n, character in enumerate(value) if character.isalnum()]
        if not places:
            return value + _LETTERS[below(26)]
        place = places[below(len(places))]
        new = str(below(10)) if value[place].isdigit() else _LETTERS[below(26)]
        new = "q" if new == value[place].lower() else new
        return value[:place] + new + value[place + 1 :]
    if kind is dict:
        if not value:
            return {below(1000): below(1000)}
        key = list(value)[below(len(value))]
        return {**value, key: _changed(value[key], below)}
    if kind in (list, tuple, set, frozenset):
        items = list(value)
        place = below(len(items)) if items else 0
        items[place : place + 1] = [_changed(items[place], below) if items else below(1000)]
        return kind(items)
    return below(1000)


class Unwritable(Exception):
    """A value is not of built-in types, or too large."""


_TAGS: "dict[Any, str]" = {list: "l", tuple: "t", set: "s", frozenset: "z"}
_PLAIN = (str, int, float, complex, bytes, dict, *_TAGS)
_mro = vars(type)["__mro__"].__get__
_members = vars(type)["__dict__"].__get__


def shape(value: "Any", exact: bool) -> "Any":
    """The JSON of a value (`values` of the environment `code` reads it). `exact` refuses
    subclasses; else those that compare as their built-in class are it."""
    return _shape(value, 0, [20000], exact)


def _shape(value: "Any", depth: int, left: "list[int]", exact: bool) -> "Any":
    left[0] -= 1
    if depth > 40 or left[0] < 0:
        raise Unwritable
    kind = type(value)
    if value is None or kind is bool:
        return value
    kind = kind if exact else _plain_kind(kind)
    if kind is str and str.__len__(value) < 50000:
        return str.__str__(value)
    if kind is int and int.bit_length(value) < 60000:
        number = int.__int__(value)
        return number if -(10**18) < number < 10**18 else ["i", format(number, "x")]
    if kind is float:
        return ["f", float.hex(value)]
    if kind is complex:
        parts = complex.__add__(value, 0j)
        return ["c", float.hex(parts.real), float.hex(parts.imag)]
    if kind is bytes and bytes.__len__(value) < 50000:
        return ["b", bytes.hex(value)]
    if kind in _TAGS:
        items = kind.__iter__(value)
        return [_TAGS[kind], [_shape(item, depth + 1, left, exact) for item in items]]
    if kind is dict:
        items = (part for pair in dict.items(value) for part in pair)
        return ["d", [_shape(item, depth + 1, left, exact) for item in items]]
    raise Unwritable


def _plain_kind(kind: "Any") -> "Any":
    """The built-in class that decides what instances of `kind` equal; None if it is another."""
    for parent in _mro(kind):
        if parent in _PLAIN:
            return parent
        if "__eq__" in _members(parent):
            return None
    return None


def classes_now() -> "dict[int, tuple[Any, Any]]":
    """Returns all classes that exist, with their `__eq__`, by id."""
    found: dict[int, tuple[Any, Any]] = {}
    left: list[Any] = [object]
    while left:
        kind = left.pop()
        if id(kind) not in found:
            found[id(kind)] = (kind, _members(kind).get("__eq__"))
            left += type.__subclasses__(kind)
    return found


def equality(
    trusted: "dict[int, tuple[Any, Any]]",
    spaces: "list[Any]",
    below: "Callable[[int], int]",
) -> "Callable[..., bool]":
    """A function for `left == right`, either of which may be of a class of the tested code. A
    function, because tested code can find every class and replace its methods."""

    def equal(left: "Any", right: "Any", depth: int = 0) -> bool:
        """Returns whether they are equal, and differ from all decoys."""
        kind = type(left)
        if kind is type(right) and depth < 40:
            if kind in (list, tuple) and len(left) == len(right):
                places = range(len(left))
                return all(equal(left[n], right[n], depth + 1) for n in places)
            if kind is dict and left.keys() == right.keys():
                return all(equal(left[key], right[key], depth + 1) for key in list(left))
        for value, other in ((left, right), (right, left)):
            if is_doubtful(type(value)) and not tells_apart(value, other):
                return False
        return bool(left == right)

    def is_doubtful(kind: "Any") -> bool:
        for parent in _mro(kind):
            members = _members(parent)
            if "__eq__" in members:
                function = members["__eq__"]
                known = trusted.get(id(parent))
                if known is not None and known[1] is function:
                    return False
                space = getattr(function, "__globals__", None)
                return not any(space is known_space for known_space in spaces)
        return False

    def tells_apart(value: "Any", other: "Any") -> bool:
        plain = other is None or type(other) in (bool, *_PLAIN)
        others = decoys(other, below) if plain else []
        text = "".join(_LETTERS[below(26)] for _ in range(9))
        strangers = [type("Other", (), {})(), text, below(2**40), (text,)]
        order = mixed([other], [*others, *strangers], below)
        return comparisons("==", value, order) == [candidate is other for candidate in order]

    return equal


def comparisons(operator: str, value: "Any", others: "list[Any]") -> "list[bool]":
    """Returns what `value` says of each of the others; an error is a no."""
    return [_compared(operator, value, other) for other in others]


OPERATIONS: "dict[str, Callable[[Any, Any], Any]]" = {
    "==": lambda value, other: value == other,
    "in": lambda value, other: value == other,
    "contains": lambda value, other: other in value,
    "!=": lambda value, other: value != other,
    "is": lambda value, other: value is other,
    "is not": lambda value, other: value is not other,
    "<": lambda value, other: value < other,
    "<=": lambda value, other: value <= other,
    ">": lambda value, other: value > other,
    ">=": lambda value, other: value >= other,
}
"""How a value is compared with another; `in` names each item of the answer by itself."""


def _compared(operator: str, value: "Any", other: "Any") -> bool:
    try:
        return bool(OPERATIONS[operator](value, other))
    except Exception:  # noqa: BLE001  (whatever the tested code raises)
        return False
