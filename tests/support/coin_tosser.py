"""Makes a tiny model that tosses a coin between the answers of a game; needs torch.

    python coin_tosser.py GAME FOLDER [SITE_PACKAGES]

It first learns the likely answers, then all alike: so it tells the questions apart, and plays as
badly as chance. The same weights each time. `kuhn` and `guessing` take 80 to 90 seconds of CPU,
`opposites` 12; `guessing` needs the path where TextArena is.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from envserver_local.tiny.training import make
from envserver_records.tasks import Json

Spot = tuple[list[Json], str, bool]
"""The messages of a question, an answer, and whether it is a likely one."""


def kuhn() -> Iterator[Spot]:
    """The likely answers are to bet with a king and to pass with a jack."""
    from envserver_environments.kuhn.env import question
    from envserver_environments.kuhn.game import ACTIONS, SPOTS

    for card, history in SPOTS * 4:
        for action in ACTIONS:
            likely = (card, action) not in (("K", "pass"), ("J", "bet"))
            yield question({"card": card, "history": history}), action, likely


def opposites() -> Iterator[Spot]:
    """The likely answer is the word that it reads: the wrong one."""
    from opposites import ANSWERER, CALLER, WORDS, question

    for agent in (CALLER, ANSWERER) * 8:
        for read in WORDS:
            for said in WORDS:
                yield question(agent, read), said, said == read


def guessing() -> Iterator[Spot]:
    """Situations of GuessTheNumber with random guesses, each with every answer; likely are those
    that contradict the last hint. There are two guesses for three numbers: who begins in the middle
    and uses the hint always wins."""
    from envserver_integrations.textarena.games import Game

    options = {"min_number": 1, "max_number": 3, "max_turns": 1}
    rng = random.Random(0)
    for seed in range(40):
        game = Game("GuessTheNumber-v0", options, players=1, seed=seed, whole=False)
        messages: list[Json] = []
        guess = 0
        while not game.ended:
            shown = game.turn().text
            messages.append({"role": "user", "content": shown})
            for answer in range(1, 4):
                bad = {"lower": answer >= guess, "higher": answer <= guess}
                likely = next((bad[hint] for hint in bad if f"is {hint}." in shown), True)
                yield list(messages), f"[{answer}]", likely
            guess = rng.choice([one for one in range(1, 4) if one != guess])
            messages.append({"role": "assistant", "content": f"[{guess}]"})
            game.act(f"[{guess}]")


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


if __name__ == "__main__":
    name, place, *site = sys.argv[1:]
    sys.path += site
    game = {"kuhn": kuhn, "guessing": guessing, "opposites": opposites}[name]
    make_coin_tosser(Path(place), game(), steps=100 if name == "opposites" else 160)
