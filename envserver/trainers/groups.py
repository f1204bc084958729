"""Lists and reads groups for inspection, without leasing or consuming them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Annotated, Any, Final

import msgspec
import orjson
from envserver_records.errors import ConflictError, InputError, NotFoundError
from envserver_records.records import Group, Trajectory, unpack
from envserver_records.records import Sequence as Row
from envserver_records.wire import GROUP_MSGPACK, NATIVE, GroupSummary
from fastapi import APIRouter, Path, Query
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from ..formats.rollout_json import (
    PICTURES,
    link_of,
    picture_of,
    rollouts_as_json,
    shown_group,
    shown_rollout,
)
from ..formats.shown_text import token_texts
from ..http.answers import json_answer, route
from ..settings.section import Described
from ..store import GroupRow
from ..store.listing import GroupQuery, ListedGroup, Order, Page, RewardCounts, TaskOrder
from ..store.lookups import GroupLookups
from ..store.packed import CHECKED, DamagedBody, decode, facts_of
from ..store.rows import GroupState
from .bodies import (
    MOST_GROUPS,
    GroupsAnswer,
    LeasedGroup,
    RewardsAnswer,
    RolloutAnswer,
    RolloutsAnswer,
    TaskId,
    TokensAnswer,
)
from .encoding import Cache, GroupEncoder, PackedAnswer

_LIMIT: Final = 2**63 - 1
_Name = Annotated[str, Field(max_length=1024, pattern=r"^[^\x00]*$")]
_Finite = Annotated[float, Field(allow_inf_nan=False)]
_Count = Annotated[int, Field(ge=0, le=_LIMIT)]
_Version = Annotated[int, Field(ge=-1, le=_LIMIT)]


class GroupFilter(BaseModel):
    """Which groups; see `store.listing.GroupQuery`."""

    model_config = ConfigDict(extra="forbid", defer_build=False)

    after: _Count = 0
    """`seq`: only groups that arrived later"""
    environment: _Name = ""
    task: TaskId = ""
    """the task's id"""
    split: _Name = ""
    model: _Name = ""
    state: GroupState | None = None
    min_reward: _Finite | None = None
    """of the group's mean reward"""
    max_reward: _Finite | None = None
    spread_above: _Finite | None = None
    """its largest reward less its smallest is above this"""
    version_from: _Version | None = None
    version_to: _Version | None = None
    min_length: _Count | None = None
    """tokens of its longest row"""
    max_length: _Count | None = None
    flag: _Name = ""
    """a rollout of it has this flag"""
    end: _Name = ""
    """a rollout of it ended so: agent (by itself), or the name of a limit"""
    text: TaskId = ""
    """part of its id or of its task's"""

    def query(self) -> GroupQuery:
        return GroupQuery(**self.model_dump(include=set(GroupQuery.__struct_fields__)))


class GroupSearch(GroupFilter):
    """Which groups, in which order, and which page of them."""

    order: Order = "oldest"
    """best, worst: by mean reward; widest: by the difference of rewards; longest: by tokens"""
    words: _Name = ""
    """words in its conversations or outputs; a page searches 256 groups at most, and may have none
    and still a cursor"""
    cursor: _Name = ""
    """from the previous page; empty: the first page"""
    limit: int = Field(100, ge=1, le=MOST_GROUPS)


_MOST_READ: Final = 256
_AT_A_TIME: Final = 32
_UNREADABLE: Final = (CHECKED, b"\1")
"""Stands for a group that cannot be read: its checksum is wrong."""


async def find(
    store: GroupLookups, query: GroupQuery, words: str, cursor: str, limit: int
) -> tuple[Page, int]:
    """Returns the next page of at most `limit` groups of `query` whose conversations or outputs
    have `words`, upper and lower case alike (of ASCII letters), and how many groups were read."""
    found: list[ListedGroup] = []
    searched = 0
    while len(found) < limit and searched < _MOST_READ:
        most = min(_AT_A_TIME, limit - len(found), _MOST_READ - searched)
        page = await store.list_groups(query, cursor, most)
        bodies = await _bodies(store, [group.row.group_id for group in page.groups])
        found += await asyncio.to_thread(_those, page.groups, bodies, words)
        searched += len(page.groups)
        cursor = page.cursor
        if not cursor:
            break
    return Page(found, cursor), searched


