"""Reads the options of a row and which of them its answer means. Pure.

In: options in any layout of published sets (texts, objects, an object by label, one text), and an
answer: a number, a letter, a text, or a letter and a text. Out: their texts, and the place of the
right one.
"""

from __future__ import annotations

import re
import string
from itertools import takewhile
from typing import Any, Literal

from envserver_environments.rows import FirstOption, by_label, text_of

from envserver import InputError

MAX_OPTIONS = 26
OPTIONS = (
    "options.text, options.value, options.content, options.option_text, options, option, "
    "candidates, choices.choice, choices.text, choices.content, choices.value, choices, "
    "answer_option_list.content, mc_options, answer_choices"
)
"""Names of the options in published sets, for a table of roles."""
_LABEL = re.compile(r"\s*(?:option\s+)?\(?([a-z])\s*[).:]+\s*(\S.*)", re.DOTALL | re.IGNORECASE)
_NUMBER = re.compile(r"\s*\(?(\d{1,2})[).:]+\s+(\S.*)", re.DOTALL)
_LETTER = re.compile(r"(?:option\s+)?\(?([a-z])\s*[).:]*", re.IGNORECASE)
_INLINE = re.compile(r"(?:^|(?<=\s))(?:\([A-Za-z]\)|[A-Z][).:]|[a-z]\))\s+")
_HEADING = re.compile(r"(?:options|choices|candidates)\s*:\s*\Z", re.IGNORECASE)
_EMPTY = ("", "N/A")
"""Values of option columns that mean that there is no such option."""


def options_of(raw: Any) -> tuple[list[str], int | None]:
    """Texts of the options, without labels A, B, C ... or 1, 2, 3 ... where all have theirs, and
    the number of the first if they show it."""
    raw = by_label(raw) or []
    if isinstance(raw, str):
        raw = split_options(raw)[1] or raw.splitlines()
    if isinstance(raw, dict):
        raw = [raw[name] for name in sorted(raw)]
    while isinstance(raw, list) and raw and text_of(raw[-1]) in _EMPTY:
        raw = raw[:-1]
    if not isinstance(raw, list) or not all(isinstance(one, str | int | float) for one in raw):
        raise InputError("This row's options are not a list of texts.")
    options = [str(one).strip() if text_of(one) else "" for one in raw]
    if len(options) == 1 or len(options) > MAX_OPTIONS or not all(options):
        raise InputError("This row's options are too few, too many, or empty.")
    labels = [label for label in map(_LABEL.fullmatch, options) if label]
    if "".join(label[1].upper() for label in labels) == string.ascii_uppercase[: len(options)]:
        return [label[2].strip() for label in labels], None
    labels = [label for label in map(_NUMBER.fullmatch, options) if label]
    for first in (0, 1):
        if options and [int(label[1]) for label in labels] == [*range(first, first + len(options))]:
            return [label[2].strip() for label in labels], first
    return options, None


def split_options(text: str) -> tuple[str, list[str]]:
    """A question and the options "A. red", "(B) blue" that stand behind it, one after the other."""
    marks = list(_INLINE.finditer(text))
    for place in reversed(range(len(marks))):
        pairs = zip(marks[place:], string.ascii_uppercase, strict=False)
        run = [mark for mark, _ in takewhile(lambda pair: pair[1] in pair[0][0].upper(), pairs)]
        if len(run) < 2:
            continue
        ends = [*(mark.start() for mark in run[1:]), len(text)]
        options = [text[mark.end() : end].strip() for mark, end in zip(run, ends, strict=True)]
        options[-1], _, rest = options[-1].partition("\n")
        stem = _HEADING.sub("", text[: run[0].start()])
        return "\n".join(filter(None, (stem.strip(), rest.strip()))), options
    return text, []


def option_place(
    answer: Any,
    options: list[str],
    *,
    means: Literal["index", "text"] | None = None,
    first: FirstOption = lambda: 0,
) -> int | None:
    """Returns the index of the option that a data set's answer means: an index, a letter, or a
    text, alone or both ("(B)", "B. red").

    Args:
        means: what an answer is that may be either.
        first: the number of the first option.
    """
    if isinstance(answer, list) and len(answer) == 1:
        answer = answer[0]
    text = text_of(answer)
    number = re.fullmatch(r"(\d{1,2})(?:\.0)?", text)
    letter = _LETTER.fullmatch(text) or _LABEL.fullmatch(text)
    plain, known = _plain(text), [_plain(option) for option in options]
    by_letter = ord(letter[1].upper()) - ord("A") if letter else -1
    if letter and letter.re is _LABEL and known[by_letter : by_letter + 1] != [_plain(letter[2])]:
        by_letter = -1
    places = {
        "index": int(number[1]) - first() if number else -1,
        "letter": by_letter,
        "text": known.index(plain) if known.count(plain) == 1 else -1,
    }
    valid = {kind: place for kind, place in places.items() if 0 <= place < len(options)}
    if not isinstance(answer, str) or (means == "index" and number):
        return valid.get("index")
    if means == "text" and means in valid:
        return valid[means]
    if len(set(valid.values())) > 1:
        raise InputError(
            f"The answer {text!r} is the text of one option and the {min(valid)} of another:"
            """ --env.columns '{"index": "FIELD"}' names the place of the right one."""
        )
    return next(iter(valid.values()), None)


def _plain(text: str) -> str:
    return " ".join(text.casefold().split()).rstrip(".")
