"""The names of the simulated engine (`tools/envserver_local/simulated`) that the server uses.

Each is imported when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lazy import lazy_names

if TYPE_CHECKING:
    from envserver_local.simulated.engine import SimEngine
    from envserver_local.simulated.policy import (
        Policy,
        RolloutSolver,
        Said,
        Solver,
        Speaker,
        TextSolver,
        Turn,
        Wish,
        drawn_call,
        generator,
    )
    from envserver_local.simulated.server import serve_sim
    from envserver_local.simulated.tokenizer import (
        Conversation,
        assistant_text,
        canonical_arguments,
    )

__all__ = [
    "Conversation",
    "Policy",
    "RolloutSolver",
    "Said",
    "SimEngine",
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
]

__getattr__ = lazy_names(
    "envserver_local.simulated",
    {
        "Conversation": "tokenizer",
        "Policy": "policy",
        "RolloutSolver": "policy",
        "Said": "policy",
        "SimEngine": "engine",
        "Solver": "policy",
        "Speaker": "policy",
        "TextSolver": "policy",
        "Turn": "policy",
        "Wish": "policy",
        "assistant_text": "tokenizer",
        "canonical_arguments": "tokenizer",
        "drawn_call": "policy",
        "generator": "policy",
        "serve_sim": "server",
    },
)
