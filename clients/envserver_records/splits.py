"""The splits of an environment's tasks; small, because settings import it."""

from __future__ import annotations

from typing import Literal

Split = Literal["train", "validation", "test"]
