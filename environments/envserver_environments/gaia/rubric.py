"""Computes the reward from facts about a rollout: first correctness, then how it was reached.

Pure. In: whether the answer is right, counts made by the proxy (model calls, sampled tokens), and
typed outcomes of the agent's steps; never the text of a message or a page. Always:

- every right answer has a higher reward than every wrong one, whatever else happened;
- for a wrong one neither steps nor tokens count: giving up and stalling pay nothing;
- the reward never grows with steps, tokens, unusable messages or errors;
- an item of weight 0 changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field, model_validator

LEAST = -0.1
MOST_OF_ALL_WEIGHTS = 0.5


class Weights(BaseModel):
    """Deductions for each item."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    steps: float = Field(default=0.05, ge=0)
    """Penalty for a correct answer that used all model calls."""
    tokens: float = Field(default=0.05, ge=0)
    """Penalty for a correct answer that used all tokens."""
    format: float = Field(default=0.05, ge=0)
    """Penalty if no step could be parsed (unusable messages, invalid tool calls)."""
    errors: float = Field(default=0.05, ge=0)
    """Penalty if every step ended in a code or tool error."""
    ungrounded: float = Field(default=0.0, ge=0)
    """Penalty for a correct answer that appeared in no observation."""
    free_share: float = Field(default=0.25, ge=0, lt=1)
    """Share of calls and tokens without a penalty."""
    free_errors: int = Field(default=2, ge=0)
    """Number of code and tool errors without a penalty."""

    @model_validator(mode="after")
    def _right_beats_wrong(self) -> Weights:
        total = self.steps + self.tokens + self.format + self.errors + self.ungrounded
        if total > MOST_OF_ALL_WEIGHTS:
            raise ValueError(f"the weights add up to {total:g}, over {MOST_OF_ALL_WEIGHTS}")
        return self


@dataclass(frozen=True)
class Facts:
    """Facts about a rollout.

    Args:
        turns, tokens: the proxy's counts, and their limits.
        steps: of the agent; `malformed` and `failed` count those that could not be read, or raised.
        grounded: the answer occurred in an observation.
    """

    correct: bool
    turns: int = 0
    turn_limit: int = 1
    tokens: int = 0
    token_limit: int = 1
    steps: int = 0
    malformed: int = 0
    failed: int = 0
    grounded: bool = True


@dataclass(frozen=True)
class Items:
    """The value of each item, in [0, 1]; 0 is best for all but `correct`."""

    correct: float
    steps: float
    tokens: float
    format: float
    errors: float
    ungrounded: float


def items(facts: Facts, weights: Weights) -> Items:
    """The items that the weights apply to."""
    return Items(
        correct=float(facts.correct),
        steps=_beyond(facts.turns, facts.turn_limit, weights.free_share),
        tokens=_beyond(facts.tokens, facts.token_limit, weights.free_share),
        format=_share(facts.malformed, facts.steps),
        errors=_share(facts.failed - weights.free_errors, facts.steps),
        ungrounded=float(not facts.grounded),
    )


def fold(found: Items, weights: Weights) -> float:
    """The reward in [-0.1, 1]: right at least 1 less all weights, wrong at most 0."""
    right = found.correct * (
        1.0
        - weights.steps * found.steps
        - weights.tokens * found.tokens
        - weights.ungrounded * found.ungrounded
    )
    reward = right - weights.format * found.format - weights.errors * found.errors
    return min(1.0, max(LEAST, reward))


def _beyond(used: int, limit: int, free: float) -> float:
    """Returns the used share of what exceeds the free amount."""
    allowed = free * limit
    return min(1.0, max(0.0, (used - allowed) / max(limit - allowed, 1.0)))


def _share(part: int, whole: int) -> float:
    return min(1.0, max(0.0, part / max(whole, 1)))
