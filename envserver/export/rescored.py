"""Replaces the scores of a delivered group; its rows stay as they were.

In: the line as JSON and a Score for each of its rollouts. Out: the line with the new scores; each
rollout keeps the old ones as `rescored_from`. A rollout whose new score has no reward is removed
with its rows, as in `process`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from envserver_records.records import Score

from ..formats.atropos import ScoreRange, score_in_range

Json = dict[str, Any]

_OF_ROWS = (
    *("tokens", "masks", "scores", "messages", "inference_logprobs", "ref_logprobs", "overrides"),
    *("images", "distill_token_ids", "distill_logprobs"),
)
"""Keys of a line with one entry for each row."""


def rescored_line(line: Json, scores: Sequence[Score], *, by: str, at: float) -> Json | None:
    """Returns `line` with `scores`, one for each rollout in order; None where no rollout is left.

    Advantages are removed: they came from the old scores.

    Args:
        by: name of the scorer.
        at: `time.time()`.
    """
    facts = line["envserver"]
    score_range = _score_range(line)
    kept_rows: list[int] = []
    new_scores: list[float] = []
    rollouts: list[Json] = []
    for rollout, score in zip(facts["rollouts"], scores, strict=True):
        if score.reward is None:
            continue
        rows = rollout["rows"]
        begin = len(kept_rows)
        kept_rows += rows
        new_scores += [score_in_range(score.reward, score_range)] * len(rows)
        rollouts.append(_rescored(rollout, score, list(range(begin, len(kept_rows)))))
    if not rollouts:
        return None
    missing = len(facts["rollouts"]) - len(rollouts)
    changed = {key: [line[key][row] for row in kept_rows] for key in _OF_ROWS if line.get(key)}
    lost = dict(facts.get("lost") or {})
    if missing:
        lost["unscorable"] = lost.get("unscorable", 0) + missing
    envserver = {**facts, "rollouts": rollouts, "lost": lost, "rescored": {"by": by, "at": at}}
    return {**line, **changed, "scores": new_scores, "advantages": None, "envserver": envserver}


def _rescored(rollout: Json, score: Score, rows: list[int]) -> Json:
    names = ("reward", "components", "metrics")
    return {
        **rollout,
        "rows": rows,
        "reward": score.reward,
        "components": score.components,
        "metrics": score.metrics,
        "rescored_from": {name: rollout.get(name) for name in names},
    }


def _score_range(line: Json) -> ScoreRange:
    """Returns the range of the line's scores; "unit" if all rewards are 1, which fits both."""
    pairs = [
        (rollout["reward"], line["scores"][row])
        for rollout in line["envserver"]["rollouts"]
        for row in rollout["rows"]
        if rollout["reward"] is not None
    ]
    is_unit = all(abs(reward - score) < 1e-6 for reward, score in pairs)
    return "unit" if is_unit else "pm1"


def old_reward(rollout: Mapping[str, Any]) -> float | None:
    """Returns the reward that a rescored rollout had before."""
    before = rollout.get("rescored_from") or {}
    return before.get("reward")
