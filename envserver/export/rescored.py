"""Replaces the scores of a delivered group; its rows stay as they were.

In: the line as JSON and a Score for each of its rollouts. Out: the line with the new scores; each
rollout keeps the old ones as `rescored_from`. A rollout whose new score has no reward is removed
with its rows, as in `process`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from envserver_records.records import Score
from envserver_records.scores import range_from_json

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
    score_range, bounds = _score_range(line), range_from_json(facts.get("reward_range") or {})
    kept_rows: list[int] = []
    new_scores: list[float] = []
    rollouts: list[Json] = []
    for rollout, score in zip(facts["rollouts"], scores, strict=True):
        if score.reward is None:
            continue
        rows = rollout["rows"]
        begin = len(kept_rows)
        kept_rows += rows
        new_scores += [
            score_in_range(score.of_agent(agent) or 0.0, score_range, bounds)
            for agent in _agents(rollout)
        ]
        rollouts.append(_rescored(rollout, score, list(range(begin, len(kept_rows)))))
    if not rollouts:
        return None
    missing = len(facts["rollouts"]) - len(rollouts)
    changed = {key: [line[key][row] for row in kept_rows] for key in _OF_ROWS if line.get(key)}
    lost = dict(facts.get("lost") or {})
    if missing:
        lost["unscorable"] = lost.get("unscorable", 0) + missing
    again = {"by": by, "at": at, "of": (line.get("chain") or {}).get("digest", "")}
    envserver = {**facts, "rollouts": rollouts, "lost": lost, "rescored": again}
    rest = {key: value for key, value in line.items() if key != "chain"}
    return {**rest, **changed, "scores": new_scores, "advantages": None, "envserver": envserver}


def _rescored(rollout: Json, score: Score, rows: list[int]) -> Json:
    before = {name: rollout.get(name) for name in ("reward", "components", "metrics")}
    before |= {name: rollout[name] for name in ("rewards", "turn_rewards") if rollout.get(name)}
    return {
        **rollout,
        "rows": rows,
        "reward": score.reward,
        "components": score.components,
        "metrics": score.metrics,
        "rewards": score.rewards,
        "turn_rewards": [msgspec.structs.asdict(one) for one in score.turns],
        "rescored_from": before,
    }


def _score_range(line: Json) -> ScoreRange:
    """Returns the range of the line's scores; "unit" if all rewards are 1, which fits both."""
    pairs = [
        ((rollout.get("rewards") or {}).get(agent or "", rollout["reward"]), line["scores"][row])
        for rollout in line["envserver"]["rollouts"]
        for row, agent in zip(rollout["rows"], _agents(rollout), strict=True)
        if rollout["reward"] is not None
    ]
    is_unit = all(abs(reward - score) < 1e-6 for reward, score in pairs)
    return "unit" if is_unit else "pm1"


def _agents(rollout: Json) -> list[str | None]:
    """Returns the agent of each row; older files do not name them."""
    agents = list(rollout.get("agents") or [])
    return agents + [None] * (len(rollout["rows"]) - len(agents))


def old_reward(rollout: Mapping[str, Any]) -> float | None:
    """Returns the reward that a rescored rollout had before."""
    before = rollout.get("rescored_from") or {}
    return before.get("reward")
