"""GET /v1/groups/ID/rollouts/...: rollouts of a group, rows token by token, pictures."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import lru_cache
from typing import Annotated, Any, Final

from envserver_records.errors import ConflictError, NotFoundError
from envserver_records.records import Group, Trajectory, unpack
from envserver_records.records import Sequence as Row
from fastapi import APIRouter, Path, Query
from starlette.responses import Response

from ...formats.rollout_json import (
    PICTURES,
    link_of,
    picture_of,
    rollouts_as_json,
    shown_group,
    shown_rollout,
)
from ...formats.token_texts import token_texts
from ...store import GroupRow
from ...store.facts import facts_of
from ...store.interface import ReadGroups
from ...store.listing import ListedGroup
from .answers import answers, json_answer
from .groups import summary
from .models import RolloutAnswer, RolloutsAnswer, TokensAnswer

MOST_TOKENS: Final = 32_768
_MOST_ROLLOUTS: Final = 2**31 - 1
_OF_PICTURES: Final = {
    "content-security-policy": "default-src 'none'",
    "x-content-type-options": "nosniff",
    "cache-control": "private, max-age=3600",
}

_Number = Annotated[int, Path(ge=0, le=_MOST_ROLLOUTS, description="position in the group, from 0")]


def add_rollout_routes(router: APIRouter, store: ReadGroups) -> None:
    @router.get(
        "/v1/groups/{group_id:path}/rollouts",
        responses=answers(RolloutsAnswer, 404, 409, 422, what="The rollouts."),
    )
    async def list_rollouts(group_id: str) -> Response:
        """Returns all rollouts of a group, each as `.../rollouts/N` has it. Of more than 8 MB,
        later rollouts come without their texts (`cut`). Nothing is leased or consumed.
        """
        row, group = await _read_group(store, group_id)
        body = await asyncio.to_thread(_all_shown, row, group)
        return Response(body, media_type="application/json")

    @router.get(
        "/v1/groups/{group_id:path}/rollouts/{number}",
        responses=answers(RolloutAnswer, 404, 409, 422, what="The rollout."),
    )
    async def get_rollout(group_id: str, number: _Number) -> Response:
        """Returns one rollout of a group: conversations, score, usage, flags, times, failures of
        earlier attempts, printed lines, and what is known of its rows but their tokens (`/tokens`
        has those). Pictures in messages are links to `/images/K`. Nothing is leased or consumed.
        """
        group, rollout = await _read(store, group_id, number)
        # A long rollout takes longer to write as JSON than the event loop may wait.
        return await asyncio.to_thread(
            lambda: json_answer(_shown(group, rollout, group_id, number))
        )

    @router.get(
        "/v1/groups/{group_id:path}/rollouts/{number}/images/{image}",
        responses=answers(None, 404, 409, 422, media_types=PICTURES, what="The picture."),
    )
    async def get_image(
        group_id: str,
        number: _Number,
        image: Annotated[int, Path(ge=0, le=_MOST_ROLLOUTS, description="number, from 0")],
    ) -> Response:
        """Returns a picture in the messages of a rollout, with the media type that its bytes show:
        PNG, JPEG, WebP or GIF.
        """
        _, rollout = await _read(store, group_id, number)
        kind, data = await asyncio.to_thread(picture_of, rollout, image)
        return Response(data, media_type=kind, headers=_OF_PICTURES)

    @router.get(
        "/v1/groups/{group_id:path}/rollouts/{number}/tokens",
        responses=answers(TokensAnswer, 404, 409, 422, what="Tokens of a row."),
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


async def _read(store: ReadGroups, group_id: str, number: int) -> tuple[Group, Trajectory]:
    _, group = await _read_group(store, group_id)
    if number >= len(group.trajectories):
        raise NotFoundError(f"{group_id} has {len(group.trajectories)} rollouts.")
    return group, group.trajectories[number]


async def _read_group(store: ReadGroups, group_id: str) -> tuple[GroupRow, Group]:
    (stored,) = await store.rows([group_id])
    if stored.format != "group":
        raise ConflictError(
            f"{group_id} was posted over the Atropos wire, which has rows and no rollouts.",
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
        "texts": [text_of(one) for one in ids],
        "mask": row.mask[part].tolist(),
        "logprobs": row.logprobs[part].tolist(),
        "versions": row.versions[part].tolist(),
        "calls": row.calls[part].tolist(),
    }


@lru_cache(maxsize=4)
def _text_of(model: str) -> Callable[[int], str | None]:
    return token_texts(model)
