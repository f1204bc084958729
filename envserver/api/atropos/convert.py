"""A group of ours as a group of the Atropos wire: the same rows, under the names and conventions
there.

In: `records.Group`. Out: a dict with the 14 keys of that wire, all JSON-like. One row per sequence,
with the reward of its trajectory; one without tokens for a trajectory of which only text is known.
What holds: `masks` is the token id where the row is trained and -100 elsewhere,
`inference_logprobs` the sampled logprob there and 1.0 elsewhere.
"""

from __future__ import annotations

from typing import Any, Final, Literal

import numpy as np
from envserver_records.records import Group, Sequence, Trajectory

_NOT_TRAINED: Final = -100
_NO_LOGPROB: Final = np.float32(1.0)


def group_to_atropos(
    group: Group, *, include_messages: bool, score_range: Literal["unit", "pm1"] = "unit"
) -> dict[str, Any]:
    """`group` for the Atropos wire and for JSONL.

    Args:
        include_messages: give each row the conversation of its trajectory.
        score_range: rewards as [0, 1] (unit) or mapped to [-1, 1] (pm1).

    Trajectories without a reward are left out: they are never trained on. `overrides` tells
    trainers not to learn from trajectories that were cut off; it is None when none was.
    """
    rows = [
        (trajectory, sequence)
        for trajectory in group.trajectories
        if trajectory.score.reward is not None
        for sequence in trajectory.sequences or [_text_only()]
    ]
    return {
        "tokens": [sequence.tokens.tolist() for _, sequence in rows],
        "masks": [_masks(sequence) for _, sequence in rows],
        "scores": [_score(trajectory, score_range) for trajectory, _ in rows],
        "advantages": None,
        "ref_logprobs": None,
        "messages": [list(t.messages) for t, _ in rows] if include_messages else None,
        "generation_params": dict(group.generation_params) or None,
        "inference_logprobs": [_logprobs(sequence) for _, sequence in rows],
        "overrides": _overrides([trajectory for trajectory, _ in rows]),
        "group_overrides": None,
        "images": None,
        "env_id": None,
        "distill_token_ids": None,
        "distill_logprobs": None,
    }


def _text_only() -> Sequence:
    none = np.empty(0, np.int32)
    return Sequence(
        tokens=none,
        mask=np.empty(0, np.uint8),
        logprobs=np.empty(0, np.float32),
        calls=none,
        versions=none,
        path=[],
    )


def _masks(sequence: Sequence) -> list[int]:
    masks: list[int] = np.where(sequence.mask, sequence.tokens, _NOT_TRAINED).tolist()
    return masks


def _logprobs(sequence: Sequence) -> list[float]:
    logprobs: list[float] = np.where(sequence.mask, sequence.logprobs, _NO_LOGPROB).tolist()
    return logprobs


def _score(trajectory: Trajectory, score_range: str) -> float:
    reward = float(trajectory.score.reward or 0.0)
    return 2.0 * reward - 1.0 if score_range == "pm1" else reward


def _overrides(trajectories: list[Trajectory]) -> list[dict[str, Any]] | None:
    if not any(trajectory.truncated for trajectory in trajectories):
        return None
    return [{"set_advantage_to_zero": True} if t.truncated else {} for t in trajectories]
