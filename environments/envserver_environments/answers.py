"""Finds the answer in a model's text. Pure functions shared by all environments.

Only visible text counts: the text after the last `</think>`. A text with an unclosed `<think>` has
none.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from envserver_tools.visible import visible_text

_BOX = re.compile(r"\\boxed\s*\{")
_ANCHOR = re.compile(r"(?:\b(?:final\s+)?answer(?:\s+is)?[:\s]|\bFINAL:)", re.IGNORECASE)
_BARE = re.compile(r"(?:\(\s*([a-z])\s*\)|([a-z])\.?|option\s*\(?([a-z])\)?\.?)", re.IGNORECASE)
_LABELLED = re.compile(
    r"(?:option\s*)?\(?([a-z])(?:\s*[:).]+(?:\s|$).*|\s*[:)]\S.*|\s+-\s*\S.*|-\S\S.*)",
    re.IGNORECASE | re.DOTALL,
)
_REASONED = re.compile(
    r"(?:option\s*)?\(?([a-z])\)?,?\s+(?:because|since|as)\b.*", re.IGNORECASE | re.DOTALL
)
_SEVERAL = re.compile(
    r"(?:option\s*)?\(?([a-z])[).]*\s*(?:,|/|&|\bor\b|\band\b)\s*(?:and\b|or\b)?\s*"
    r"(?:option\s*)?\(?([a-z])(?![a-z])",
    re.IGNORECASE,
)
_WRAPPER = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mathit)\s*\{(.*)\}", re.DOTALL)


def last_boxed(text: str) -> str | None:
    r"""Returns the content of the last `\boxed{...}` with balanced braces, or None."""
    for opening in reversed(list(_BOX.finditer(text))):
        end = _closing_brace(text, opening.end())
        if end is not None:
            return text[opening.end() : end]
    return None


def choice_index(text: str, options: Sequence[str]) -> int | None:
    """Returns the option that a model's text names, or None if it names none or several.

    The answer is the last box, else the key `answer` of a JSON object, else the rest of the last
    line that says "answer" or "FINAL:", else the whole text if it is a single letter.

    Args:
        text: the model's text, with its thoughts.
        options: the texts of the options, labelled A, B, C ... in this order.
    """
    seen = visible_text(text)
    if seen is None:
        return None
    for payload in _payloads(seen):
        index = option_index(payload, options)
        if index is not None:
            return index
    return None


def option_index(payload: str, options: Sequence[str]) -> int | None:
    """Returns the option that an answer denotes: by its letter, else by its exact text."""
    plain = _plain(payload)
    several = _SEVERAL.match(plain)
    if several and several[1].lower() != several[2].lower():
        return None
    for pattern in (_BARE, _LABELLED, _REASONED):
        found = pattern.fullmatch(plain)
        if found:
            letter = next(group for group in found.groups() if group)
            index = ord(letter.lower()) - ord("a")
            if index < len(options):
                return index
    equal = [i for i, option in enumerate(options) if _folded(option) == _folded(plain)]
    return equal[0] if len(equal) == 1 else None


def _payloads(seen: str) -> list[str]:
    """Returns the candidates for the answer; the first one that names an option counts."""
    boxed = last_boxed(seen)
    if boxed is not None:
        return [boxed]
    named = _json_answer(seen)
    if named is not None:
        return [named]
    for line in reversed(seen.splitlines()):
        anchors = list(_ANCHOR.finditer(line))
        if anchors:
            return [line[anchor.end() :] for anchor in anchors]
    lone = _BARE.fullmatch(_plain(seen))
    return [lone.group()] if lone else []


def _closing_brace(text: str, start: int) -> int | None:
    depth, position = 1, start
    while position < len(text):
        character = text[position]
        if character == "\\":
            position += 1
        elif character == "{":
            depth += 1
        elif character == "}":
            depth -= 1
            if depth == 0:
                return position
        position += 1
    return None


def _json_answer(text: str) -> str | None:
    decoder = json.JSONDecoder()
    answer, position = None, text.find("{")
    while position >= 0:
        try:
            value, end = decoder.raw_decode(text, position)
        except (ValueError, RecursionError):
            position = text.find("{", position + 1)
            continue
        if "answer" in value:
            answer = value["answer"] if isinstance(value["answer"], str) else ""
        position = text.find("{", end)
    return answer


def _plain(payload: str) -> str:
    """`payload` without what only formats it: Markdown stars, dollar signs around it, \\text{}."""
    plain = payload.replace("\\$", "$").replace("\\%", "%").strip().strip("*`").strip()
    if len(plain) > 2 and plain[0] == plain[-1] == "$":
        plain = plain[1:-1].strip()
    wrapped = _WRAPPER.fullmatch(plain)
    return wrapped[1].strip() if wrapped else plain


def _folded(text: str) -> str:
    return " ".join(text.lower().split()).removesuffix(".").rstrip()
