"""Varies the arguments of the tests' calls, to compare a program with the reference. Pure.

A program that holds the tests' answers in a table passes them all and solves nothing. So the
reference computes values for new arguments: those of a test, changed a little in one place, in a
way that seldom leaves the task's domain (signs, sortedness, similar lengths, characters that the
text already has).
"""

from __future__ import annotations

import ast
import random
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from .vocabulary import close

_TRIES = 6


def changed_calls(calls: Sequence[str], count: int, seed: str) -> list[str]:
    """Returns at most `count` new calls; the same for the same seed."""
    rng = random.Random(f"fuzz-{seed}")
    readable = [read for call in dict.fromkeys(calls) if (read := _read(call)) is not None]
    found: dict[str, None] = {}
    for _ in range(count * _TRIES if readable else 0):
        name, arguments = rng.choice(readable)
        place = rng.randrange(len(arguments))
        changed = [*arguments]
        changed[place] = _changed(arguments[place], rng)
        call = f"{name}({', '.join(map(repr, changed))})"
        if call not in calls and _read(call) is not None:
            found[call] = None
        if len(found) == count:
            break
    return list(found)


def agreement(program: Mapping[int, Any], reference: Mapping[int, Any]) -> float | None:
    """Returns the share of the reference's values that the program has, too; None without values.

    Both are keyed by the call's number. Calls on which the reference failed are skipped.
    """
    if not reference:
        return None
    same = sum(number in program and close(program[number], reference[number], 1e-9)
               for number in reference)  # fmt: skip
    return same / len(reference)


def _read(call: str) -> tuple[str, list[Any]] | None:
    """Returns the name and arguments of a call with plain arguments, else None."""
    try:
        tree = ast.parse(call, mode="eval").body
        if not isinstance(tree, ast.Call) or not isinstance(tree.func, ast.Name) or tree.keywords:
            return None
        arguments = [ast.literal_eval(argument) for argument in tree.args]
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return None
    return (tree.func.id, arguments) if arguments else None


def _changed(value: Any, rng: random.Random) -> Any:
    """`value` with a small change, of the same type."""
    match value:
        case bool() | None:
            return value
        case int():
            return _changed_int(value, rng)
        case float():
            return round(value * rng.choice([0.5, 1.5, 2.0]) + rng.choice([0.0, 0.25]), 6)
        case str() if value:
            return _changed_text(value, rng)
        case list() | tuple() if value:
            return type(value)(_changed_items(list(value), rng))
        case dict() if value:
            key = rng.choice(list(value))
            return {**value, key: _changed(value[key], rng)}
    return value


def _changed_int(value: int, rng: random.Random) -> int:
    if value == 0:
        return rng.choice([0, 1])
    size = max(1, abs(value) + rng.choice([-2, -1, 1, 2, 3, abs(value) // 3]))
    return size if value > 0 else -size


def _changed_text(value: str, rng: random.Random) -> str:
    place = rng.randrange(len(value))
    match rng.randrange(3):
        case 0:
            return value[:place] + rng.choice(value) + value[place:]
        case 1 if len(value) > 1:
            return value[:place] + value[place + 1 :]
    return value[:place] + rng.choice(value) + value[place + 1 :]


def _changed_items(items: list[Any], rng: random.Random) -> list[Any]:
    place = rng.randrange(len(items))
    changed = [*items]
    match rng.randrange(3):
        case 0 if len(items) > 1:
            del changed[place]
        case 1:
            changed.insert(place, items[place])
        case _:
            changed[place] = _changed(items[place], rng)
    return sorted(changed) if _is_sorted(items) else changed


def _is_sorted(items: list[Any]) -> bool:
    try:
        return all(a <= b for a, b in pairwise(items))
    except TypeError:
        return False
