"""Makes a tiny model that tosses a coin between the answers of a game; needs torch.

It first learns the likely answers, then all alike: so it tells the questions apart, and plays as
badly as chance. The same weights each time.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from envserver_local.tiny.making import make

Spot = tuple[list[dict[str, Any]], str, bool]
"""The messages of a question, an answer, and whether it is a likely one."""


def make_coin_tosser(folder: Path, spots: Iterable[Spot], steps: int) -> None:
    """Writes the model, and beside it what it was taught, in the form of `envserver process`."""
    messages: list[Any] = []
    rollouts: list[Any] = []
    for asked, answer, likely in spots:
        messages.append([*asked, {"role": "assistant", "content": answer}])
        number = len(rollouts)
        rollout = {"rollout_id": f"r{number:04}", "reward": float(likely), "rows": [number]}
        rollouts.append({**rollout, "tools": []})
    experts = folder.with_suffix(".jsonl")
    experts.write_text(json.dumps({"messages": messages, "envserver": {"rollouts": rollouts}}))
    make([experts], folder, seed=0, steps=steps, threads=1, report=lambda step, loss: None)
