"""A sub-package."""

from .graders import grade

__all__ = ["grade"]
