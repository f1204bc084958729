"""Lines as `envserver process` writes them, made without any rollout."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import orjson

NOT_TRAINED = -100


def line(
    number: int,
    rewards: Sequence[float | None] = (0.0, 1.0),
    *,
    env: str = "math",
    answers: Sequence[str] | None = None,
    **facts: Any,
) -> dict[str, Any]:
    """Group `number`, a rollout for each reward; `answers` are what the model said in each, `facts`
    go to every rollout."""
    said = answers or [f"It is {number}, says the {which}." for which in range(len(rewards))]
    question = f"What is {number} of {env}?"
    tokens = [[1, 2, number % 1000 + 3, *range(10, 10 + len(one.split()))] for one in said]
    context = [NOT_TRAINED] * 3
    group_id = f"{env}-train-0-{number:06d}"
    return {
        "tokens": tokens,
        "masks": [[*context, *row[3:]] for row in tokens],
        "scores": [reward or 0.0 for reward in rewards],
        "advantages": None,
        "messages": [
            [{"role": "user", "content": question}, {"role": "assistant", "content": one}]
            for one in said
        ],
        "generation_params": {"temperature": 1.0},
        "inference_logprobs": [[1.0] * 3 + [-0.5] * (len(row) - 3) for row in tokens],
        "overrides": None,
        "envserver": {
            "schema_version": 1,
            "group_id": group_id,
            "index": number,
            "env": env,
            "task_id": f"{env}-{number:06d}",
            "split": "train",
            "seed": 0,
            "model": "maker/model-1",
            "policy_version": 3,
            "created_at": 1_700_000_000.0 + number,
            "rollouts": [
                {
                    "rollout_id": f"{group_id}-r{which}",
                    "attempt": 1,
                    "rows": [which],
                    "reward": reward,
                    "components": {"right": reward or 0.0},
                    "output": said[which],
                    "turns": 1,
                    "flags": [],
                    "tools": [],
                    "usage": {"seconds": 2.0, "completion_tokens": len(tokens[which]) - 3},
                    **facts,
                }
                for which, reward in enumerate(rewards)
            ],
            "failures": [],
            "asked": len(rewards),
            "lost": {},
        },
    }


def write_lines(path: Path, lines: Iterable[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        for one in lines:
            file.write(orjson.dumps(one, option=orjson.OPT_APPEND_NEWLINE))
    return path
