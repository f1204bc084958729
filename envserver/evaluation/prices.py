"""Reads prices of a million tokens from a YAML file: `model: {prompt: 0.15, completion: 0.6}`."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

import yaml
from envserver_records.costs import Prices
from envserver_records.errors import ConfigError, InputError


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
