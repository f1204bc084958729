"""The simulated engine: a seeded script that behaves like a model server, without a language model.

    SimEngine(SimConfig(), solver)        in this process
    serve_sim(SimConfig(), host, port)    over HTTP, with vLLM's paths

Names are imported when first used: the command line imports this package's parent early.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOMES = {
    "SimEngine": "engine",
    "RolloutSolver": "policy",
    "Solution": "policy",
    "Speaker": "policy",
    "Solver": "policy",
    "TextSolver": "policy",
    "serve_sim": "server",
    "sim_app": "server",
}

if TYPE_CHECKING:
    from .engine import SimEngine
    from .policy import RolloutSolver, Solution, Solver, Speaker, TextSolver
    from .server import serve_sim, sim_app

__all__ = [
    "RolloutSolver",
    "SimEngine",
    "Solution",
    "Solver",
    "Speaker",
    "TextSolver",
    "serve_sim",
    "sim_app",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
