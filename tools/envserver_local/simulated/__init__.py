"""The simulated engine: a seeded script that behaves like a model server, without a language model.

    SimEngine(SimConfig(), solver)        in this process
    serve_sim(SimConfig(), host, port)    over HTTP, with vLLM's paths

It needs no extra. Names are imported when first used.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from envserver.lazy import lazy_names

if TYPE_CHECKING:
    from .conversation import Conversation
    from .engine import SimEngine
    from .faulty_answers import Said, Turn
    from .policy import (
        Policy,
        RolloutSolver,
        Solution,
        Solver,
        Speaker,
        TextSolver,
        Wish,
        drawn_call,
        generator,
    )
    from .server import serve_sim, sim_app
    from .tokenizer import assistant_text, canonical_arguments, shared_tokenizer

__all__ = [
    "ASSETS",
    "Conversation",
    "Policy",
    "RolloutSolver",
    "Said",
    "SimEngine",
    "Solution",
    "Solver",
    "Speaker",
    "TextSolver",
    "Turn",
    "Wish",
    "assistant_text",
    "canonical_arguments",
    "drawn_call",
    "generator",
    "serve_sim",
    "shared_tokenizer",
    "sim_app",
]

ASSETS = Path(__file__).parent / "assets"
"""The folder with tokenizer.json and tokenizer_config.json."""

__getattr__ = lazy_names(
    __name__,
    {
        "Conversation": "conversation",
        "Policy": "policy",
        "RolloutSolver": "policy",
        "Said": "faulty_answers",
        "SimEngine": "engine",
        "Solution": "policy",
        "Solver": "policy",
        "Speaker": "policy",
        "TextSolver": "policy",
        "Turn": "faulty_answers",
        "Wish": "policy",
        "assistant_text": "tokenizer",
        "canonical_arguments": "tokenizer",
        "drawn_call": "policy",
        "generator": "policy",
        "serve_sim": "server",
        "shared_tokenizer": "tokenizer",
        "sim_app": "server",
    },
)
