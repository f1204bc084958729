"""The server's only import of the simulated engine (`tools/envserver_local/simulated`).

Each name is imported when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from envserver_local.simulated import (
        ASSETS,
        Conversation,
        Policy,
        RolloutSolver,
        Said,
        SimEngine,
        Solver,
        Speaker,
        TextSolver,
        Turn,
        Wish,
        assistant_text,
        canonical_arguments,
        drawn_call,
        generator,
        serve_sim,
        shared_tokenizer,
    )

__all__ = [
    "ASSETS",
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
    "shared_tokenizer",
]


def __getattr__(name: str) -> Any:
    from envserver_local import simulated

    return getattr(simulated, name)
