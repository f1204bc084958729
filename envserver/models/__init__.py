"""Engines behind the proxy; README.md draws the path of a request."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lazy import lazy_names

if TYPE_CHECKING:
    from .engine import ReplicaHealth
    from .openai import OpenAIEngine
    from .probe import ProbeResult
    from .replicas import FLOOR, Replica

__all__ = [
    "FLOOR",
    "OpenAIEngine",
    "ProbeResult",
    "Replica",
    "ReplicaHealth",
]

__getattr__ = lazy_names(
    __name__,
    {
        "FLOOR": "replicas",
        "OpenAIEngine": "openai",
        "ProbeResult": "probe",
        "Replica": "replicas",
        "ReplicaHealth": "engine",
    },
)
