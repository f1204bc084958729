"""Rewards from the values of Inspect's scorers.

    "C" 1, "P" 0.5, "I" and "N" 0, true 1, false 0, "yes"/"true" 1, "no"/"false" 0
    a number, or a string that is one: itself
    a dict or list: one value per entry, SCORER/KEY
    NaN or None: Inspect's "unscored"

`--env.lowest_value` to `--env.highest_value` become 0 to 1. The reward is the mean of the values by
`--env.weights`; without weights, the one scorer's value, and of a dict or list the mean.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from envserver import ConfigError, Score

_WORDS = {"C": 1.0, "P": 0.5, "I": 0.0, "N": 0.0}
_YES_NO = {"yes": 1.0, "true": 1.0, "no": 0.0, "false": 0.0}


def as_score(
    values: Mapping[str, Any], weights: Mapping[str, float], bounds: tuple[float, float]
) -> Score:
    """Returns the score of a rollout; without a reward if Inspect left it unscored.

    Args:
        values: of each scorer, by name; None: it gave no score.
        weights: by SCORER or SCORER/KEY; empty: there is one scorer.
        bounds: values that become 0 and 1.
    """
    parts = {name: _parts(name, value, bounds) for name, value in values.items()}
    components = {each: number for part in parts.values() for each, number in part.items()}
    means = {name: sum(part.values()) / len(part) for name, part in parts.items() if part}
    weights = weights or dict.fromkeys(values, 1.0)
    known = {**means, **components}
    unknown = [name for name in weights if name not in known]
    if unknown:
        raise ConfigError(
            f"--env.weights names {', '.join(unknown)}, which no scorer of the task gave.",
            hint=f"There are: {', '.join(known)}.",
        )
    reward = math.fsum(known[name] * weight for name, weight in weights.items())
    reward /= math.fsum(weights.values())
    numbers = {name: number for name, number in components.items() if not math.isnan(number)}
    return Score(reward=None if math.isnan(reward) else reward, components=numbers)


def _parts(name: str, value: Any, bounds: tuple[float, float]) -> dict[str, float]:
    """Returns the numbers of a value, by the names of their components."""
    if isinstance(value, Mapping):
        named = {f"{name}/{key}": one for key, one in value.items()}
        return {each: _number(each, one, bounds) for each, one in named.items()}
    if isinstance(value, list | tuple):
        return _parts(name, dict(enumerate(value)), bounds)
    return {name: _number(name, value, bounds)}


def _number(name: str, value: Any, bounds: tuple[float, float]) -> float:
    if value is None:
        return math.nan
    if isinstance(value, bool):
        return float(value)
    if isinstance(value, str):
        if (word := _WORDS.get(value, _YES_NO.get(value.lower()))) is not None:
            return word
        try:
            value = float(value)
        except ValueError:
            message = f"The scorer {name} gave {value[:80]!r}, which is not a number."
            raise ConfigError(message) from None
    if not isinstance(value, int | float):
        raise ConfigError(f"The scorer {name} gave a {type(value).__name__}.")
    if math.isnan(value):
        return math.nan
    low, high = bounds
    if not low <= value <= high:
        raise ConfigError(
            f"The scorer {name} gave {value:g}, which is not between {low:g} and {high:g}.",
            hint="--env.lowest_value and --env.highest_value say which there are.",
        )
    return (float(value) - low) / (high - low)
