"""Gymnasium's spaces as text: observations for the model, and actions from its answers. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

_ESCAPE = re.compile(r"\x1b\[([0-9;]*)m")
_COLOURS = ("black", "red", "green", "yellow", "blue", "magenta", "cyan", "white")


class BadAction(Exception):
    """The answer names no action of the space; the message is for the model."""


def plain(rendered: str) -> str:
    """Returns a terminal's picture with its colours as tags: `<on-red>S</on-red>`."""
    parts: list[str] = []
    opened: list[str] = []
    at = 0
    for found in _ESCAPE.finditer(rendered):
        parts.append(rendered[at : found.start()])
        at = found.end()
        names = [name for code in found[1].split(";") if (name := _colour(code))]
        if not names:  # the end of a colour
            parts += [f"</{name}>" for name in reversed(opened)]
            opened.clear()
        parts += [f"<{name}>" for name in names]
        opened += names
    return "".join([*parts, rendered[at:]]).strip("\n")


def _colour(code: str) -> str | None:
    number = int(code or 0)
    for first, prefix in ((30, ""), (40, "on-"), (90, ""), (100, "on-")):
        if first <= number < first + len(_COLOURS):
            return prefix + _COLOURS[number - first]
    return None


def as_text(observation: Any) -> str:
    """Returns text as it is, and everything else as JSON."""
    if isinstance(observation, str):
        return observation
    return json.dumps(observation, default=_jsonable, ensure_ascii=False)


def _jsonable(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else str(value)


def described(space: Any, names: Sequence[str]) -> str:
    """Returns what the actions of a space are, in words."""
    if names:
        return ", ".join(names)
    if _kind(space) == "Discrete":
        return f"the numbers {space.start} to {space.start + space.n - 1}"
    return "text" if _kind(space) == "Text" else f"JSON, as in {as_text(_sample(space))}"


def example(space: Any, names: Sequence[str]) -> str:
    """Returns one action, as an answer would name it."""
    if names:
        return names[-1]
    return str(space.start) if _kind(space) == "Discrete" else as_text(_sample(space))


def _sample(space: Any) -> Any:
    space.seed(0)
    return space.sample()


def is_discrete(space: Any) -> bool:
    """Whether its actions are numbers, or names that stand for them."""
    return _kind(space) == "Discrete"


def action(space: Any, said: str, names: Sequence[str]) -> Any:
    """Returns the action that `said` names.

    Args:
        names: of the numbers of a discrete space, in order.
    """
    if _kind(space) == "Discrete":
        return _numbered(space, said.strip("[] \t\n.").lower(), [name.lower() for name in names])
    if _kind(space) == "Text":
        found: Any = said
    else:
        try:
            found = _converted(space, json.loads(said))
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            raise BadAction(f"That is not an action in JSON: {str(error)[:200]}") from error
    if not space.contains(found):
        raise BadAction("That is not one of the possible actions.")
    return found


def _numbered(space: Any, said: str, names: list[str]) -> Any:
    if said in names:
        return space.start + names.index(said)
    if re.fullmatch(r"-?[0-9]{1,9}", said) and space.start <= int(said) < space.start + space.n:
        return int(said)
    raise BadAction("That is not one of the possible actions.")


def _converted(space: Any, value: Any) -> Any:
    """Returns a JSON value in the types of a space; the space checks it afterwards."""
    import numpy

    kind = _kind(space)
    if kind == "Dict":
        return {key: _converted(part, value[key]) for key, part in space.spaces.items()}
    if kind == "Tuple":
        return tuple(_converted(part, one) for part, one in zip(space.spaces, value, strict=True))
    if kind == "Discrete":
        return int(value)
    if kind == "Text":
        return value
    return numpy.asarray(value, dtype=space.dtype)


def _kind(space: Any) -> str:
    own = (one for one in type(space).__mro__ if one.__module__.startswith("gymnasium.spaces"))
    return next((one.__name__ for one in own), "")


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
