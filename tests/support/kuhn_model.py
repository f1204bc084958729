"""Makes the tiny model that tosses a coin at Kuhn poker; run by the Python of the learner.

The likely answers are to bet with a king and to pass with a jack. About 80 seconds of CPU.
"""

from __future__ import annotations

import sys
from pathlib import Path

from coin_tosser import make_coin_tosser
from envserver_environments.kuhn.env import question
from envserver_environments.kuhn.game import ACTIONS, SPOTS

if __name__ == "__main__":
    spots = [
        (
            question({"card": card, "history": history}),
            action,
            (card, action) not in (("K", "pass"), ("J", "bet")),
        )
        for card, history in SPOTS * 4
        for action in ACTIONS
    ]
    make_coin_tosser(Path(sys.argv[1]), spots, steps=160)
