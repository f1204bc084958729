"""GET /v1/groups/ID/rollouts/N: one rollout of a group, and its rows token by token."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import lru_cache
from typing import Annotated, Any, Final

import msgspec
from envserver_records.errors import ConflictError, NotFoundError
from envserver_records.records import Group, Trajectory, unpack
from envserver_records.records import Sequence as Row
from fastapi import APIRouter, Path, Query
from starlette.responses import Response

from ...formats.token_texts import token_texts
from ...store.interface import ReadGroups
from .answers import answers, json_answer
from .models import RolloutAnswer, TokensAnswer

MOST_TOKENS: Final = 32_768
_MOST_ROLLOUTS: Final = 2**31 - 1

_Number = Annotated[int, Path(ge=0, le=_MOST_ROLLOUTS, description="position in the group, from 0")]


def add_rollout_routes(router: APIRouter, store: ReadGroups) -> None:
    @router.get(
        "/v1/groups/{group_id:path}/rollouts/{number}",
        responses=answers(RolloutAnswer, 404, 409, 422, what="The rollout."),
    )
    async def get_rollout(group_id: str, number: _Number) -> Response:
        """Returns one rollout of a group: conversations, score, usage, flags, and what is known of
        its rows but their tokens (`/tokens` has those). Nothing is leased or consumed.
        """
        group, rollout = await _read(store, group_id, number)
        # A long rollout takes longer to write as JSON than the event loop may wait.
        return await asyncio.to_thread(lambda: json_answer(_shown(group, rollout, number)))

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
    (stored,) = await store.rows([group_id])
    if stored.format != "group":
        raise ConflictError(
            f"{group_id} was posted over the Atropos wire, which has rows and no rollouts.",
            hint="GET /v1/groups/ID has all of it.",
        )
    (body,) = await store.bodies([group_id])
    group = await asyncio.to_thread(unpack, body, Group)
    if number >= len(group.trajectories):
        raise NotFoundError(f"{group_id} has {len(group.trajectories)} rollouts.")
    return group, group.trajectories[number]


def _shown(group: Group, rollout: Trajectory, number: int) -> dict[str, Any]:
    plain = msgspec.structs.replace(rollout, sequences=[])
    facts = msgspec.structs.replace(group, trajectories=[])
    of_group = msgspec.to_builtins(facts, enc_hook=str)
    del of_group["trajectories"]
    shown = msgspec.to_builtins(plain, enc_hook=str)
    shown["sequences"] = [_row(one) for one in rollout.sequences]
    return {
        "group": of_group,
        "rollouts": len(group.trajectories),
        "number": number,
        "rollout": shown,
    }


def _row(row: Row) -> dict[str, Any]:
    return {
        "length": row.tokens.size,
        "trained": int(row.mask.sum()),
        "agent": row.agent,
        "flags": row.flags,
        "path": row.path,
        "sampling": msgspec.to_builtins(row.sampling),
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
