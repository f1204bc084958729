"""Texts of the simulated policy: phrases around an answer, values for a schema, wrong answers.

The tokenizer is trained on these phrases: run `make_tokenizer` after a change.
"""

from __future__ import annotations

import math
import random
import re
import string
from collections.abc import Iterator
from typing import Any

OPENERS = (
    "Let me work this out.",
    "First, I read the question carefully.",
    "I go through it step by step.",
    "Let me write down what is known.",
    "This can be done directly.",
    "I start with the simplest part.",
    "There is more than one way to do this.",
    "Let me check the details first.",
    "One thing at a time.",
    "That looks manageable.",
    "I will keep this short.",
    "Let me think about what is being asked.",
    "The numbers matter here.",
    "I have seen a similar question before.",
    "Let me be careful with the order.",
    "So, what do we have?",
)
"""Whole sentences put before an answer or a tool call."""

CLOSERS = (
    "As I said:",
    "I stay with my answer.",
    "Nothing has changed:",
    "That was my final answer:",
)
"""Put before the answer when the conversation continues after the answer was given."""

_NOUNS = (
    "answer agent bridge cloud corner engine field garden house island letter lamp market "
    "morning mountain number paper question river road signal stone story table token tower "
    "train valley water window winter world"
)
_VERBS = (
    "asks brings builds changes counts crosses describes ends finds follows gives holds keeps "
    "leaves makes meets needs opens reaches reads remembers shows starts takes turns waits"
)
NOUNS, VERBS = tuple(_NOUNS.split()), tuple(_VERBS.split())
"""Words of arbitrary text."""


_OPTIONAL_DEPTH = 6
"""Below this depth optional values are left out."""
_MAX_DEPTH = 32
_MAX_VALUES = 2000
_MAX_CHARACTERS = 4000
_MAX_STEPS = 8
_FORMATS = {
    "date": ("2024-02-29", "2025-11-03", "1999-12-31"),
    "time": ("08:30:00Z", "23:59:59Z"),
    "date-time": ("2024-02-29T08:30:00Z", "2025-11-03T17:00:00Z"),
    "email": ("river@example.com", "stone.bridge@example.org"),
    "hostname": ("example.com", "www.example.org"),
    "uri": ("https://example.com/garden", "https://example.org/"),
    "uuid": ("6f1c3a52-9d0e-4b7a-8c21-5e4f3d2b1a09", "0b9d7f3e-1a2c-4d5e-9f80-7a6b5c4d3e2f"),
    "ipv4": ("192.0.2.7", "198.51.100.23"),
}


def drawn_value(schema: Any, rng: random.Random) -> Any:
    """Draws a small value for `schema`; the same state of `rng` gives the same value.

    Covered: type, enum, const, properties, required, items, minItems, string lengths, numeric
    bounds, multipleOf, anyOf/oneOf (the first), allOf (merged), local $ref and common formats of
    text (dates, addresses, ids). `pattern` is not.
    """
    return _Drawer(schema if isinstance(schema, dict) else {}, rng).draw(schema, 0)


