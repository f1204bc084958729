"""Records of finished rollouts."""

from typing import Any

import numpy as np
from envserver_records.records import Json, Score, Sequence, Trajectory, Usage


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
    facts: Json = {
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
