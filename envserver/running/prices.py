"""`--prices.*`: prices of tokens, from flags, a file, or the model's entry in `models.yaml`."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from envserver_records.costs import Prices
from envserver_records.errors import ConfigError, InputError

from ..models.catalogue import read_catalogue
from ..rollouts.costs import RolloutPrices
from ..settings.config import PricesConfig, Settings
from ..settings.runs import JudgeConfig
from .engines import SIMULATED
from .judging import judge_prices, prices_of

if TYPE_CHECKING:
    from ..evaluation.folders import Pricing


def pricing_of(config: PricesConfig, model: str | None, models_file: Path) -> Pricing:
    entries = None if config.file is None else _read_entries(config.file)

    def pricing(served: str) -> Prices | None:
        if given := prices_of(config.prompt, config.completion, config.currency, "as given"):
            return given
        if config.file is not None and entries is not None:
            return _prices_in(config.file, entries, served, config.currency)
        return _of_catalogue(model, served, models_file, config.currency)

    return pricing


def rollout_prices(
    settings: Settings,
    model: str,
    agents: Mapping[str, str | None],
    judge_config: JudgeConfig | None,
) -> RolloutPrices:
    config = settings.prices
    place = settings.engine.models_file
    of_run = pricing_of(config, settings.model, place)(model)
    # Prices given as flags are those of the run's model.
    others = config.model_copy(update={"prompt": None, "completion": None})
    of_others = pricing_of(others, None, place)
    known = {
        agent: of_run if own is None else of_others(own)
        for agent, own in (agents or {"": None}).items()
    }
    prices = {agent: found for agent, found in known.items() if found is not None}
    judge = None if judge_config is None else judge_prices(judge_config)
    if prices and judge is not None and judge.currency != config.currency:
        raise ConfigError(
            f"The judge's prices are in {judge.currency}, those of the model in {config.currency}.",
            hint="Set --judge.currency and --prices.currency alike: costs are added up.",
        )
    return RolloutPrices(agents=prices, judge=judge)


def _of_catalogue(model: str | None, served: str, place: Path, currency: str) -> Prices | None:
    if model == SIMULATED:
        return None
    entries = read_catalogue(place)
    entry = entries.get(model or "") or entries.get(served)
    if entry is None:
        return None
    return prices_of(entry.prompt_price, entry.completion_price, currency, str(place))


def _read_entries(path: Path) -> dict[str, Any]:
    import yaml

    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InputError(f"{path} cannot be read: {error}.", place=str(path)) from error
    if not isinstance(tree, dict):
        raise InputError(f"{path} is not a mapping of models to prices.", place=str(path))
    return tree


def _prices_in(path: Path, tree: dict[str, Any], model: str, currency: str) -> Prices | None:
    if model not in tree:
        near = difflib.get_close_matches(model, map(str, tree), n=1, cutoff=0.5)
        raise ConfigError(
            f"{path} has no prices for {model!r}.",
            hint=f"Did you mean {near[0]!r}?" if near else f"It has: {', '.join(map(str, tree))}.",
        )
    prices: Any = tree[model]
    is_valid = isinstance(prices, dict) and set(prices) == {"prompt", "completion"}
    if not is_valid or not all(isinstance(price, (int, float)) for price in prices.values()):
        place = f"{path}, {model}"
        raise InputError(
            f"{place}: prices are written {{prompt: 0.15, completion: 0.6}}, per million tokens.",
            place=place,
        )
    return prices_of(prices["prompt"], prices["completion"], currency, str(path))
