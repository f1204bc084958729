"""Lists and reads groups for inspection, without leasing or consuming them."""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec
from envserver_records.wire import GROUP_MSGPACK, GroupSummary
from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from ...store import GroupRow, GroupStore
from ..leasing import GroupEncoder, PackedAnswer
from .answers import answers, json_answer
from .models import MOST_GROUPS, GroupsAnswer, LeasedGroup

_SEQ_LIMIT: Final = 2**63 - 1


def add_group_routes(router: APIRouter, store: GroupStore, encoder: GroupEncoder) -> None:
    @router.get("/v1/groups", responses=answers(GroupsAnswer, 422, what="A page of groups."))
    async def list_groups(
        after: Annotated[
            int, Query(ge=0, le=_SEQ_LIMIT, description="`seq` of the last group seen")
        ] = 0,
        limit: Annotated[
            int, Query(ge=1, le=MOST_GROUPS, description="maximum number of groups")
        ] = 100,
    ) -> Response:
        """Lists the groups that arrived after number `after`, in any state, oldest first. `next` is
        the `after` of the following page, null on the last page. Nothing is leased or consumed.
        """
        rows = await store.arrived_after(after, limit)
        following = rows[-1].seq if len(rows) == limit else None
        return json_answer({"groups": [_summary(row) for row in rows], "next": following})

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


def _summary(row: GroupRow) -> dict[str, Any]:
    # Omit the lease id: anyone who knows it could acknowledge the lease.
    return msgspec.structs.asdict(msgspec.convert(row, GroupSummary, from_attributes=True))
