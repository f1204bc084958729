"""Writes delivered groups to files for people and offline training."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lazy import lazy_names

if TYPE_CHECKING:
    from .jsonl import group_line
    from .stored import StoredRollout, group_of, read_groups
    from .unified import problems_of, problems_of_trace

__all__ = [
    "StoredRollout", "group_line", "group_of", "problems_of", "problems_of_trace", "read_groups",
]  # fmt: skip

__getattr__ = lazy_names(
    __name__,
    {
        "StoredRollout": "stored",
        "group_line": "jsonl",
        "group_of": "stored",
        "problems_of": "unified",
        "problems_of_trace": "unified",
        "read_groups": "stored",
    },
)
