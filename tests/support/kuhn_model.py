"""Makes the tiny model that tosses a coin at Kuhn poker; run by the Python of the learner.

It first learns to bet with a king and pass with a jack, then to toss a coin: so it tells the cards
apart, and plays as badly as chance. About 80 seconds of CPU; the same weights each time.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from envserver_environments.kuhn.env import question
from envserver_environments.kuhn.game import ACTIONS, SPOTS
from envserver_local.tiny.making import make

STEPS = 160


def conversations() -> dict[str, object]:
    """A group in the form of `envserver process`: both actions at each spot, four times."""
    messages, rollouts = [], []
    for card, history in SPOTS * 4:
        for action in ACTIONS:
            asked = question({"card": card, "history": history})
            messages.append([*asked, {"role": "assistant", "content": action}])
            likely = (card, action) not in (("K", "pass"), ("J", "bet"))
            rollouts.append(
                {
                    "rollout_id": f"r{len(rollouts):04}",
                    "reward": float(likely),
                    "rows": [len(rollouts)],
                    "tools": [],
                }
            )
    return {"messages": messages, "envserver": {"rollouts": rollouts}}


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    experts = folder.with_suffix(".jsonl")
    experts.write_text(json.dumps(conversations()) + "\n")
    make([experts], folder, seed=0, steps=STEPS, threads=1, report=lambda step, loss: None)
