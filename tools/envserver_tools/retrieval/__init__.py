"""Finds texts that match a query: by BM25 in plain texts or passages, or by a retriever over HTTP.

Results are hits, best first; passages that do not match at all are left out.
"""

from __future__ import annotations

from .bm25 import (
    BM25,
    STOP_WORDS,
    FewPassages,
    Hit,
    HttpRetriever,
    Passage,
    PassageIndex,
    RetrieverSettings,
    need_library,
    passages_from,
)

__all__ = [
    "BM25",
    "STOP_WORDS",
    "FewPassages",
    "Hit",
    "HttpRetriever",
    "Passage",
    "PassageIndex",
    "RetrieverSettings",
    "need_library",
    "passages_from",
]
