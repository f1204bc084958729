"""Several environments, or tasks of a harness, in one report. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from .estimators import Estimate, estimate_of_means
from .report import Report, counted_rewards, passes

SCHEMA_VERSION = 1


class Totals(msgspec.Struct, frozen=True, kw_only=True):
    """Totals over all parts, without baselines.

    Args:
        cost: None where no part has prices, or their currencies differ.
    """

    tasks: int
    tasks_lost: int
    scored: int
    lost: int
    truncated: int
    prompt_tokens: int
    completion_tokens: int
    seconds: float
    cost: float | None
    currency: str


class Suite(msgspec.Struct, frozen=True, kw_only=True):
    """An evaluation of several parts.

    Args:
        model: the model of all parts; several are joined with commas.
        average: mean over the parts of their mean reward, equally weighted; `average_pass`: of
            pass@1. None where nothing counts.
        parts: in the order in which they were requested.
    """

    model: str
    complete: bool
    simulated: bool
    created_at: float
    average: Estimate | None
    average_pass: Estimate | None
    totals: Totals
    parts: list[Report]
    schema_version: int = SCHEMA_VERSION


def suite_of(parts: Sequence[Report]) -> Suite:
    """Makes one report of at least one part."""
    rewards = [
        [found for row in part.run.tasks if (found := counted_rewards(row, part.rules))]
        for part in parts
    ]
    means = [[sum(task) / len(task) for task in tasks] for tasks in rewards if tasks]
    passed = [
        [sum(passes(one, part.rules) for one in task) / len(task) for task in tasks]
        for part, tasks in zip(parts, rewards, strict=True)
        if tasks
    ]
    seed = parts[0].rules.seed
    return Suite(
        model=", ".join(dict.fromkeys(part.model for part in parts if part.model)),
        complete=all(part.complete for part in parts),
        simulated=any(part.simulated for part in parts),
        created_at=max(part.created_at for part in parts),
        average=estimate_of_means(means, seed=seed) if means else None,
        average_pass=estimate_of_means(passed, seed=seed) if passed else None,
        totals=_totals(parts),
        parts=list(parts),
    )


def _totals(parts: Sequence[Report]) -> Totals:
    counts = [part.run.counts for part in parts]
    costs = [part.run.costs for part in parts if part.run.costs is not None]
    paid = [one.total_cost for one in costs if one.total_cost is not None]
    currencies = {part.prices.currency for part in parts if part.prices is not None}
    known = bool(paid) and len(currencies) == 1
    return Totals(
        tasks=sum(one.tasks for one in counts),
        tasks_lost=sum(one.tasks_lost for one in counts),
        scored=sum(one.scored for one in counts),
        lost=sum(one.lost for one in counts),
        truncated=sum(one.truncated for one in counts),
        prompt_tokens=sum(one.total_prompt_tokens for one in costs),
        completion_tokens=sum(one.total_completion_tokens for one in costs),
        seconds=sum(one.total_seconds for one in costs),
        cost=sum(paid) if known else None,
        currency=next(iter(currencies)) if known else "",
    )


def summary_scalars(report: Report | Suite) -> dict[str, float]:
    """Returns the results of an evaluation as numbers by name, for trackers."""
    found: dict[str, float] = {}
    for part in report.parts if isinstance(report, Suite) else [report]:
        measured = part.run.overall
        if measured is None:
            continue
        of = f"evaluate/{part.name or part.env}"
        estimates = {
            "mean_reward": measured.mean_reward,
            **{f"pass_at_{k}": one for k, one in measured.pass_at.items()},
            **{f"pass_hat_{k}": one for k, one in measured.pass_hat.items()},
        }
        for name, one in estimates.items():
            ends = {"": one.value, "_low": one.low, "_high": one.high}
            found |= {f"{of}/{name}{end}": at for end, at in ends.items() if at is not None}
    return found