class _Drawer:
    def __init__(self, root: dict[str, Any], rng: random.Random) -> None:
        self._root = root
        self._rng = rng
        self._left = _MAX_VALUES

    def draw(self, schema: Any, depth: int) -> Any:
        self._left -= 1
        if self._left < 0 or depth > _MAX_DEPTH:
            raise ValueError("it asks for too many values, or for values within values without end")
        schema = self._resolved(schema if isinstance(schema, dict) else {})
        if "const" in schema:
            return schema["const"]
        if schema.get("enum"):
            return self._rng.choice(schema["enum"])
        match _kind(schema):
            case "object":
                return self._object(schema, depth)
            case "array":
                count = int(schema.get("minItems", 1 if depth < _OPTIONAL_DEPTH else 0))
                items = schema.get("items", {})
                return [self.draw(items, depth + 1) for _ in range(count)]
            case "integer" | "number" as kind:
                return self._number(schema, whole=kind == "integer")
            case "boolean":
                return self._rng.random() < 0.5
            case "null":
                return None
        return self._string(schema)

    def _resolved(self, schema: dict[str, Any]) -> dict[str, Any]:
        for _ in range(_MAX_STEPS):
            branch = schema.get("anyOf") or schema.get("oneOf")
            if isinstance(schema.get("$ref"), str):
                schema = _referenced(schema["$ref"], self._root)
            elif isinstance(branch, list) and isinstance(branch[0], dict):
                schema = branch[0]
            elif isinstance(schema.get("allOf"), list):
                rest = {key: value for key, value in schema.items() if key != "allOf"}
                parts = [part for part in schema["allOf"] if isinstance(part, dict)]
                schema = _merged([rest, *parts])
            else:
                break
        return schema

    def _object(self, schema: dict[str, Any], depth: int) -> dict[str, Any]:
        properties = schema.get("properties", {})
        required = set(schema.get("required", []))
        chosen = [
            name
            for name in properties
            if name in required or (depth < _OPTIONAL_DEPTH and self._rng.random() < 0.3)
        ]
        drawn = {name: self.draw(properties[name], depth + 1) for name in chosen}
        unknown = sorted(required - set(properties))
        return drawn | {name: self._rng.choice(NOUNS) for name in unknown}

    def _number(self, schema: dict[str, Any], *, whole: bool) -> int | float:
        step = schema.get("multipleOf", 1 if whole else 0.5)
        low = schema.get("minimum", schema.get("exclusiveMinimum"))
        high = schema.get("maximum", schema.get("exclusiveMaximum"))
        if low is None:
            low = 0 if high is None else high - 20 * step
        first = math.ceil(low / step)
        if first * step == schema.get("exclusiveMinimum"):
            first += 1
        last = first + 20 if high is None else max(first, math.floor(high / step))
        if last > first and last * step == schema.get("exclusiveMaximum"):
            last -= 1
        value = self._rng.randint(first, min(last, first + 20)) * step
        return int(value) if whole else float(value)

    def _string(self, schema: dict[str, Any]) -> str:
        if schema.get("format") in _FORMATS:
            return self._rng.choice(_FORMATS[schema["format"]])
        text = " ".join(self._rng.choice(NOUNS) for _ in range(self._rng.randint(1, 4)))
        shortest, longest = schema.get("minLength", 0), schema.get("maxLength")
        if shortest > _MAX_CHARACTERS:
            raise ValueError(f"it asks for a text of {shortest} characters")
        while len(text) < shortest:
            text = f"{text} {self._rng.choice(NOUNS)}"
        return text if longest is None else text[: int(longest)]


def _kind(schema: dict[str, Any]) -> Any:
    kind = schema.get("type") or ("object" if "properties" in schema else "string")
    if isinstance(kind, list):
        return next((name for name in kind if name != "null"), "null")
    return kind


def _referenced(reference: str, root: dict[str, Any]) -> dict[str, Any]:
    target: Any = root
    for step in reference.removeprefix("#").removeprefix("/").split("/"):
        if step:
            target = target.get(step) if isinstance(target, dict) else None
    return target if isinstance(target, dict) else {}


