"""Lists and reads groups for inspection, without leasing or consuming them."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from envserver_records.wire import GROUP_MSGPACK, GroupSummary
from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from ...store.interface import ReadGroups
from ...store.listing import ListedGroup
from ..leasing import GroupEncoder, PackedAnswer
from .answers import answers, json_answer
from .models import GroupsAnswer, LeasedGroup
from .searching import GroupSearch


def add_group_routes(router: APIRouter, store: ReadGroups, encoder: GroupEncoder) -> None:
    @router.get("/v1/groups", responses=answers(GroupsAnswer, 422, what="A page of groups."))
    async def list_groups(wanted: Annotated[GroupSearch, Query()]) -> Response:
        """Lists groups by what is known of them: filtered, sorted, page by page; without parameters
        all of them, oldest first. A page's `cursor` leads to the next page with the same
        parameters, and is "" on the last one; groups that arrive meanwhile move nothing. `next`,
        oldest first only, is the `after` of the next page, null on the last one. Nothing is leased
        or consumed.
        """
        page = await store.list_groups(wanted.query(), wanted.cursor, wanted.limit)
        is_last = not page.cursor or wanted.order != "oldest"
        following = None if is_last else page.groups[-1].row.seq
        shown = [summary(one) for one in page.groups]
        return json_answer({"groups": shown, "cursor": page.cursor, "next": following})

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
