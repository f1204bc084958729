"""Trajectories as prompts and completions, the form that most trainers want.

In: the training sequences of a trajectory. Out: for each, what the model was given and what follows
its first trained token. What holds: prompt and completion together are the sequence's tokens, no id
is made anew; mask, logprobs and versions have the completion's length, and logprobs are 0 where the
mask is.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from envserver_records import Sequence, Trajectory


@dataclass(frozen=True)
class Completion:
    """One sequence, parted before its first trained token.

    Args:
        prompt_ids, completion_ids: tokens, as the engine had and sampled them.
        mask: of the completion: 1 the policy sampled it and it is trained, 0 it is context (what a
            tool or a user said meanwhile).
        logprobs: of the completion; 0.0 where mask is 0.
        versions: of the completion: the policy version that sampled each token, -1 for context.
    """

    prompt_ids: list[int]
    completion_ids: list[int]
    mask: list[int]
    logprobs: list[float]
    versions: list[int]


def completion_of(sequence: Sequence) -> Completion | None:
    """`sequence` as prompt and completion; None when no token of it is trained.

    What follows the last trained token (a tool's last word) is left out: nothing is learned there.
    """
    trained = np.flatnonzero(sequence.mask)
    if not trained.size:
        return None
    first, end = int(trained[0]), int(trained[-1]) + 1
    tokens: list[int] = sequence.tokens.tolist()
    return Completion(
        prompt_ids=tokens[:first],
        completion_ids=tokens[first:end],
        mask=sequence.mask[first:end].tolist(),
        logprobs=sequence.logprobs[first:end].tolist(),
        versions=sequence.versions[first:end].tolist(),
    )


def completions_of(trajectory: Trajectory) -> list[Completion]:
    """All of a trajectory, in its order: one, unless its agent changed or forked its history."""
    found = (completion_of(sequence) for sequence in trajectory.sequences)
    return [one for one in found if one is not None]
