"""Prepares data and models for offline training, from files that are already there.

The names below are imported when they are first used. The commands `merge`, `convert`, `validate`,
`sft build|preview|router|math|code` and `export --push_to_hub` of `envserver` use this package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from envserver.lazy import lazy_names

if TYPE_CHECKING:
    from .merging import Merged, Recipe, Vector, merge
    from .publishing.upload import upload
    from .trajectories.convert import convert
    from .trajectories.validation import validate

__all__ = ["Merged", "Recipe", "Vector", "convert", "merge", "upload", "validate"]

__getattr__ = lazy_names(
    __name__,
    {
        "Merged": "merging",
        "Recipe": "merging",
        "Vector": "merging",
        "convert": "trajectories.convert",
        "merge": "merging",
        "upload": "publishing.upload",
        "validate": "trajectories.validation",
    },
)
