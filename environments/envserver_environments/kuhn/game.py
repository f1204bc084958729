"""The rules of Kuhn poker, and how far a strategy is from its equilibrium. Pure.

Three cards, J < Q < K; each player pays one chip and gets one card. Player 0 begins; `pass` checks
or folds, `bet` adds one chip or calls:

    pass pass         showdown for 1
    pass bet pass     player 1 wins 1        pass bet bet   showdown for 2
    bet pass          player 0 wins 1        bet bet        showdown for 2

Source: H. W. Kuhn, "A simplified two-person poker" (1950). In equilibrium player 0 wins -1/18 a
game; player 0 bets J with any probability a in [0, 1/3], K with 3a, and never Q.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

Action = Literal["pass", "bet"]
Spot = tuple[str, str]
"""A player's information: their card, and the first letters of the actions so far."""
Strategy = Mapping[Spot, float]
"""The probability of `bet` at each spot of both players."""

CARDS = "JQK"
ACTIONS: tuple[Action, ...] = ("pass", "bet")
DEALS = list(itertools.permutations(CARDS, 2))
ENDED = ("pp", "bp", "bb", "pbp", "pbb")
SPOTS: list[Spot] = [(card, history) for history in ("", "pb", "p", "b") for card in CARDS]
VALUE = -1 / 18
"""Expected win of player 0 in equilibrium, in chips per game."""


def to_move(history: str) -> int:
    return len(history) % 2


def won(cards: Sequence[str], history: str) -> int:
    """Returns the chips that player 0 wins (player 1 loses them) in a game that has ended."""
    if history in ("bp", "pbp"):  # the last to act folds
        return 1 if history == "bp" else -1
    pot = 2 if history.endswith("bb") else 1
    return pot if CARDS.index(cards[0]) > CARDS.index(cards[1]) else -pot


def value(first: Strategy, second: Strategy) -> float:
    """Returns what player 0 wins on average, playing `first` against player 1's `second`."""

    def from_here(cards: tuple[str, str], history: str) -> float:
        if history in ENDED:
            return won(cards, history)
        player = to_move(history)
        bet = (first, second)[player][cards[player], history]
        return bet * from_here(cards, history + "b") + (1 - bet) * from_here(cards, history + "p")

    return sum(from_here(deal, "") for deal in DEALS) / len(DEALS)


def exploitability(strategy: Strategy) -> float:
    """The mean of what a perfect opponent wins in each seat, in chips a game: 0 in an equilibrium
    only, 11/24 for a strategy that always tosses a coin."""
    first = _best(lambda answer: value(answer, strategy), _spots_of(0), strategy)
    second = _best(lambda answer: -value(strategy, answer), _spots_of(1), strategy)
    return (first + second) / 2


def equilibrium(a: float = 1 / 3) -> dict[Spot, float]:
    return {
        ("J", ""): a, ("Q", ""): 0.0, ("K", ""): 3 * a,
        ("J", "pb"): 0.0, ("Q", "pb"): a + 1 / 3, ("K", "pb"): 1.0,
        ("J", "p"): 1 / 3, ("Q", "p"): 0.0, ("K", "p"): 1.0,
        ("J", "b"): 0.0, ("Q", "b"): 1 / 3, ("K", "b"): 1.0,
    }  # fmt: skip


def _spots_of(player: int) -> list[Spot]:
    return [spot for spot in SPOTS if to_move(spot[1]) == player]


def _best(wins: Callable[[Strategy], float], spots: list[Spot], other: Strategy) -> float:
    """Returns the most that a pure strategy at `spots` wins: there are only 64 of them."""
    choices = itertools.product((0.0, 1.0), repeat=len(spots))
    return max(wins({**other, **dict(zip(spots, choice, strict=True))}) for choice in choices)


def strategy_of(outputs: Iterable[Any]) -> dict[Spot, float]:
    """How often the players of `outputs` (of rollouts) bet at each spot, by the rule of succession,
    `(bets + 1) / (seen + 2)`: 1/2 for a spot that was never reached."""
    seen: Counter[Spot] = Counter()
    bets: Counter[Spot] = Counter()
    for output in outputs:
        for card, history, action in output["moves"]:
            seen[card, history] += action is not None
            bets[card, history] += action == "bet"
    return {spot: (bets[spot] + 1) / (seen[spot] + 2) for spot in SPOTS}


def outputs_in(path: Path) -> Iterator[Any]:
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            yield from (rollout["output"] for rollout in json.loads(line)["envserver"]["rollouts"])


def main(words: Sequence[str]) -> int:
    for word in words:
        outputs = list(outputs_in(Path(word)))
        found = exploitability(strategy_of(outputs))
        sys.stdout.write(f"{word}: {found:.3f} chips a game, from {len(outputs)} games\n")
    return 0
