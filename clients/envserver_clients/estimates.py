"""How often each task is solved, as the server estimates it from what was scored.

In: answers to `GET /v1/tasks/estimates`. Out: estimates, in the order in which tasks were first
scored.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final
from urllib.parse import urlencode

import msgspec
from envserver_records import InputError

from .protocol import Answer, Call

_MOST: Final = 1024


class TaskEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """What the server knows of one task.

    Args:
        number: order in which tasks were first scored.
        attempts: rollouts that were ever counted; those of evaluations are not.
        mean_reward: of them, late policies counting more; None where nothing of it holds any more.
        success: how likely the next rollout solves it, in (0, 1); 0.5 where nothing is known.
        weight: attempts that still count.
        policy_version: the last that tried it, -1 where none is known.
        scored_at: seconds of the server's clock.
    """

    number: int
    task_id: str
    environment: str
    split: str
    attempts: int
    mean_reward: float | None
    success: float
    weight: float
    policy_version: int
    scored_at: float


class _Page(msgspec.Struct):
    estimates: list[TaskEstimate]
    next: int | None


async def read_estimates(
    send: Callable[[Call], Awaitable[Answer]],
    *,
    environment: str | None,
    split: str | None,
    after: int,
    limit: int | None,
) -> list[TaskEstimate]:
    """Page by page; see `EnvClient.task_estimates`."""
    named = {"environment": environment, "split": split}
    names = {name: value for name, value in named.items() if value is not None}
    found: list[TaskEstimate] = []
    following: int | None = after
    while following is not None and (limit is None or len(found) < limit):
        most = _MOST if limit is None else min(_MOST, limit - len(found))
        query: dict[str, Any] = {"after": following, "limit": most, **names}
        page = _decoded(await send(Call("GET", f"/v1/tasks/estimates?{urlencode(query)}")))
        found += page.estimates
        following = page.next
    return found


def _decoded(answer: Answer) -> _Page:
    try:
        return msgspec.json.decode(answer.content, type=_Page)
    except msgspec.DecodeError as error:
        raise InputError(f"The server's answer is no list: {error}.", place="body") from error
