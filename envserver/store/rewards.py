"""Counts groups by mean reward without reading bodies: a histogram of what a filter matches."""

from __future__ import annotations

from itertools import pairwise
from typing import Final

import msgspec
from sqlalchemy import Integer, case, cast, func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from .listing import GroupQuery, filters_of, joined_tables
from .schema import group_facts

BINS: Final = 20


class RewardCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Groups by mean reward.

    Args:
        groups: all that match; `unscored` of them have no mean reward.
        low, high: ends of the bins: 0 and 1 if all means lie between, else the least and the
            greatest; None without a mean.
        counts: groups in each of `BINS` equal bins, which have their lower ends; the last has both.
    """

    groups: int
    unscored: int
    low: float | None
    high: float | None
    counts: list[int]


async def reward_counts(connection: AsyncConnection, query: GroupQuery) -> RewardCounts:
    """Counts the groups that `query` matches, in two passes over their facts."""
    mean = group_facts.c.reward_mean
    ends = func.count(), func.count(mean), func.min(mean), func.max(mean)
    found = select(*ends).select_from(joined_tables()).where(*filters_of(query))
    groups, scored, least, greatest = (await connection.execute(found)).one()
    if not scored:
        return RewardCounts(groups=groups, unscored=groups, low=None, high=None, counts=[])
    low, high = (0.0, 1.0) if least >= 0 and greatest <= 1 else (least, greatest)
    # Rounded, because the bounds become a filter: 3 / 20 belongs to the bin that 0.15 begins.
    bounds = [float(f"{low + (high - low) * n / BINS:.9g}") for n in range(1, BINS)]
    above = [func.sum(cast(case((mean >= bound, 1), else_=0), Integer)) for bound in bounds]
    sums = select(*above).select_from(joined_tables()).where(mean.is_not(None), *filters_of(query))
    at_least = [scored, *(await connection.execute(sums)).one(), 0]
    return RewardCounts(
        groups=groups,
        unscored=groups - scored,
        low=low,
        high=high,
        counts=[more - fewer for more, fewer in pairwise(at_least)],
    )
