"""Finds the texts that share the rarest words with a query: BM25 in Lucene's form, no library.

Words are runs of two or more letters and digits in lower case, but for the commonest English ones.
A text that shares no word with the query is never found; of equal scores the earlier text comes
first.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable

K1 = 1.5
B = 0.75

STOP_WORDS = frozenset(
    {
        "a", "an", "and", "are", "as", "at", "be", "but", "by", "for", "if", "in", "into", "is",
        "it", "no", "not", "of", "on", "or", "such", "that", "the", "their", "then", "there",
        "these", "they", "this", "to", "was", "will", "with",
    }
)  # fmt: skip
_WORD = re.compile(r"\b\w\w+\b")


def words(text: str) -> list[str]:
    """The words of `text` that count, in order."""
    return [word for word in _WORD.findall(text.lower()) if word not in STOP_WORDS]


class BM25:
    """An index of texts that do not change."""

    def __init__(self, texts: Iterable[str]) -> None:
        counts = [Counter(words(text)) for text in texts]
        lengths = [count.total() for count in counts]
        mean = sum(lengths) / len(lengths) if any(lengths) else 1.0
        self._weights: dict[str, list[tuple[int, float]]] = {}
        for number, (count, length) in enumerate(zip(counts, lengths, strict=True)):
            for word, times in count.items():
                share = times / (times + K1 * (1 - B + B * length / mean))
                self._weights.setdefault(word, []).append((number, share))
        for word, entries in self._weights.items():
            rarity = math.log(1 + (len(counts) - len(entries) + 0.5) / (len(entries) + 0.5))
            self._weights[word] = [(number, rarity * share) for number, share in entries]

    def top(self, query: str, k: int) -> list[tuple[int, float]]:
        """The best `k` texts as (number, score), best first; each score is over 0."""
        scores: dict[int, float] = {}
        for word in words(query):
            for number, weight in self._weights.get(word, ()):
                scores[number] = scores.get(number, 0.0) + weight
        return sorted(scores.items(), key=lambda found: (-round(found[1], 9), found[0]))[:k]
