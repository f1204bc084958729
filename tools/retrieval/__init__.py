"""Passages that fit a query: BM25 over passages that one has, or a retriever elsewhere, over HTTP.

Both answer with hits, best first; what does not fit at all is no hit.
"""

from __future__ import annotations

from .bm25 import FewPassages, PassageIndex, need_library
from .external import HttpRetriever, RetrieverSettings
from .passages import Hit, Passage, passages_from

__all__ = [
    "FewPassages",
    "Hit",
    "HttpRetriever",
    "Passage",
    "PassageIndex",
    "RetrieverSettings",
    "need_library",
    "passages_from",
]
