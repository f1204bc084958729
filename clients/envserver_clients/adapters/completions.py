"""Splits trajectories into prompts and completions, the form that most trainers want.

In: the training sequences of a trajectory. Out: for each, the tokens before its first trained token
and those from there on. What always holds: prompt and completion together are the sequence's tokens
(nothing is tokenised again); mask, logprobs and versions have the completion's length, and logprobs
are 0 where the mask is.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from envserver_records import InputError, Sequence, Trajectory
from envserver_records.experts import Table, row_experts
from envserver_records.images import RowImage, images_of


@dataclass(frozen=True)
class Completion:
    """One sequence, split before its first trained token.

    Args:
        prompt_ids, completion_ids: tokens as the engine received and sampled them.
        mask: per completion token: 1: sampled by the policy and trained, 0: context (the answers of
            tools and users in between).
        logprobs: per completion token; 0.0 where mask is 0.
        versions: per completion token: the policy version that sampled it, -1 for context.
        calls: per completion token: the call that sampled it, -1 for context.
        agent: name of its agent, None if there is only one.
        images: those among all the tokens, in order; their places count from the prompt's begin.
        experts: [N, layers, experts per token], that the engine routed the first N tokens to: all
            tokens but the last. None: not recorded.
    """

    prompt_ids: list[int]
    completion_ids: list[int]
    mask: list[int]
    logprobs: list[float]
    versions: list[int]
    calls: list[int]
    agent: str | None = None
    images: list[RowImage] = field(default_factory=list)
    experts: Table | None = None


def completion_of(sequence: Sequence, images: dict[str, bytes]) -> Completion | None:
    """Splits `sequence`; returns None if none of its tokens is trained.

    Tokens after the last trained one are left out: they teach nothing.

    Args:
        images: bytes by SHA-256, see `Trajectory.images`.
    """
    trained = np.flatnonzero(sequence.mask)
    if not trained.size:
        return None
    first, end = int(trained[0]), int(trained[-1]) + 1
    tokens: list[int] = sequence.tokens.tolist()
    try:
        kept = [span for span in sequence.images if span.end <= end]
        shown = images_of(kept, images, end)
        experts = row_experts(sequence.experts, sequence.mask)
    except ValueError as error:
        raise InputError(f"A row cannot be used: {error}.", place="row") from error
    return Completion(
        prompt_ids=tokens[:first],
        completion_ids=tokens[first:end],
        mask=sequence.mask[first:end].tolist(),
        logprobs=sequence.logprobs[first:end].tolist(),
        versions=sequence.versions[first:end].tolist(),
        calls=sequence.calls[first:end].tolist(),
        agent=sequence.agent,
        images=shown,
        experts=None if experts is None else experts[: end - 1],
    )


def completions_of(trajectory: Trajectory) -> list[Completion]:
    """Splits a trajectory's sequences, in order: one, unless the agent changed its history.
    Raises InputError: the bytes of an image are missing.
    """
    found = (completion_of(sequence, trajectory.images) for sequence in trajectory.sequences)
    return [one for one in found if one is not None]


def check_text_only(completion: Completion, trainer: str) -> Completion:
    """Returns the completion, which `trainer` gets without images.
    Raises InputError: it has images: without them its tokens would mean something else.
    """
    if completion.images:
        raise InputError(
            f"A row has images, and {trainer} gets tokens only from this adapter.",
            hint="verl's adapter passes images on; row.images has their bytes and places.",
            place="images",
        )
    return completion