def _merged(parts: list[dict[str, Any]]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for part in parts:
        merged |= part | {
            "properties": {**merged.get("properties", {}), **part.get("properties", {})},
            "required": [*merged.get("required", []), *part.get("required", [])],
        }
    return {key: value for key, value in merged.items() if value not in ({}, [])}


_DRAWS = 8
"""Values that are drawn from a schema until one differs and is allowed."""
_OPPOSITES = {"yes": "no", "no": "yes", "true": "false", "false": "true"}
_WORD = re.compile(r"[^\W\d_]+")
_COMMAND_OR_WORD = re.compile(r"\\[a-zA-Z]+|[^\W\d_]+")
_BOXED = "\\boxed{"


def spoiled_text(text: str, rng: random.Random) -> str:
    r"""`text` with a wrong last `\\boxed{}`, or else last number, or else last word."""
    span = _last_boxed(text)
    if span is None:
        span = _last_answer(text)
    start, end = span
    return text[:start] + spoiled_answer(text[start:end], rng) + text[end:]


def spoiled_answer(answer: str, rng: random.Random) -> str:
    """An answer of the same form that never equals `answer`, as text or as a number."""
    lower = answer.strip().lower()
    if lower in _OPPOSITES:
        return _OPPOSITES[lower]
    digits = [match.start() for match in re.finditer("[0-9]", answer)]
    if digits:
        return _with_other_digit(answer, digits[0], rng)
    words = [m for m in _COMMAND_OR_WORD.finditer(answer) if not m.group().startswith("\\")]
    if words:
        return _with_other_letter(answer, words[0], rng)
    return f"{answer}{rng.choice('123456789')}"


def spoiled_arguments(
    arguments: dict[str, Any], rng: random.Random, schema: dict[str, Any] | None = None
) -> dict[str, Any]:
    """A call's arguments with a wrong `answer`, or else a wrong longest value.

    A wrong value that `schema` does not allow is drawn from it; if it allows no other, the next
    longest value is made wrong.
    """
    names = sorted(arguments, key=lambda name: (name != "answer", -len(str(arguments[name]))))
    for name in names:
        wrong = {**arguments, name: _spoiled_value(arguments[name], rng)}
        if not schema or is_valid(wrong, schema):
            return wrong
        declared = (schema.get("properties") or {}).get(name)
        for value in _other_values(declared, arguments[name], rng):
            if is_valid({**arguments, name: value}, schema):
                return {**arguments, name: value}
    return arguments


def is_valid(arguments: dict[str, Any], schema: dict[str, Any]) -> bool:
    """Whether the schema allows the arguments; a schema that is broken allows anything."""
    from jsonschema import Draft202012Validator, SchemaError

    try:
        Draft202012Validator.check_schema(schema)
        return bool(Draft202012Validator(schema).is_valid(arguments))
    except (SchemaError, RecursionError):
        return True


def _other_values(schema: Any, value: Any, rng: random.Random) -> Iterator[Any]:
    if isinstance(schema, dict) and isinstance(schema.get("enum"), list):
        others = [one for one in schema["enum"] if one != value]
        yield from rng.sample(others, len(others))
        return
    for _ in range(_DRAWS):
        try:
            drawn = drawn_value(schema, rng)
        except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError):
            return  # an unusual schema: this value stays right
        if drawn != value:
            yield drawn


def _spoiled_value(value: Any, rng: random.Random) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + rng.randint(1, 9)
    if isinstance(value, str):
        return spoiled_answer(value, rng)
    if isinstance(value, list) and value:
        return [_spoiled_value(value[0], rng), *value[1:]]
    if isinstance(value, dict):
        return spoiled_arguments(value, rng)
    return value


def _with_other_digit(answer: str, place: int, rng: random.Random) -> str:
    old = answer[place]
    # A leading digit that became 0 would change how the number is written, not only its value.
    new = rng.choice([digit for digit in "123456789" if digit != old])
    return answer[:place] + new + answer[place + 1 :]


def _with_other_letter(answer: str, word: re.Match[str], rng: random.Random) -> str:
    old = word.group()[0]
    option = len(answer.strip()) == 1 and old.upper() in "ABCDE"
    letters = "ABCDE" if option else string.ascii_uppercase
    new = rng.choice([letter for letter in letters if letter != old.upper()])
    place = word.start()
    return answer[:place] + (new if old.isupper() else new.lower()) + answer[place + 1 :]


def _last_boxed(text: str) -> tuple[int, int] | None:
    r"""Start and end of the content of the last balanced `\\boxed{}`."""
    start = text.rfind(_BOXED)
    while start >= 0:
        depth = 0
        for place in range(start + len(_BOXED) - 1, len(text)):
            depth += {"{": 1, "}": -1}.get(text[place], 0)
            if depth == 0:
                return start + len(_BOXED), place
        start = text.rfind(_BOXED, 0, start)
    return None


def _last_answer(text: str) -> tuple[int, int]:
    numbers = list(re.finditer(r"[0-9][0-9.,/]*", text))
    found = numbers or list(_WORD.finditer(text))
    return found[-1].span() if found else (len(text), len(text))
