"""What is known of Gymnasium's own text environments, by name without version."""

from __future__ import annotations

from typing import NamedTuple


class Known(NamedTuple):
    """Rules for the model, names of the actions in order, lowest and highest return."""

    rules: str = ""
    actions: tuple[str, ...] = ()
    returns: tuple[float, float] = (0.0, 1.0)


_LAKE = Known(
    "Walk over a frozen lake from S to G. F is ice, H a hole that ends the walk. You are where the "
    "map is <on-red>.",
    ("left", "down", "right", "up"),
)
KNOWN = {
    "FrozenLake": _LAKE,
    "FrozenLake8x8": _LAKE,
    "Taxi": Known(
        "Drive the taxi to the passenger (the <blue> letter), pick them up, drive to their goal "
        "(the <magenta> letter) and drop them off. The taxi is <on-yellow>, with the passenger in "
        "it <on-green>. | is a wall, : is none. Each step costs 1, a wrong pickup or dropoff 10.",
        ("south", "north", "east", "west", "pickup", "dropoff"),
        (-200.0, 20.0),
    ),
    "CliffWalking": Known(
        "Walk from your place (x) to T in few steps. C is a cliff: it costs 100 and you start "
        "again.",
        ("up", "right", "down", "left"),
        (-100.0, -13.0),
    ),
    "Blackjack": Known(
        "Blackjack. You see your sum, the dealer's card, and whether you have a usable ace.",
        ("stick", "hit"),
        (-1.0, 1.0),
    ),
}
KNOWN["CliffWalkingSlippery"] = KNOWN["CliffWalking"]