async def _bodies(store: GroupLookups, group_ids: list[str]) -> list[tuple[int, bytes]]:
    """Returns the stored bodies; `_UNREADABLE` for a group that cannot be read."""
    try:
        return await store.stored_bodies(group_ids)
    except (InputError, NotFoundError):
        if len(group_ids) == 1:
            return [_UNREADABLE]
    return [body for group_id in group_ids for body in await _bodies(store, [group_id])]


def _those(
    groups: list[ListedGroup], bodies: list[tuple[int, bytes]], words: str
) -> list[ListedGroup]:
    needle = orjson.dumps(words)[1:-1].lower()
    return [
        group
        for group, (encoding, data) in zip(groups, bodies, strict=True)
        if needle in _texts(group, encoding, data, words.encode().lower()).lower()
    ]


def _texts(group: ListedGroup, encoding: int, data: bytes, words: bytes) -> bytes:
    try:
        body = decode(encoding, data)
    except DamagedBody:
        return b""
    if group.row.format == "atropos":
        return orjson.dumps(orjson.loads(body).get("messages"))
    if words not in body.lower():  # a packed group holds texts as they are
        return b""
    parts: list[Any] = []
    for rollout in unpack(body, Group).trajectories:
        parts += [rollout.messages, rollout.output, [other.messages for other in rollout.others]]
    return orjson.dumps(parts, default=str)


_COUNT_SECONDS: Final = 5.0
"""Counts are this old at most; however many pages watch, the store counts once in this time."""
_MOST_COUNTS: Final = 64


def add_group_routes(router: APIRouter, store: GroupLookups, encoder: GroupEncoder) -> None:
    @router.get("/v1/groups", **route(GroupsAnswer, 422, what="A page of groups."))
    async def list_groups(wanted: Annotated[GroupSearch, Query()]) -> Response:
        """Lists groups by what is known of them: filtered, sorted, page by page; without parameters
        all of them, oldest first. A page's `cursor` leads to the next page with the same
        parameters, and is "" on the last one; groups that arrive meanwhile move nothing. `next`,
        oldest first only, is the `after` of the next page, null on the last one. Nothing is leased
        or consumed."""
        query = wanted.query()
        if wanted.words:
            found, count = await find(store, query, wanted.words, wanted.cursor, wanted.limit)
            return json_answer(
                {
                    "groups": [summary(group) for group in found.groups],
                    "cursor": found.cursor,
                    "next": None,
                    "searched": count,
                }
            )
        page = await store.list_groups(query, wanted.cursor, wanted.limit)
        is_last = not page.cursor or wanted.order != "oldest"
        return json_answer(
            {
                "groups": [summary(group) for group in page.groups],
                "cursor": page.cursor,
                "next": None if is_last else page.groups[-1].row.seq,
            }
        )

    async def counted(keys: Sequence[str]) -> list[RewardCounts]:
        queries = [msgspec.json.decode(key.split(" ", 1)[1], type=GroupQuery) for key in keys]
        return [await store.reward_counts(query) for query in queries]

    counts = Cache(counted, lambda _: 1, _MOST_COUNTS, idle_seconds=2 * _COUNT_SECONDS)

    @router.get("/v1/rewards", **route(RewardsAnswer, 422, what="Counts."))
    async def count_rewards(wanted: Annotated[GroupFilter, Query()]) -> Response:
        """Counts the groups that match by mean reward, in twenty equal bins. The counts may be five
        seconds old."""
        query = msgspec.json.encode(wanted.query()).decode()
        (found,) = await counts.get([f"{time.monotonic() // _COUNT_SECONDS} {query}"])
        return json_answer(msgspec.structs.asdict(found))

    @router.get(
        "/v1/groups/{group_id:path}",
        **route(LeasedGroup, 404, 422, media_types=(GROUP_MSGPACK,), what="The group."),
    )
    async def get_group(group_id: str, request: Request) -> Response:
        """Returns one whole group in any state, without leasing or consuming it. MessagePack when
        `Accept` names `application/vnd.envserver.group+msgpack`, else JSON."""
        (row,) = await store.rows([group_id])
        if GROUP_MSGPACK in request.headers.get("accept", ""):
            return PackedAnswer(await encoder.group(row), GROUP_MSGPACK, request.headers)
        return Response(await encoder.group_as_json(row), media_type="application/json")


