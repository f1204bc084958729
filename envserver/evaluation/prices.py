"""Prices per million tokens, and where they are found.

In: a YAML file `model: {prompt: 0.15, completion: 0.6}`, in the reader's currency. Out: `Prices`,
or nothing: a cost is shown only where somebody gave a price.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

import msgspec
import yaml
from envserver_records.errors import ConfigError, InputError

MILLION = 1_000_000


class Prices(msgspec.Struct, frozen=True, kw_only=True):
    """The prices of a model.

    Args:
        prompt, completion: price of a million tokens each.
        source: where the price comes from.
    """

    prompt: float
    completion: float
    currency: str = "USD"
    source: str = ""

    def __post_init__(self) -> None:
        if not (0 <= self.prompt < float("inf") and 0 <= self.completion < float("inf")):
            raise ConfigError("A price must be a number from 0 on.")

    def cost(self, prompt_tokens: int, completion_tokens: int) -> float:
        """Returns the cost of these tokens."""
        spent = prompt_tokens * self.prompt + completion_tokens * self.completion
        return spent / MILLION


def read_prices(path: Path, model: str, *, currency: str) -> Prices:
    """Reads the prices of `model` from a file.

    Raises:
        InputError: the file is not a list of prices.
        ConfigError: it has no price for this model.
    """
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InputError(f"{path} cannot be read: {error}.", place=str(path)) from error
    if not isinstance(tree, dict):
        raise InputError(f"{path} is not a mapping of models to prices.", place=str(path))
    if model not in tree:
        near = difflib.get_close_matches(model, map(str, tree), n=1, cutoff=0.5)
        raise ConfigError(
            f"{path} has no prices of {model!r}.",
            hint=f"Did you mean {near[0]!r}?" if near else f"It has: {', '.join(map(str, tree))}.",
        )
    return _prices(tree[model], f"{path}, {model}", str(path), currency)


def _prices(said: Any, place: str, source: str, currency: str) -> Prices:
    names = {"prompt", "completion"}
    right = isinstance(said, dict) and set(said) == names
    if not right or not all(isinstance(one, (int, float)) for one in said.values()):
        raise InputError(
            f"{place}: prices are written {{prompt: 0.15, completion: 0.6}}, per million tokens.",
            place=place,
        )
    return Prices(
        prompt=said["prompt"], completion=said["completion"], currency=currency, source=source
    )
