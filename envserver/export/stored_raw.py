"""A group as a source of stored groups yields it, before it is decoded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class RawGroup:
    """An undecoded group; `decoded` raises InputError where it is not JSON."""

    place: str
    decoded: Callable[[], Any]
