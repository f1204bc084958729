"""Engines behind the proxy; README.md draws the path of a request.

engine       the interface that every engine implements
openai       any OpenAI-compatible server, or several replicas of one; below it
             routing (choice, retries), replicas (health, calls in flight), connections (HTTP)
fleet        replicas that come and go
probe        finds out what an engine can do
catalogue    configs/models.yaml, and where a model's tokenizer and chat template are
manager      starts engines and keeps them running
sim          imports the simulated engine, which is in tools/envserver_local
"""

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
