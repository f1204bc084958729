"""Finds the answer in the visible text (after the last `</think>`) of a hostile model, in linear
time. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice

from envserver_records.tasks import Json
from envserver_tools.calling import Tool, ToolError, checked_call, toolbox, visible_text

from envserver import Message

MAX_JSON_CHARACTERS = 100_000
"""JSON is looked for in the last characters of a text, as many as this."""
MAX_JSON_SCANNED = 10_000_000
"""Total work of failed attempts, each of which starts over."""

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_BARE_BOX = re.compile(r"\\boxed\s+(-?[\d.,/]*\d|[A-Za-z])(?=\s*(?:[.,;!?$)\n]|\Z))")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_OBJECT = re.compile(r"\{\s*\"")
_ANCHORS_IN_A_LINE = 8
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
    r"(?:option\s*+)?\(?([a-z])[).]*+\s*+(?:,|/|&|\bor\b|\band\b)\s*+(?:(?:and|or)\b\s*+)?"
    r"(?:option\s*+)?\(?([a-z])(?![a-z])",
    re.IGNORECASE,
)
_WRAPPER = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mathit)\s*\{(.*)\}", re.DOTALL)
_DECODER = json.JSONDecoder()


def text_in(value: object) -> str | None:
    return value if isinstance(value, str) else None


def last_reply(messages: Sequence[Message]) -> Message:
    """The last message of the assistant; {} without any."""
    return next(
        (message for message in reversed(messages) if message.get("role") == "assistant"), {}
    )


def arguments_of(tool: Tool, message: Message) -> Json | None:
    """The arguments of the first valid call of `tool` in a message; None without any."""
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else []:
        with suppress(ToolError):
            return checked_call(toolbox(tool), call)[1]
    return None


def last_boxed(text: str) -> str | None:
    r"""Returns the content of the last `\boxed{...}` (or `\fbox`) with balanced braces, or of
    `\boxed 2`."""
    bare = list(_BARE_BOX.finditer(text))[-1:]
    openings = {opening.end() for opening in _BOX.finditer(text)}
    if not openings or (bare and bare[0].start() > max(openings)):
        return bare[0][1] if bare else None
    # After the brace of a box no backslash is pending: one pass serves all boxes.
    last, unclosed = None, [min(openings)]
    for brace in _BRACE.finditer(text, unclosed[0]):
        if brace[0] == "{":
            unclosed.append(brace.end())
        elif brace[0] == "}" and unclosed:
            start = unclosed.pop()
            if start in openings and (last is None or start > last[0]):
                last = start, brace.start()
    return None if last is None else text[last[0] : last[1]]


def choice_index(text: str, options: Sequence[str]) -> int | None:
    """Returns the option that a model's text names, or None if it names none or several. The answer
    is the last box, else the key `answer` of a JSON object, else the rest of the last line that
    says "answer" or "FINAL:", else the whole text if it is a single letter."""
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
    folded = _folded(plain)
    equal = [i for i, option in enumerate(options) if _folded(option) == folded]
    return equal[0] if len(equal) == 1 else None


def doubtful_option(options: Sequence[str], place: int) -> str | None:
    """Returns why the text of the right option is not clearly that option; None if it is."""
    if sum(_folded(option) == _folded(options[place]) for option in options) > 1:
        return "two options have the text of the right one"
    if option_index(options[place], options) not in (None, place):
        return "the text of the right option is the letter of another"
    return None


def _payloads(seen: str) -> list[str]:
    boxed = last_boxed(seen)
    if boxed is not None:
        return [boxed]
    named = _json_answer(seen)
    if named is not None:
        return [named]
    line = next(filter(_ANCHOR.search, reversed(seen.splitlines())), None)
    if line is not None:
        anchors = islice(_ANCHOR.finditer(line), _ANCHORS_IN_A_LINE)
        return [line[anchor.end() :] for anchor in anchors]
    lone = _BARE.fullmatch(_plain(seen))
    return [lone.group()] if lone else []


def json_objects(text: str, decoder: json.JSONDecoder) -> Iterator[Json]:
    """Yields the JSON objects near the end of `text` that are in no other, in order."""
    near_end = text[-MAX_JSON_CHARACTERS:]
    position = scanned = 0
    while scanned < MAX_JSON_SCANNED and (opening := _OBJECT.search(near_end, position)):
        try:
            value, position = decoder.raw_decode(near_end, opening.start())
        except json.JSONDecodeError as error:
            position = opening.start() + 1
            scanned += error.pos
        except (ValueError, RecursionError):
            position = opening.start() + 1
            scanned += len(near_end)
        else:
            yield value


def _json_answer(text: str) -> str | None:
    answer = None
    for value in json_objects(text, _DECODER):
        if "answer" in value:
            answer = value["answer"] if isinstance(value["answer"], str) else ""
    return answer


def _plain(payload: str) -> str:
    plain = payload.replace("\\$", "$").replace("\\%", "%").strip().strip("*`").strip()
    if len(plain) > 2 and plain[0] == plain[-1] == "$":
        plain = plain[1:-1].strip()
    wrapped = _WRAPPER.fullmatch(plain)
    return wrapped[1].strip() if wrapped else plain


def _folded(text: str) -> str:
    return " ".join(text.lower().split()).removesuffix(".").rstrip()
