"""How far recorded players are from equilibrium: `python -m ... .kuhn exploitability FILE...`."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from .game import SPOTS, Spot, exploitability


def strategy_of(outputs: Iterable[Any]) -> dict[Spot, float]:
    """Returns how often the players of `outputs` (of rollouts) bet at each spot.

    By the rule of succession, `(bets + 1) / (seen + 2)`: 1/2 for a spot that was never reached.
    """
    seen: Counter[Spot] = Counter()
    bets: Counter[Spot] = Counter()
    for output in outputs:
        for card, history, action in output["moves"]:
            seen[card, history] += action is not None
            bets[card, history] += action == "bet"
    return {spot: (bets[spot] + 1) / (seen[spot] + 2) for spot in SPOTS}


def outputs_in(path: Path) -> Iterator[Any]:
    """Yields the outputs of the rollouts in a file of `envserver process`, in order."""
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            yield from (one["output"] for one in json.loads(line)["envserver"]["rollouts"])


def main(words: Sequence[str]) -> int:
    """Prints the exploitability of the players in each file."""
    for word in words:
        outputs = list(outputs_in(Path(word)))
        found = exploitability(strategy_of(outputs))
        sys.stdout.write(f"{word}: {found:.3f} chips a game, from {len(outputs)} games\n")
    return 0
