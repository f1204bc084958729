"""`--prices.*`: prices of tokens, from flags, a file, or the model's entry in `models.yaml`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from envserver_records.costs import Prices
from envserver_records.errors import ConfigError

from ..models.catalogue import read_catalogue
from ..rollouts.costs import RolloutPrices
from ..settings.config import Settings
from ..settings.engines import PricesConfig
from ..settings.runs import JudgeConfig
from .engines import SIMULATED
from .judging import judge_prices

if TYPE_CHECKING:
    from ..evaluation.folders import Pricing


def pricing_of(config: PricesConfig, model: str | None, models_file: Path) -> Pricing:
    """Returns the prices of a model, by the name under which the engine serves it.

    Args:
        model: value of `--model`; its entry may have prices, too.
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
            from ..evaluation.prices import read_prices

            return read_prices(config.file, served, currency=config.currency)
        return _of_catalogue(model, served, models_file, config.currency)

    return pricing


def rollout_prices(
    settings: Settings,
    model: str,
    agents: Mapping[str, str | None],
    judge_config: JudgeConfig | None,
) -> RolloutPrices:
    """Returns the prices by which the cost of each rollout is recorded.

    Args:
        model: name of the run's model at its engine.
        agents: the own model of each declared agent, None where it is the run's; {}: one agent.
    """
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
    if entry is None or entry.prompt_price is None or entry.completion_price is None:
        return None
    return Prices(
        prompt=entry.prompt_price,
        completion=entry.completion_price,
        currency=currency,
        source=str(place),
    )
