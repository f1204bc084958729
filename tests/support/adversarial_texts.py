"""Over a hundred texts of a megabyte that may keep a scorer busy, or make it fail.

Most repeat one part, between a beginning and an end that make a reader look at all of it.
"""

import base64
import random
from collections.abc import Iterator

from support.cases import cases_of

BYTES = 1_000_000

_TEXTS = cases_of(__file__)
_PARTS = {**_TEXTS["parts"], "half pairs": "\ud83d"}  # which no file holds


def adversarial_texts() -> Iterator[tuple[str, str]]:
    """Yields names and texts; each text has BYTES bytes of UTF-8, or a few less."""
    for name, part in _PARTS.items():
        yield name, _filled(part)
    for name, (part, before, after) in _TEXTS["wrapped"].items():
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
