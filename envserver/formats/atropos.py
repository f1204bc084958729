"""Converts a group to a scored data group of Atropos: a dict with its 14 keys, ready for JSON.

A trajectory gives one row per sequence, each with the reward of its agent; a trajectory without
tokens gives one row of text. `masks` has the token id where a row is trained and `NOT_TRAINED`
elsewhere, `inference_logprobs` the sampled logprob there and `NO_LOGPROB` elsewhere."""

from __future__ import annotations

import base64
import math
from typing import Any, Final, Literal

import msgspec
import numpy as np
from envserver_records.experts import table_to_text
from envserver_records.records import Group, Message, Sequence, Trajectory
from envserver_records.returns import Earned, token_advantages, turn_advantages
from envserver_records.tasks import RewardRange

NOT_TRAINED: Final = -100
"""Value in `masks`: this token is not trained."""
NO_LOGPROB: Final = 1.0
"""Value in `inference_logprobs`: this token was not sampled."""

ScoreRange = Literal["unit", "pm1"]


def group_to_atropos(
    group: Group, *, include_messages: bool, score_range: ScoreRange = "unit"
) -> dict[str, Any]:
    """Returns `group` as the Atropos routes and JSONL files show it.

    Trajectories without a reward are left out: they are never trained on. `overrides` tells
    trainers not to learn from truncated trajectories and from rows without a share of the reward;
    it is None if there are none. `advantages` has a value for each token if turns have rewards or
    rows share theirs: that of the turn's own return, undiscounted, within its agent
    (`returns.turn_advantages`), times the row's share; else it is None, and `scores` say all.
    `images` says which tokens of each row stand for which image: {"sha256", "offset", "length",
    "grid"}; `image_data` has the bytes.

    Args:
        score_range: "unit" leaves rewards as they are, "pm1" maps the environment's range to [-1,
            1].
    """
    rows = _rows_of(group)
    return {
        "tokens": [sequence.tokens.tolist() for _, sequence in rows],
        "masks": [_masks(sequence) for _, sequence in rows],
        "scores": [
            score_in_range(
                trajectory.score.of_agent(sequence.agent) or 0.0, score_range, group.reward_range
            )
            for trajectory, sequence in rows
        ],
        "advantages": _advantages(group, rows),
        "ref_logprobs": None,
        "messages": [list(conversation_of(trajectory, row.agent)) for trajectory, row in rows]
        if include_messages
        else None,
        "generation_params": _generation_params(group, [sequence for _, sequence in rows]),
        "inference_logprobs": [_logprobs(sequence) for _, sequence in rows],
        "overrides": _overrides(rows),
        "group_overrides": None,
        "images": _images([sequence for _, sequence in rows]),
        "env_id": None,
        "distill_token_ids": None,
        "distill_logprobs": None,
    }


def _rows_of(group: Group) -> list[tuple[Trajectory, Sequence]]:
    return [
        (trajectory, sequence)
        for trajectory in group.trajectories
        if trajectory.score.reward is not None
        for sequence in trajectory.sequences or [_text_only()]
    ]


def expert_rows(group: Group) -> list[str | None] | None:
    """Returns the routed experts of each row of `group_to_atropos`, as `table_to_text`
    writes them."""
    found = [sequence.experts for _, sequence in _rows_of(group)]
    if not any(found):
        return None
    return [None if experts is None else table_to_text(experts.table) for experts in found]


def _generation_params(group: Group, rows: list[Sequence]) -> dict[str, Any] | None:
    """Returns the settings of all rollouts; under `sampling` a row's spans, as [start, end,
    temperature, logprobs, altered], if any token was not sampled at temperature 1 and unfiltered.
    """
    params: dict[str, Any] = dict(group.generation_params)
    if not all(span.is_plain for row in rows for span in row.sampling):
        params["sampling"] = msgspec.to_builtins([row.sampling for row in rows])
    return params or None


def _images(rows: list[Sequence]) -> list[list[dict[str, Any]]] | None:
    if not any(row.images for row in rows):
        return None
    return [[msgspec.structs.asdict(image) for image in row.images] for row in rows]


def image_data(group: Group) -> dict[str, str]:
    """Returns the bytes of a group's images in base64, by their SHA-256."""
    return {name: base64.b64encode(data).decode() for name, data in group.images.items()}


def conversation_of(trajectory: Trajectory, agent: str | None) -> list[Message]:
    """Returns the last conversation of `agent`: one of `others`, else that of the trajectory."""
    others = (other.messages for other in trajectory.others if other.agent == agent)
    return next(others, trajectory.messages)


def score_in_range(reward: float, score_range: ScoreRange, bounds: RewardRange) -> float:
    """Returns a reward within `bounds` as a score in `score_range`; unchanged if they are not
    finite."""
    width = bounds.high - bounds.low
    if score_range == "unit" or not math.isfinite(width):
        return float(reward)
    return 2.0 * (reward - bounds.low) / width - 1.0


def _advantages(group: Group, rows: list[tuple[Trajectory, Sequence]]) -> list[list[float]] | None:
    if not any(trajectory.score.turns or row.share < 1 for trajectory, row in rows):
        return None
    trajectories = [
        trajectory for trajectory in group.trajectories if trajectory.score.reward is not None
    ]
    found: dict[tuple[str, str | None], dict[int, float]] = {}
    for agent in dict.fromkeys(sequence.agent for _, sequence in rows):
        earned = [_earned(trajectory, agent) for trajectory in trajectories]
        for rollout, by_call in zip(trajectories, turn_advantages(earned), strict=True):
            found[rollout.rollout_id, agent] = by_call
    return [
        (
            row.share * token_advantages(row.calls, found[rollout.rollout_id, row.agent], 0.0)
        ).tolist()
        for rollout, row in rows
    ]


def _earned(trajectory: Trajectory, agent: str | None) -> Earned:
    score = trajectory.score
    turns = trajectory.agent_calls.get(agent or "", [])
    return Earned(score.of_agent(agent) or 0.0, turns, score.call_rewards(agent))


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
    masks: list[int] = np.where(sequence.mask, sequence.tokens, NOT_TRAINED).tolist()
    return masks


def _logprobs(sequence: Sequence) -> list[float]:
    logprobs: list[float] = np.where(
        sequence.mask, sequence.logprobs, np.float32(NO_LOGPROB)
    ).tolist()
    return logprobs


def _overrides(rows: list[tuple[Trajectory, Sequence]]) -> list[dict[str, Any]] | None:
    untaught = [trajectory.truncated or not row.share for trajectory, row in rows]
    return (
        [{"set_advantage_to_zero": True} if each else {} for each in untaught]
        if any(untaught)
        else None
    )
