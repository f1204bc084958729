"""Tells watchers of what is new in what is looked at."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Final

import structlog
from envserver_records.errors import StoreError

from ..api.live.events import missed
from ..api.live.feed import Feed
from ..api.native.groups import summary
from ..store.interface import ReadGroups
from ..store.listing import GroupQuery
from .indexing_process import Indexing

log = structlog.get_logger(__name__)

_MOST_ALONE: Final = 10
"""New groups that are told of one by one."""
_POLL_SECONDS: Final = 1.0


async def follow_index(feed: Feed, groups: ReadGroups, indexing: Indexing) -> None:
    """Tells of the groups of each step of an index, until it is cancelled or there is no more."""
    feed.seq = indexing.progress.groups
    resets = indexing.progress.resets
    while await indexing.next():
        if indexing.progress.resets != resets:
            resets, feed.seq = indexing.progress.resets, 0
            feed.publish("resync", {"reason": "replaced"})
        try:
            await tell_groups(feed, groups, indexing.progress.groups)
        except StoreError as error:  # the next step tells of them
            log.warning("view.groups_not_told", error=str(error))


async def follow_store(feed: Feed, groups: ReadGroups) -> None:
    """Tells watchers of a store's new groups, until cancelled; feed.seq is set first."""
    while True:
        with suppress(StoreError):
            await tell_groups(feed, groups, await last_number(groups))
        await asyncio.sleep(_POLL_SECONDS)
        await feed.watched.wait()


async def last_number(groups: ReadGroups) -> int:
    """Returns the number of the group that arrived last; 0 without groups."""
    page = await groups.list_groups(GroupQuery(order="newest"), "", 1)
    return page.groups[0].row.seq if page.groups else 0


async def tell_groups(feed: Feed, groups: ReadGroups, last: int) -> None:
    """Tells of the groups after the last one that was told of, up to number `last`."""
    seen = feed.seq
    if last <= seen:
        return
    rows = []
    if last - seen <= _MOST_ALONE:
        page = await groups.list_groups(GroupQuery(after=seen), "", last - seen)
        rows = [one for one in page.groups if one.row.seq <= last]
    if not rows:
        feed.publish("groups", missed(seen, last), seq=last)
    for one in rows:
        feed.publish("group", summary(one), seq=last if one is rows[-1] else one.row.seq)
