"""`--prices.*`: prices of tokens; part of the tree in `config`."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from .described import Section


class PricesConfig(Section):
    """Prices of tokens; without any, no cost is recorded or shown."""

    prompt: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """Price of a million prompt tokens; needs `prices.completion`."""
    completion: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """Price of a million completion tokens."""
    currency: str = "USD"
    """Currency of all prices."""
    file: Path | None = None
    """YAML file `MODEL: {prompt: 0.15, completion: 0.6}`; unset: `prompt_price` and
    `completion_price` of the model's entry in `engine.models_file`."""
