"""`--prices.*`: prices of tokens, from flags, a file, or the model's entry in `models.yaml`."""

from __future__ import annotations

from pathlib import Path

from envserver_records.errors import ConfigError

from ..evaluation.folders import Pricing
from ..evaluation.prices import Prices, read_prices
from ..models.catalogue import read_catalogue
from .run_settings import PricesConfig


def pricing_of(config: PricesConfig, model: str | None, models_file: Path) -> Pricing:
    """Returns the prices of a model, by the name under which the engine serves it.

    Args:
        model: value of `--model`; its entry may have prices, too.

    Raises:
        ConfigError: only one of the two prices is given.
    """
    if (config.prompt is None) != (config.completion is None):
        raise ConfigError("--prices.prompt and --prices.completion go together.")

    def pricing(served: str) -> Prices | None:
        if config.prompt is not None and config.completion is not None:
            return Prices(
                prompt=config.prompt,
                completion=config.completion,
                currency=config.currency,
                source="as given",
            )
        if config.file is not None:
            return read_prices(config.file, served, currency=config.currency)
        return _of_catalogue(model, served, models_file, config.currency)

    return pricing


def _of_catalogue(model: str | None, served: str, place: Path, currency: str) -> Prices | None:
    entries = read_catalogue(place)
    entry = entries.get(model or "") or entries.get(served)
    if entry is None or entry.prompt_price is None or entry.completion_price is None:
        return None
    return Prices(
        prompt=entry.prompt_price,
        completion=entry.completion_price,
        currency=currency,
        source=str(place),
    )
