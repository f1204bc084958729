"""Makes a wrong answer from a right one by changing one digit or letter."""

from __future__ import annotations

import random
import re
import string
from collections.abc import Iterator
from typing import Any

from .schema_values import drawn_value

_DRAWS = 8
"""Values that are drawn from a schema until one differs and is allowed."""
_OPPOSITES = {"yes": "no", "no": "yes", "true": "false", "false": "true"}
_WORD = re.compile(r"[^\W\d_]+")
_COMMAND_OR_WORD = re.compile(r"\\[a-zA-Z]+|[^\W\d_]+")
_BOXED = "\\boxed{"


def spoiled_text(text: str, rng: random.Random) -> str:
    """Returns `text` with a wrong last `\\boxed{}`, or else last number, or else last word."""
    span = _last_boxed(text)
    if span is None:
        span = _last_answer(text)
    start, end = span
    return text[:start] + spoiled_answer(text[start:end], rng) + text[end:]


def spoiled_answer(answer: str, rng: random.Random) -> str:
    """Returns an answer of the same form that never equals `answer`, as text or as a number."""
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
    """Returns a call's arguments with a wrong `answer`, or else a wrong longest value.

    Args:
        schema: of the arguments. A wrong value that it does not allow is drawn from it; if it
            allows no other, the next longest value is made wrong.
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
    """Returns whether the schema allows the arguments; a schema that is broken allows anything."""
    from jsonschema import Draft202012Validator, SchemaError

    try:
        Draft202012Validator.check_schema(schema)
        return bool(Draft202012Validator(schema).is_valid(arguments))
    except (SchemaError, RecursionError):
        return True


def _other_values(schema: Any, value: Any, rng: random.Random) -> Iterator[Any]:
    """Yields values for `schema` that differ from `value`."""
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
    """Returns start and end of the content of the last balanced `\\boxed{}`."""
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
