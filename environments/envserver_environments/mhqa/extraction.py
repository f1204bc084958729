r"""Finds the answer in a model's text when `finish` was not called. Pure.

Only visible text counts. The first of these that is there is the answer:

    1. the last <answer>...</answer>
    2. `answer` of the last JSON object that has one which is a text or a number
    3. what follows FINAL: at the start of a line, to the end
    4. the inside of the last balanced \boxed{...}
    5. the rest of the last line that says "answer:" or "final answer:"

A box that is all of the answer is taken off.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from envserver_environments.answers import json_objects, last_boxed
from envserver_tools.visible import visible_text

_TAGGED = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL | re.IGNORECASE)
_FINAL = re.compile(r"^[ \t]*FINAL:(.*)", re.MULTILINE | re.DOTALL)
_LINE = re.compile(r"\b(?:final\s+)?answer\s*:[ \t]*(\S.*)", re.IGNORECASE)
_WRAPPED = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf)\s*\{(.*)\}", re.DOTALL)
_DECODER = json.JSONDecoder(parse_float=str, parse_int=str)


def extract_answer(text: str) -> str | None:
    """Returns the answer in `text`; "" if it is empty, None if there is none."""
    seen = visible_text(text)
    if seen is None:
        return None
    for find in (_tagged, _json_answer, _final, _boxed, _last_line):
        answer = find(seen)
        if answer is not None:
            return _unboxed(answer)
    return None


def has_tagged_answer(text: str) -> bool:
    """Returns whether the visible part of `text` has <answer>...</answer>."""
    seen = visible_text(text)
    return seen is not None and _tagged(seen) is not None


def nested_objects(text: str) -> Iterator[dict[str, Any]]:
    """Yields the JSON objects near the end of `text`, and those in them, inner before outer.

    Numbers stay as they are written, as text.
    """
    for value in json_objects(text, _DECODER):
        yield from _objects_in(value)


def _objects_in(value: Any) -> Iterator[dict[str, Any]]:
    """Yields the objects in `value`, inner before outer, without recursion."""
    objects: list[dict[str, Any]] = []
    waiting = [value]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            objects.append(part)
            waiting += part.values()
        elif isinstance(part, list):
            waiting += part
    yield from reversed(objects)


def _tagged(seen: str) -> str | None:
    found = _TAGGED.findall(seen)
    return str(found[-1]).strip() if found else None


def _json_answer(seen: str) -> str | None:
    answers = [one["answer"] for one in nested_objects(seen) if isinstance(one.get("answer"), str)]
    return answers[-1].strip() if answers else None


def _final(seen: str) -> str | None:
    found = _FINAL.search(seen)
    return found[1].strip() if found else None


def _boxed(seen: str) -> str | None:
    inside = last_boxed(seen)
    return None if inside is None else f"\\boxed{{{inside}}}"


def _unboxed(answer: str) -> str:
    r"""`answer` without the \boxed{\text{...}} that is all around it."""
    inside = last_boxed(answer)
    if inside is None or answer != f"\\boxed{{{inside}}}":
        return answer
    wrapped = _WRAPPED.fullmatch(inside.strip())
    return (wrapped[1] if wrapped else inside).strip()


def _last_line(seen: str) -> str | None:
    for line in reversed(seen.splitlines()):
        found = list(_LINE.finditer(line))
        if found:
            return found[-1][1].strip().strip("*_` ")
    return None
