"""BM25 over passages: `FewPassages` without any library, `PassageIndex` for whole corpora.

Both give the same hits with the same scores (Lucene's form, a word counts as often as the query
says it). Words are runs of two or more letters and digits in lower case, but for the commonest
English ones. A passage that shares no word with the query is not a hit; passages with equal scores
keep their order. Corpora are indexed by bm25s (the extra `retrieval`), which holds millions of
words in arrays; it is imported when first used. A passage is identified by its content (`key`): the
same text under the same title is the same passage, whatever its source.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import logging
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from envserver_records.extras import install_command
from numpy.typing import NDArray

from envserver import ConfigError, InputError

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


@dataclass(frozen=True)
class Passage:
    """A titled piece of text.

    Args:
        sentences: in order; undivided text is one sentence.
    """

    title: str
    sentences: tuple[str, ...]

    @property
    def text(self) -> str:
        return " ".join(self.sentences)

    @property
    def key(self) -> str:
        """Ten hexadecimal digits of the content's hash."""
        content = f"{self.title}\0{self.text}".encode("utf-8", "surrogatepass")
        return hashlib.blake2b(content, digest_size=5).hexdigest()

    def as_data(self) -> dict[str, Any]:
        """Returns JSON-like data that `from_data` reads."""
        return {"title": self.title, "sentences": list(self.sentences)}

    @classmethod
    def from_data(cls, data: object) -> Passage:
        """Reads a passage with `title`, and `sentences` or `text` (or `contents`).

        Without a title, the first of several lines is the title (Search-R1's corpora).
        Raises InputError: the data has another form.
        """
        if isinstance(data, str):
            data = {"contents": data}
        if not isinstance(data, dict):
            raise InputError("A passage must be an object or a text.")
        title, sentences = data.get("title"), data.get("sentences")
        if isinstance(sentences, list):
            parts = [one.strip() for one in sentences if isinstance(one, str)]
            if len(parts) != len(sentences) or not isinstance(title, str):
                raise InputError("A passage's title and its sentences must be texts.")
            return cls(title.strip(), tuple(parts))
        names = (
            *("text", "paragraph_text", "passage_text", "page_content", "contents", "content"),
            *("passage", "paragraph", "context", "body", "snippet", "page_snippet"),
        )
        text = next((data[name] for name in names if isinstance(data.get(name), str)), None)
        if text is None:
            raise InputError("A passage must have sentences, a text or contents.")
        if not isinstance(title, str):
            title, _, text = text.partition("\n") if "\n" in text else ("", "", text)
            title = title.strip().strip('"')
        return cls(title.strip(), (text.strip(),))


@dataclass(frozen=True)
class Hit:
    """A passage and its score; higher is better."""

    passage: Passage
    score: float

    def as_data(self) -> dict[str, Any]:
        return {**self.passage.as_data(), "score": self.score}


def passages_from(data: object) -> Iterator[Passage]:
    """Reads a list of passages; raises like `Passage.from_data`."""
    if not isinstance(data, list):
        raise InputError("There must be a list of passages.")
    for one in data:
        yield Passage.from_data(one)


SAME_SCORE_DECIMALS = 6
"""Number of decimals to which scores are compared."""
MANY_FOUND = 4096
"""Above this number of hits, only the best are sorted."""


class FewPassages:
    """A searchable list of a few passages, such as a question's own ten or twenty."""

    def __init__(self, passages: Iterable[Passage]) -> None:
        self._passages = list(passages)
        self._bm25 = BM25(map(_indexed_text, self._passages))

    def search(self, query: str, top_k: int) -> list[Hit]:
        """Returns at most `top_k` hits, best first."""
        return [Hit(self._passages[i], score) for i, score in self._bm25.top(query, top_k)]


class PassageIndex:
    """A searchable corpus; immutable, so threads may share it.

    Raises:
        ConfigError: bm25s is not installed.
    """

    def __init__(self, passages: Iterable[Passage]) -> None:
        self._passages = list(passages)
        library = need_library()
        tokens = library.tokenize(
            [_indexed_text(passage) for passage in self._passages],
            stopwords=sorted(STOP_WORDS),
            show_progress=False,
        )
        self._bm25: Any = None
        if any(tokens.ids):  # it cannot index nothing
            self._bm25 = library.BM25(method="lucene", k1=K1, b=B)
            self._bm25.index(tokens, show_progress=False)

    def __len__(self) -> int:
        return len(self._passages)

    def search(self, query: str, top_k: int) -> list[Hit]:
        """Like `FewPassages.search`."""
        asked = words(query)
        if not asked or self._bm25 is None:
            return []
        scores: NDArray[np.float32] = self._bm25.get_scores(asked)
        return [Hit(self._passages[i], float(scores[i])) for i in _best(scores, top_k)]


@functools.cache
def need_library() -> Any:
    """Imports bm25s. Raises ConfigError: it is not installed."""
    try:
        library = importlib.import_module("bm25s")
    except ImportError as error:
        raise ConfigError(
            f"Searching a corpus needs the library `bm25s`, which cannot be imported: {error}.",
            hint=install_command("retrieval"),
        ) from error
    logging.getLogger("bm25s").setLevel(logging.WARNING)  # it tells of each index it builds
    return library


def _indexed_text(passage: Passage) -> str:
    return f"{passage.title}. {passage.text}"


def _best(scores: NDArray[np.float32], top_k: int) -> list[int]:
    found = np.flatnonzero(scores > 0)
    if len(found) > max(MANY_FOUND, top_k):
        least = np.partition(scores[found], -top_k)[-top_k]
        found = found[scores[found] >= least - 10**-SAME_SCORE_DECIMALS]
    rounded = np.round(scores[found].astype(np.float64), SAME_SCORE_DECIMALS)
    order = np.lexsort((found, -rounded))
    return [int(i) for i in found[order[:top_k]]]
