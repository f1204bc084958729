"""How lost and truncated attempts count in a report; small, because settings import it."""

from __future__ import annotations

from typing import Literal

Failures = Literal["drop", "zero"]
"""Attempts lost by the server's or the engine's fault are left out, or count as 0."""
Truncated = Literal["score", "zero", "drop"]
"""Truncated attempts count their score, count as 0, or are left out."""
