"""Over a hundred texts of a megabyte that may keep a scorer busy, or make it fail.

Most repeat one part, between a beginning and an end that make a reader look at all of it.
"""

from __future__ import annotations

import base64
import random
from collections.abc import Iterator

BYTES = 1_000_000

_FENCE = "```python\n"
_BOXED = ("\\boxed{", "}")
_TAGGED = ("<answer>", "</answer>")
_MARKED = ("FINAL ANSWER: ", "")
_PROGRAM = (_FENCE, "\n```\n")

_PARTS: dict[str, str] = {
    "blanks": " ", "tabs": "\t", "new lines": "\n", "blank lines": " \n", "returns": "\r\n",
    "line separators": "\u2028", "no-break spaces": "\u00a0", "zeros": "\x00ab",
    "zero width": "\u200b\u200d", "right to left": "\u202e\u05d0",
    "combining": "e\u0301\u0323\u0302", "only combining": "\u0301",
    "emoji": "\U0001f469\u200d\U0001f680", "long ligatures": "\ufdfa", "half pairs": "\ud83d",
    "dotted capitals": "\u0130\u00df", "wide digits": "\uff11\u0661\u0967",
    "superscripts": "\u00b2", "tildes": "~", "ticks": "`", "fences": "```\n",
    "tilde fences": "~~~\n", "opened programs": "```python\nx = (\n",
    "programs": "```python\nf = 1\n```\n", "fences in a line": "```a``` b\n",
    "indented fences": " \t```\n", "quotes": "'\"", "stars": "*", "underscores": "_",
    "pipes": "a | ", "hashes": "#", "four hashes": "#### 7\n", "dashes": "-", "backslashes": "\\",
    "escaped braces": "\\{\\}", "opening braces": "{", "closing braces": "}", "dollars": "$",
    "displayed": "$$x$$ ", "brackets": "[", "pairs of brackets": "[]", "parentheses": "(",
    "pairs of parentheses": "()", "angles": "<", "ampersands": "&amp;", "boxes": "\\boxed{7}",
    "opened boxes": "\\boxed{", "boxed letters": "\\boxed{A", "fractions": "\\frac",
    "nested fractions": "\\frac{1}{", "roots": "\\sqrt[", "opened texts": "\\text{",
    "powers": "9^", "limits": "\\left(", "sums": "1+", "products": "2\\cdot ", "factorials": "9!",
    "commas": ",", "numbers": "1,", "spaced numbers": "3, ", "digits": "9", "zero digits": "0",
    "decimals": "0.", "signs": "-+", "percents": "%", "dates": "2026-11-24, ", "times": "1:23-",
    "intervals": "0:00 - ", "letters": "a", "words": "the ", "many words": "plover wren heron ",
    "options": "A, ", "list of options": "(A) yes\n", "named options": "option ", "or": "7 or ",
    "because": "A because ", "answers": "answer: ", "final answers": "FINAL ANSWER: ",
    "finals": "\nFINAL: 7", "answers in lines": "The final answer is 7.\n", "thoughts": "<think>",
    "ended thoughts": "</think>", "closed thoughts": "<think>a</think>", "opened tags": "<answer>",
    "tags": "<answer>a</answer>", "searches": "<wiki_search>", "tool tags": "<tool_call>{",
    "called tools": "\nTOOL_CALL: {", "told thoughts": "\nTHOUGHT: ", "numbered": "1. ",
    "openers": '{"', "keys": '{"a":', "lists of keys": '{"a":[', "objects": '{"a":1,',
    "answers in objects": '{"answer":"B"} ', "opened answers": '{"answer":"x",',
    "lists of objects": '[{"a":1},', "escapes": "\\u0041", "routes": "/math(x) ",
    "opened routes": "/math(", "commands": "python -c ", "headers": "diff --git a/x b/x\n",
    "changed files": "--- a/x\n+++ b/x\n", "hunks": "@@ -1 +1 @@\n",
    "renames": "rename from a\nrename to b\n", "four ticks": "````\n",
    "frames": "\\fbox{7}", "removed": "-\n",
    "added": "+\n",
}  # fmt: skip
"""What is repeated, by name."""

