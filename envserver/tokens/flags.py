"""What may be odd about a call, a sequence or a trajectory, and what is done about it by default.

One table. `train`: harmless, kept and counted. `mask`: the call's tokens stay as context
but are not trained. `drop`: the rollout is not delivered.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

Action = Literal["train", "mask", "drop"]

ACTIONS: dict[str, Action] = {
    # The engine did not say what was sampled.
    "missing_token_ids": "drop",
    "missing_logprobs": "drop",
    "logprob_count_mismatch": "drop",
    # The tokens are exact, but were cut or not acted on.
    "undelivered_completion": "mask",
    "finish_abort": "mask",
    "truncated_length": "train",
    # The policy changed while it sampled.
    "mixed_versions": "train",
    # The recorded logprobs are not those of the distribution that was sampled from.
    "structured_output_masked": "train",
    "top_p_active": "train",
    "temperature_not_one": "train",
    # The engine failed, and the agent went on.
    "engine_error_seen": "train",
}


def action(flag: str) -> Action:
    """The default action of `flag`; an unknown flag is dropped, since nothing is known about it."""
    return ACTIONS.get(flag, "drop")


def worst(flags: Iterable[str]) -> Action:
    """The strictest action among those of `flags` ("train" for none)."""
    actions = {action(flag) for flag in flags}
    return "drop" if "drop" in actions else "mask" if "mask" in actions else "train"
