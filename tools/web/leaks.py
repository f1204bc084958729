"""Keeps a task's own answer sheet out of what an agent finds on the web.

Two signs: the address is of a place where benchmarks are kept, or the text repeats the question.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from urllib.parse import unquote, urlsplit

DENIED = (
    "huggingface.co/datasets",
    "huggingface.co/spaces",
    "hf.co/datasets",
    "hf.co/spaces",
    "hf-mirror.com/datasets",
    "datasets-server.huggingface.co",
    "*gaia-benchmark*",
    "*gaia_benchmark*",
    "github.com/aymeric-roucher/agent_reasoning_benchmark",
    "raw.githubusercontent.com/aymeric-roucher/agent_reasoning_benchmark",
)
"""`host/path`: that place and all below it; `*word*`: any address with that word."""

_WORDS = 8
"""Of the question, that must follow each other in the text."""
_SHARE = 0.3
"""Of all such runs of words, that make a text one that repeats the question."""
_MOST_READ = 2_000_000
_WORD = re.compile(r"\w+")


class LeakFilter:
    """What may not reach an agent.

    Args:
        denied: in the form of DENIED.
    """

    def __init__(self, denied: Sequence[str] = DENIED) -> None:
        self._words = [rule.strip("*").lower() for rule in denied if rule.startswith("*")]
        self._places = [rule.lower().strip("/") for rule in denied if not rule.startswith("*")]

    def denies(self, url: str) -> bool:
        """Whether the address is of a denied place."""
        for _ in range(3):  # letters may be written as numbers, and those again
            url = unquote(url)
        parts = urlsplit(url.lower())
        host = (parts.hostname or "").rstrip(".")
        path = re.sub(r"/+", "/", parts.path)
        place = f"{host}{path}/"
        if any(word in url.lower() for word in self._words):
            return True
        hosts = [place, place.removeprefix("www.")]
        return any(each.startswith(f"{rule}/") for rule in self._places for each in hosts)

    def repeats(self, text: str, question: str) -> bool:
        """Whether `text` holds a good part of `question` word for word."""
        wanted = _runs(question)
        if not wanted:
            return False
        return len(wanted & _runs(text[:_MOST_READ])) >= _SHARE * len(wanted)


def _runs(text: str) -> set[tuple[str, ...]]:
    words = [word.lower() for word in _WORD.findall(text)]
    return {tuple(words[at : at + _WORDS]) for at in range(len(words) - _WORDS + 1)}
