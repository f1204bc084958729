"""Runs a command's coroutine on uvloop."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, TypeVar

import uvloop

T = TypeVar("T")


def run_loop(coroutine: Coroutine[Any, Any, T]) -> T:
    """The coroutine's result."""
    return uvloop.run(coroutine)
