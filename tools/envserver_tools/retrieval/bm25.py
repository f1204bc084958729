"""BM25 over passages: `FewPassages` without any library, `PassageIndex` for whole corpora.

Both give the same hits with the same scores (Lucene's form, a word counts as often as the query
says it), and split words by the rules of `words`. A passage that shares no word with the query is
not a hit; passages with equal scores keep their order. Corpora are indexed by bm25s (the extra
`retrieval`), which holds millions of words in arrays; it is imported when first used.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Iterable
from typing import Any

import numpy as np
from envserver_records.extras import install_command
from numpy.typing import NDArray

from envserver import ConfigError

from .passages import Hit, Passage
from .words import BM25, K1, STOP_WORDS, B, words

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
    """Returns the indices of the best scores, best first."""
    found = np.flatnonzero(scores > 0)
    if len(found) > max(MANY_FOUND, top_k):
        least = np.partition(scores[found], -top_k)[-top_k]
        found = found[scores[found] >= least - 10**-SAME_SCORE_DECIMALS]
    rounded = np.round(scores[found].astype(np.float64), SAME_SCORE_DECIMALS)
    order = np.lexsort((found, -rounded))
    return [int(i) for i in found[order[:top_k]]]
