"""Costs of a rollout, in one currency. What has no price is left out; it never counts as free."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from .errors import ConfigError

MILLION = 1_000_000


class Prices(msgspec.Struct, frozen=True, kw_only=True):
    """The prices of a model: of a million prompt and completion tokens, and where they come
    from."""

    prompt: float
    completion: float
    currency: str = "USD"
    source: str = ""

    def __post_init__(self) -> None:
        if not (0 <= self.prompt < float("inf") and 0 <= self.completion < float("inf")):
            raise ConfigError("A price must be a number from 0 on.")

    def cost(self, prompt_tokens: int, completion_tokens: int) -> float:
        spent = prompt_tokens * self.prompt + completion_tokens * self.completion
        return spent / MILLION


class JudgeUsage(msgspec.Struct, frozen=True, kw_only=True):
    """The calls that scoring made to the judge; tokens are the engine's (the cache's cost nothing).

    `calls` counts answers of the engine and the cache, `cached` the latter. `seconds`: wall clock
    of all calls together, parallel ones added up.
    """

    calls: int = 0
    cached: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    seconds: float = 0.0

    def __add__(self, other: JudgeUsage) -> JudgeUsage:
        names = self.__struct_fields__
        return JudgeUsage(**{name: getattr(self, name) + getattr(other, name) for name in names})

    def shared(self, count: int) -> Iterator[JudgeUsage]:
        """Yields `count` nearly equal parts, which add up to this."""
        for k in range(count):
            yield JudgeUsage(
                calls=part(self.calls, k, count),
                cached=part(self.cached, k, count),
                prompt_tokens=part(self.prompt_tokens, k, count),
                completion_tokens=part(self.completion_tokens, k, count),
                seconds=self.seconds / count,
            )


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """The cost of one rollout, as far as prices are known.

    `models`: cost by agent ("": a single one). `judge`: None if not asked, or without prices.
    """

    currency: str
    models: dict[str, float] = {}
    judge: float | None = None

    @property
    def total(self) -> float:
        return sum(self.models.values()) + (self.judge or 0.0)


def added(costs: Iterable[Cost | None]) -> Cost | None:
    """Returns the sum of those that are known; None if none is, or their currencies differ."""
    known = [cost for cost in costs if cost is not None]
    if len({cost.currency for cost in known}) != 1:
        return None
    models: dict[str, float] = {}
    for cost in known:
        for agent, spent in cost.models.items():
            models[agent] = models.get(agent, 0.0) + spent
    judged = [cost.judge for cost in known if cost.judge is not None]
    return Cost(currency=known[0].currency, models=models, judge=sum(judged) if judged else None)


def part(total: int, k: int, count: int) -> int:
    """Returns the `k`-th of `count` whole parts of `total`, which differ by one at most."""
    return total * (k + 1) // count - total * k // count
