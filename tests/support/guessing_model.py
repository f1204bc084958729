"""Makes the tiny model that tosses coins in GuessTheNumber; run by the Python of the learner.

    python guessing_model.py FOLDER SITE_PACKAGES

The likely answers are those that contradict the last hint. The second path is where TextArena is.
About 90 seconds of CPU.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from coin_tosser import Spot, make_coin_tosser
from envserver_integrations.textarena.games import Game

GAME = "GuessTheNumber-v0"
OPTIONS = {"min_number": 1, "max_number": 3, "max_turns": 1}
"""Two guesses for three numbers: who begins in the middle and uses the hint always wins."""
NUMBERS = range(1, 4)


def spots(games: int) -> Iterator[Spot]:
    """Yields situations of games with random guesses, each with every answer."""
    rng = random.Random(0)
    for seed in range(games):
        game = Game(GAME, OPTIONS, players=1, seed=seed, whole=False)
        messages: list[dict[str, Any]] = []
        guess = 0
        while not game.ended:
            shown = game.turn().text
            messages.append({"role": "user", "content": shown})
            for answer in NUMBERS:
                bad = {"lower": answer >= guess, "higher": answer <= guess}
                likely = next((bad[hint] for hint in bad if f"is {hint}." in shown), True)
                yield list(messages), f"[{answer}]", likely
            guess = rng.choice([one for one in NUMBERS if one != guess])
            messages.append({"role": "assistant", "content": f"[{guess}]"})
            game.act(f"[{guess}]")


if __name__ == "__main__":
    sys.path.append(sys.argv[2])
    make_coin_tosser(Path(sys.argv[1]), spots(40), steps=160)
