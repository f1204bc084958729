"""Writes delivered groups to files for people and offline training."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lazy import lazy_names

if TYPE_CHECKING:
    from .formats import Options, format_of
    from .jsonl import group_line
    from .stored import StoredRollout, group_of, read_groups
    from .traces import problems_of_trace
    from .unified import problems_of

__all__ = [
    "Options",
    "StoredRollout",
    "format_of",
    "group_line",
    "group_of",
    "problems_of",
    "problems_of_trace",
    "read_groups",
]

__getattr__ = lazy_names(
    __name__,
    {
        "Options": "formats",
        "StoredRollout": "stored",
        "format_of": "formats",
        "group_line": "jsonl",
        "group_of": "stored",
        "problems_of": "unified",
        "problems_of_trace": "traces",
        "read_groups": "stored",
    },
)
