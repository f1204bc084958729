"""Keeps pages that reveal a task's answer from agents.

Two signs: the address is of a site that hosts benchmarks, or the text repeats the question.
"""

from __future__ import annotations

import posixpath
import re
import unicodedata
from collections.abc import Sequence, Set
from functools import lru_cache
from urllib.parse import unquote, urlsplit

DENIED = (
    "huggingface.co/datasets",
    "huggingface.co/spaces",
    "huggingface.co/api",
    "hf.co/datasets",
    "hf.co/spaces",
    "hf.co/api",
    "hf-mirror.com/datasets",
    "hf-mirror.com/api",
    "datasets-server.huggingface.co",
    "*gaia-benchmark*",
    "*gaia_benchmark*",
    "github.com/aymeric-roucher/agent_reasoning_benchmark",
    "raw.githubusercontent.com/aymeric-roucher/agent_reasoning_benchmark",
)
"""`host/path`: that place and all below it, also as a part of another address (of an archive, a
translator); `*word*`: any address with that word."""

_WORDS = 8
"""Minimum number of consecutive words of the question."""
_LEAST_WORDS = 6
"""A shorter question says too little to be known again; one up to _WORDS is looked for whole."""
_SHARE = 0.3
"""Share of all such word runs that makes a text a copy of the question."""
_MOST_READ = 2_000_000
_WORD = re.compile(r"[^\W_]+")
_QUOTED = re.compile(
    '["\u201c\u201e\u00ab][^"\u201c\u201d\u201e\u00ab\u00bb]{1,300}["\u201c\u201d\u00bb]'
)
"""A quotation of the question (a title, a saying) is also found beside the answer: not a leak."""
_TRANSLATED = ".translate.goog"

Runs = frozenset[tuple[str, ...]]
"""Runs of consecutive words."""


class LeakFilter:
    """Filters what agents may see.

    Args:
        denied: in the form of DENIED.
    """

    def __init__(self, denied: Sequence[str] = DENIED) -> None:
        self._words = [rule.strip("*").lower() for rule in denied if rule.startswith("*")]
        places = [rule.lower().strip("/") for rule in denied if not rule.startswith("*")]
        any_place = "|".join(map(_pattern, places)) or "(?!)"
        self._places = re.compile(rf"(?<![\w.-])(?:www\.)?(?:{any_place})(?![\w-])")

    def denies(self, url: str) -> bool:
        """Returns whether the address is of a denied site, or contains such an address."""
        for _ in range(3):  # letters may be written as numbers, and those again
            url = unquote(url)
        url = re.sub(r"[/\\]+", "/", url.lower())
        parts = urlsplit(url.replace(":/", "://", 1))
        path = posixpath.normpath(parts.path).lstrip("/")
        direct = f"{_host(parts.hostname or '')}/{path}"
        return any(word in url for word in self._words) or any(
            self._places.search(each) for each in (direct, url)
        )

    def repeated(self, text: str, question: str) -> Runs:
        """Returns the parts of `question` that occur in `text` word for word."""
        return _found(text[:_MOST_READ], _wanted(question))

    def is_much(self, parts: Set[tuple[str, ...]], question: str) -> bool:
        """Returns whether `parts` are enough of `question` to be a copy of it."""
        wanted = _wanted(question)
        return bool(wanted) and len(parts) >= _SHARE * len(wanted)

    def repeats(self, text: str, question: str) -> bool:
        """Returns whether `text` has a large part of `question` word for word."""
        return self.is_much(self.repeated(text, question), question)


def _pattern(place: str) -> str:
    host, slash, path = place.partition("/")
    return rf"{re.escape(host)}(?::\d+)?{slash}{re.escape(path)}"


def _host(name: str) -> str:
    name = name.rstrip(".")
    if name.endswith(_TRANSLATED):  # its way to write another host
        name = name.removesuffix(_TRANSLATED).replace("--", "\0").replace("-", ".")
    return name.replace("\0", "-")


@lru_cache(maxsize=1024)
def _wanted(question: str) -> Runs:
    own = [_words_of(part) for part in _QUOTED.split(question)]
    runs = frozenset(run for part in own for run in _runs(part, _WORDS))
    if runs:
        return runs
    words = _words_of(question)
    size = min(_WORDS, len(words))
    return _runs(words, size) if size >= _LEAST_WORDS else frozenset()


def _runs(words: list[str], size: int) -> Runs:
    return frozenset(tuple(words[at : at + size]) for at in range(len(words) - size + 1))


def _found(text: str, wanted: Runs) -> Runs:
    if not wanted:
        return frozenset()
    size = len(next(iter(wanted)))
    first = {run[0] for run in wanted}
    words = _words_of(text)
    starts = (tuple(words[at : at + size]) for at, word in enumerate(words) if word in first)
    return frozenset(run for run in starts if run in wanted)


def _words_of(text: str) -> list[str]:
    return _WORD.findall(unicodedata.normalize("NFKC", text).lower())
