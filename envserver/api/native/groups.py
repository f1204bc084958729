"""Lists and reads groups for inspection, without leasing or consuming them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated, Any, Final

import msgspec
from envserver_records.wire import GROUP_MSGPACK, GroupSummary
from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from ...store.interface import ReadGroups
from ...store.listing import GroupQuery, ListedGroup
from ...store.rewards import RewardCounts
from ..cache import Cache
from ..leasing import GroupEncoder, PackedAnswer
from .answers import answers, json_answer
from .models import GroupsAnswer, LeasedGroup, RewardsAnswer
from .searching import GroupFilter, GroupSearch
from .words import find

_COUNT_SECONDS: Final = 5.0
"""Counts are this old at most; however many pages watch, the store counts once in this time."""
_MOST_COUNTS: Final = 64


def add_group_routes(router: APIRouter, store: ReadGroups, encoder: GroupEncoder) -> None:
    @router.get("/v1/groups", responses=answers(GroupsAnswer, 422, what="A page of groups."))
    async def list_groups(wanted: Annotated[GroupSearch, Query()]) -> Response:
        """Lists groups by what is known of them: filtered, sorted, page by page; without parameters
        all of them, oldest first. A page's `cursor` leads to the next page with the same
        parameters, and is "" on the last one; groups that arrive meanwhile move nothing. `next`,
        oldest first only, is the `after` of the next page, null on the last one. Nothing is leased
        or consumed.
        """
        query = wanted.query()
        if wanted.words:
            found = await find(store, query, wanted.words, wanted.cursor, wanted.limit)
            rows = [summary(one) for one in found.groups]
            return json_answer(
                {"groups": rows, "cursor": found.cursor, "next": None, "searched": found.searched}
            )
        page = await store.list_groups(query, wanted.cursor, wanted.limit)
        is_last = not page.cursor or wanted.order != "oldest"
        following = None if is_last else page.groups[-1].row.seq
        shown = [summary(one) for one in page.groups]
        return json_answer({"groups": shown, "cursor": page.cursor, "next": following})

    async def counted(keys: Sequence[str]) -> list[RewardCounts]:
        queries = [msgspec.json.decode(key.split(" ", 1)[1], type=GroupQuery) for key in keys]
        return [await store.reward_counts(query) for query in queries]

    counts = Cache(counted, lambda _: 1, _MOST_COUNTS, idle_seconds=2 * _COUNT_SECONDS)

    @router.get("/v1/rewards", responses=answers(RewardsAnswer, 422, what="Counts."))
    async def count_rewards(wanted: Annotated[GroupFilter, Query()]) -> Response:
        """Counts the groups that match by mean reward, in twenty equal bins. The counts may be five
        seconds old.
        """
        query = msgspec.json.encode(wanted.query()).decode()
        (found,) = await counts.get([f"{time.monotonic() // _COUNT_SECONDS} {query}"])
        return json_answer(msgspec.structs.asdict(found))

    @router.get(
        "/v1/groups/{group_id:path}",
        responses=answers(LeasedGroup, 404, 422, media_types=(GROUP_MSGPACK,), what="The group."),
    )
    async def get_group(group_id: str, request: Request) -> Response:
        """Returns one whole group in any state, without leasing or consuming it. MessagePack when
        `Accept` names `application/vnd.envserver.group+msgpack`, else JSON.
        """
        (row,) = await store.rows([group_id])
        if GROUP_MSGPACK in request.headers.get("accept", ""):
            return PackedAnswer(await encoder.group(row), GROUP_MSGPACK, request.headers)
        return Response(await encoder.group_as_json(row), media_type="application/json")


def summary(one: ListedGroup) -> dict[str, Any]:
    """Returns a row of the list of groups."""
    # Omit the lease id: anyone who knows it could acknowledge the lease.
    summary = msgspec.convert(one.row, GroupSummary, from_attributes=True)
    facts = msgspec.structs.asdict(one.facts) if one.facts is not None else {}
    return msgspec.structs.asdict(summary) | facts
