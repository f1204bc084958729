"""Converts documents to text for models: tables, slides, PDF, pages, archives, image metadata.

In: the bytes and the name of an untrusted file. Out: its text, in pages. Files are parsed in a
process of their own with limits on time, memory and output, so a hostile file causes an error and
nothing else. Nothing is written to disk.
"""

from __future__ import annotations

from .bounded import Limits
from .reading import (
    DocumentError,
    DocumentReader,
    Text,
    document_tools,
    page_of,
    preload,
    read_bytes,
    to_text,
)

__all__ = [
    "DocumentError", "DocumentReader", "Limits", "Text", "document_tools", "page_of", "preload",
    "read_bytes", "to_text",
]  # fmt: skip
