"""Documents to text, for models: tables, slides, PDF, pages, archives, facts about images.

In: the bytes of a file of anybody's making, and its name. Out: its text, in pages. What is read is
read in a process of its own that is bounded in time, memory and output, so a hostile file costs an
error and nothing else. Nothing is ever written to disk.
"""

from __future__ import annotations

from .bounded import Limits
from .reading import DocumentError, Text, preload, read_bytes, to_text
from .tool import DocumentReader, document_tools, page_of

__all__ = [
    "DocumentError",
    "DocumentReader",
    "Limits",
    "Text",
    "document_tools",
    "page_of",
    "preload",
    "read_bytes",
    "to_text",
]
