"""Hides a package from imports that would use it, but do without it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def hidden(package: str) -> Iterator[None]:
    """Lets imports of `package` fail in this block, in all threads, unless it was imported."""
    if package in sys.modules:
        yield
        return
    sys.modules[package] = None  # type: ignore[assignment]  # what Python offers for this
    try:
        yield
    finally:
        del sys.modules[package]