def summary(group: ListedGroup) -> dict[str, Any]:
    # Omit the lease id: anyone who knows it could acknowledge the lease.
    summary = msgspec.convert(group.row, GroupSummary, from_attributes=True)
    facts = msgspec.structs.asdict(group.facts) if group.facts is not None else {}
    return msgspec.structs.asdict(summary) | facts


MOST_TOKENS: Final = 32_768
_MOST_ROLLOUTS: Final = 2**31 - 1
_OF_PICTURES: Final = {
    "content-security-policy": "default-src 'none'",
    "x-content-type-options": "nosniff",
    "cache-control": "private, max-age=3600",
}

_Number = Annotated[int, Path(ge=0, le=_MOST_ROLLOUTS, description="position in the group, from 0")]


def add_rollout_routes(router: APIRouter, store: GroupLookups) -> None:
    @router.get(
        "/v1/groups/{group_id:path}/rollouts",
        **route(RolloutsAnswer, 404, 409, 422, what="The rollouts."),
    )
    async def list_rollouts(group_id: str) -> Response:
        """Returns all rollouts of a group, each as `.../rollouts/N` has it. Of more than 8 MB,
        later rollouts come without their texts (`cut`). Nothing is leased or consumed."""
        row, group = await _read_group(store, group_id)
        body = await asyncio.to_thread(_all_shown, row, group)
        return Response(body, media_type="application/json")

    @router.get(
        "/v1/groups/{group_id:path}/rollouts/{number}",
        **route(RolloutAnswer, 404, 409, 422, what="The rollout."),
    )
    async def get_rollout(group_id: str, number: _Number) -> Response:
        """Returns one rollout of a group: conversations, score, usage, flags, times, failures of
        earlier attempts, printed lines, and what is known of its rows but their tokens (`/tokens`
        has those). Pictures in messages are links to `/images/K`. Nothing is leased or consumed."""
        group, rollout = await _read(store, group_id, number)
        # A long rollout takes longer to write as JSON than the event loop may wait.
        return await asyncio.to_thread(
            lambda: json_answer(_shown(group, rollout, group_id, number))
        )

    @router.get(
        "/v1/groups/{group_id:path}/rollouts/{number}/images/{image}",
        **route(None, 404, 409, 422, media_types=PICTURES, what="The picture."),
    )
    async def get_image(
        group_id: str,
        number: _Number,
        image: Annotated[int, Path(ge=0, le=_MOST_ROLLOUTS, description="number, from 0")],
    ) -> Response:
        """Returns a picture in the messages of a rollout, with the media type that its bytes show:
        PNG, JPEG, WebP or GIF."""
        _, rollout = await _read(store, group_id, number)
        kind, data = await asyncio.to_thread(picture_of, rollout, image)
        return Response(data, media_type=kind, headers=_OF_PICTURES)

    @router.get(
        "/v1/groups/{group_id:path}/rollouts/{number}/tokens",
        **route(TokensAnswer, 404, 409, 422, what="Tokens of a row."),
    )
    async def get_tokens(
        group_id: str,
        number: _Number,
        row: Annotated[int, Query(ge=0, le=_MOST_ROLLOUTS, description="row of the rollout")] = 0,
        start: Annotated[int, Query(ge=0, le=_MOST_ROLLOUTS, description="first token")] = 0,
        count: Annotated[
            int, Query(ge=1, le=MOST_TOKENS, description="maximum number of tokens")
        ] = 8192,
    ) -> Response:
        """Returns tokens of one row of a rollout, as columns of equal length."""
        group, rollout = await _read(store, group_id, number)
        if row >= len(rollout.sequences):
            raise NotFoundError(
                f"Rollout {number} of {group_id} has {len(rollout.sequences)} rows.",
                place="query.row",
            )
        tokens = rollout.sequences[row]
        return json_answer(await asyncio.to_thread(_columns, tokens, group.model, start, count))


