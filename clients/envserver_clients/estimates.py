"""Reads the server's estimates of how often each task is solved.

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
    """The success rate of one task.

    Args:
        number: order in which tasks were first scored.
        attempts: rollouts so far, without those of evaluations.
        mean_reward: their mean, weighted towards recent policies; None if all are out of date.
        success: probability that the next rollout solves the task, in (0, 1); 0.5 if unknown.
        weight: attempts that still count.
        policy_version: the last one that tried the task; -1 if unknown.
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
    """Reads all pages; see `EnvClient.task_estimates`."""
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
        raise InputError(
            f"The server's answer is not a page of estimates: {error}.", place="body"
        ) from error
