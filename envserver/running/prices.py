"""`--prices.*`: prices of tokens, from flags, a file, or the model's entry in `models.yaml`."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
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
    listed = None if config.file is None else _read_prices(config.file)

    def pricing(served: str) -> Prices | None:
        if given := prices_of(config.prompt, config.completion, config.currency, "as given"):
            return given
        if listed is None:
            return _of_catalogue(model, served, models_file, config.currency)
        if served not in listed:
            near = difflib.get_close_matches(served, listed, n=1, cutoff=0.5)
            raise ConfigError(
                f"{config.file} has no prices for {served!r}.",
                hint=f"Did you mean {near[0]!r}?" if near else f"It has: {', '.join(listed)}.",
            )
        try:
            found = msgspec.convert(listed[served], _Listed)
        except msgspec.ValidationError as error:
            place = f"{config.file}, {served}"
            raise _unreadable(f"{place}: {error}.", place) from None
        return prices_of(found.prompt, found.completion, config.currency, str(config.file))

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


class _Listed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    prompt: float
    completion: float


def _read_prices(path: Path) -> dict[str, Any]:
    try:
        return msgspec.yaml.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError) as error:
        raise _unreadable(f"{path} cannot be read: {error}.", str(path)) from error


def _unreadable(message: str, place: str) -> InputError:
    hint = "Prices are written MODEL: {prompt: 0.15, completion: 0.6}, per million tokens."
    return InputError(message, hint=hint, place=place)