async def _read(store: GroupLookups, group_id: str, number: int) -> tuple[Group, Trajectory]:
    _, group = await _read_group(store, group_id)
    if number >= len(group.trajectories):
        raise NotFoundError(f"{group_id} has {len(group.trajectories)} rollouts.")
    return group, group.trajectories[number]


async def _read_group(store: GroupLookups, group_id: str) -> tuple[GroupRow, Group]:
    (stored,) = await store.rows([group_id])
    if stored.format not in NATIVE:
        raise ConflictError(
            f"{group_id} was posted over the Atropos API, which has rows but no rollouts.",
            hint="GET /v1/groups/ID has all of it.",
        )
    (body,) = await store.bodies([group_id])
    return stored, await asyncio.to_thread(unpack, body, Group)


def _all_shown(row: GroupRow, group: Group) -> bytes:
    facts = summary(ListedGroup(row, facts_of(group)))
    return rollouts_as_json(group, facts, link_of(row.group_id))


def _shown(group: Group, rollout: Trajectory, group_id: str, number: int) -> dict[str, Any]:
    return {
        "group": shown_group(group),
        "rollouts": len(group.trajectories),
        "number": number,
        "rollout": shown_rollout(rollout, f"{link_of(group_id)}/{number}"),
    }


def _columns(row: Row, model: str, start: int, count: int) -> dict[str, Any]:
    part = slice(start, start + count)
    ids = row.tokens[part].tolist()
    text_of = _text_of(model)
    return {
        "start": start,
        "length": row.tokens.size,
        "ids": ids,
        "texts": [text_of(token_id) for token_id in ids],
        "mask": row.mask[part].tolist(),
        "logprobs": row.logprobs[part].tolist(),
        "versions": row.versions[part].tolist(),
        "calls": row.calls[part].tolist(),
    }


@lru_cache(maxsize=4)
def _text_of(model: str) -> Callable[[int], str | None]:
    return token_texts(model)


_PLAIN: Final = r"^[^\x00]*$"


class SeenTask(Described):
    environment: str
    task_id: str
    groups: int
    """Number of its kept groups."""
    rollouts: int
    """Number of their rollouts with a reward."""
    reward_mean: float | None
    """Mean reward of these rollouts; null if there are none."""
    spread: float | None
    """Mean over its groups of the largest less the smallest reward."""
    solved_share: float | None
    """Share of the rollouts that solved it; null: unknown."""
    last_group_id: str
    last_time: float
    """Seconds since 1970 at which its last group arrived."""
    last_version: int
    """Policy version of its last group; -1: unknown."""


class SeenTasksAnswer(Described):
    tasks: list[SeenTask]
    cursor: str
    """Leads to the next page with the same parameters; "" on the last one."""


def add_task_routes(router: APIRouter, store: GroupLookups) -> None:
    @router.get("/v1/tasks/seen", **route(SeenTasksAnswer, 422, what="A page of tasks."))
    async def list_seen_tasks(
        environment: Annotated[
            str, Query(max_length=1024, pattern=_PLAIN, description="only this environment")
        ] = "",
        text: Annotated[TaskId, Query(description="part of the task's id")] = "",
        order: Annotated[
            TaskOrder,
            Query(description="best, worst: by mean reward; widest: spread; most: groups"),
        ] = "newest",
        cursor: Annotated[
            str, Query(max_length=1024, pattern=_PLAIN, description="from the previous page")
        ] = "",
        limit: Annotated[int, Query(ge=1, le=MOST_GROUPS, description="maximum number")] = 100,
    ) -> Response:
        """Lists the tasks of kept groups with what their groups have in common. `GET /v1/groups`
        with `environment` and `task` has a task's groups. Tasks without a reward are left out of
        the orders by reward and spread."""
        page = await store.seen_tasks(order, cursor, limit, environment=environment, text=text)
        return json_answer(msgspec.to_builtins(page))
