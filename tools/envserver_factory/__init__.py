"""Prepares data and models for offline training; `commands` has the commands that use it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from envserver.lazy import lazy_names

if TYPE_CHECKING:
    from .exporting.formats import Options, format_of
    from .merging import Merged, Recipe, Vector, merge
    from .publishing.models import upload
    from .trajectories import convert, validate

__all__ = [
    "Merged", "Options", "Recipe", "Vector", "convert", "format_of", "merge", "upload", "validate",
]  # fmt: skip

__getattr__ = lazy_names(
    __name__,
    {
        "Merged": "merging",
        "Options": "exporting.formats",
        "Recipe": "merging",
        "Vector": "merging",
        "convert": "trajectories",
        "format_of": "exporting.formats",
        "merge": "merging",
        "upload": "publishing.models",
        "validate": "trajectories",
    },
)