_WRAPPED: dict[str, tuple[str, tuple[str, str]]] = {
    "boxed blanks": (" ", ("\\boxed{A,", "!}")),
    "boxed digits": ("9", _BOXED),
    "boxed powers": ("9^{", _BOXED),
    "boxed fractions": ("\\frac", _BOXED),
    "boxed list": ("1,", _BOXED),
    "boxed options": ("A or ", _BOXED),
    "tagged words": ("plover ", _TAGGED),
    "tagged list": ("a, ", _TAGGED),
    "tagged punctuation": (".", _TAGGED),
    "marked digits": ("9", _MARKED),
    "marked list": ("a;", _MARKED),
    "marked quotes": ('"', _MARKED),
    "program of digits": ("9", (f"{_FENCE}f = ", "\n```\n")),
    "program of parentheses": ("(", _PROGRAM),
    "program of lines": ("f = 1\n", _PROGRAM),
    "program of unfinished lines": ("f = (\n", _PROGRAM),
    "program of quotes": ("'''", _PROGRAM),
    "answer in an object": ("\\n", ('{"answer": "', '"}')),
    "unfinished object": ("9", ('{"answer": ', "")),
    "deep object": ('{"answer":', ('{"answer": ', "")),
    "plan": ('{"id":"s","agent":"math"},', ('{"steps": [', "]}")),
    "boxed unions": ("[1,2]\\cup", _BOXED),
    "boxed percents": ("50\\%", _BOXED),
    "boxed equations": ("x=", _BOXED),
    "boxed repeating": ("0.\\overline{3}", _BOXED),
    "tagged articles": ("a an the ", _TAGGED),
    "program of lambdas": ("lambda:", (f"{_FENCE}f = ", "0\n```\n")),
    "program of formats": ('f"{', (f"{_FENCE}f = ", "\n```\n")),
    "program of attributes": (".a", (f"{_FENCE}f = a", "\n```\n")),
    "escaped quotes": ('\\"', ('{"answer": "', '"}')),
    "huge exponent": ("9", ('{"answer": 1e', "}")),
    "one long hunk": ("+a\n", ("--- a/x\n+++ b/x\n@@ -0,0 +1,333000 @@\n", "")),
    "one changed line": ("-a\n+b\n", ("--- a/x\n+++ b/x\n@@ -1,9 +1,9 @@\n", "")),
}
"""A part, and the text before and after its repetitions."""


def adversarial_texts() -> Iterator[tuple[str, str]]:
    """Yields names and texts; each text has BYTES bytes of UTF-8, or a few less."""
    for name, part in _PARTS.items():
        yield name, _filled(part)
    for name, (part, (before, after)) in _WRAPPED.items():
        yield name, _filled(part, before, after)
    yield from _random()


def _filled(part: str, before: str = "", after: str = "") -> str:
    room = BYTES - _bytes(before + after)
    return before + part * (room // _bytes(part)) + after


def _bytes(text: str) -> int:
    return len(text.encode(errors="surrogatepass"))


def _random() -> Iterator[tuple[str, str]]:
    """Texts without repetitions, the same in every run."""
    source = random.Random(7)
    yield "base64", base64.b64encode(source.randbytes(BYTES * 3 // 4)).decode()
    yield "any characters", "".join(map(chr, source.choices(range(32, 0x800), k=BYTES // 2)))
    yield "any parts", "".join(source.choices(list(_PARTS.values()), k=BYTES // 8))[: BYTES // 4]
    words = ("plover", "7", "\\boxed{", "}", "answer:", "(A)", "```", "\n", "<think>", "</think>")
    yield "any words", " ".join(source.choices(words, k=BYTES // 6))
