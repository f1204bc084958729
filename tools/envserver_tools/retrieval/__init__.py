"""Texts that fit a query: plain ones (`BM25`), passages that one has, or a retriever's, over HTTP.

Passages come as hits, best first; what does not fit at all is no hit.
"""

from __future__ import annotations

from .bm25 import FewPassages, PassageIndex, need_library
from .external import HttpRetriever, RetrieverSettings
from .passages import Hit, Passage, passages_from
from .words import BM25, STOP_WORDS

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
