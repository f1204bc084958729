"""A package that is an environment."""

from .env import Dedicated, Pooled, Sandboxed

__all__ = ["Dedicated", "Pooled", "Sandboxed"]
