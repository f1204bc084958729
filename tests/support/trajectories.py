"""Finished rollouts of all shapes, for what maps them: a hypothesis strategy."""

from __future__ import annotations

from typing import Any

import numpy as np
from envserver_records.records import Score, Sequence, Trajectory, Usage
from hypothesis import strategies as st


def sequence(tokens: list[int], mask: list[int], version: int = 3) -> Sequence:
    """A row in which the token at place n was sampled with logprob -(n+1)/8."""
    trained = np.array(mask, np.uint8)
    logprobs = -(np.arange(len(tokens), dtype=np.float32) + 1) / 8
    return Sequence(
        tokens=np.array(tokens, np.int32),
        mask=trained,
        logprobs=np.where(trained, logprobs, np.float32(0)),
        calls=np.where(trained, 0, -1).astype(np.int32),
        versions=np.where(trained, version, -1).astype(np.int32),
        path=[0],
    )


def trajectory(rollout_id: str, *sequences: Sequence, **changes: Any) -> Trajectory:
    """A rollout that left these rows."""
    facts: dict[str, Any] = {
        "rollout_id": rollout_id,
        "attempt": 1,
        "task_id": "t",
        "env": "math",
        "sequences": list(sequences),
        "messages": [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}],
        "tools": [],
        "output": "2",
        "score": Score(reward=0.5),
        "finish_reason": "stop",
        "truncated": False,
        "limit": None,
        "turns": 1,
        "usage": Usage(seconds=2.0, model_seconds=1.5),
    }
    return Trajectory(**(facts | changes))


@st.composite
def sequences(draw: st.DrawFn, *, trained: bool = False) -> Sequence:
    """One row; `trained`: with at least one sampled token."""
    mask = draw(st.lists(st.integers(0, 1), min_size=1, max_size=12))
    if trained:
        mask[draw(st.integers(0, len(mask) - 1))] = 1
    tokens = draw(st.lists(st.integers(0, 99), min_size=len(mask), max_size=len(mask)))
    return sequence(tokens, mask, draw(st.integers(0, 5)))


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    """A rollout with a reward, one trained row at least, and any others."""
    rows = draw(st.lists(sequences(), max_size=2))
    rows.insert(draw(st.integers(0, len(rows))), draw(sequences(trained=True)))
    return trajectory(
        f"rollout-{draw(st.integers(0, 10**6))}",
        *rows,
        score=Score(reward=draw(st.floats(0, 1, width=32))),
        truncated=draw(st.booleans()),
    )
