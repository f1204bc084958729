"""Combines groups that become ready during a request into the next request.

In: bodies from any number of callers. Out: for each caller, its own outcome. What holds: one
request runs at a time, so a runner that makes many groups posts many at once, and an idle one
posts immediately.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from envserver_records.cancelling import cancel_and_wait
from envserver_records.errors import InputError

from .batch import MOST_BYTES, MOST_GROUPS

Send = Callable[[Sequence[bytes]], Awaitable[Sequence[InputError | None]]]
"""Returns for each body why it is refused; None if it is on disk."""


class _Waiting(NamedTuple):
    body: bytes
    done: asyncio.Future[None]


class GroupPoster:
    """Posts groups through `send`; must be closed with `close`."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._waiting: list[_Waiting] = []
        self._task: asyncio.Task[None] | None = None

    async def put(self, body: bytes) -> None:
        """Waits until the request that contains `body` was answered.

        Raises:
            InputError: the group is refused.
            Exception: whatever `send` raised.
        """
        waiting = _Waiting(body, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="posts")
        await waiting.done

    async def close(self) -> None:
        """Abandons the waiting groups."""
        if self._task is not None:
            await cancel_and_wait(self._task)
        for one in self._waiting:
            one.done.cancel()

    async def _run(self) -> None:
        while batch := self._next():
            try:
                outcomes = await self._outcomes([one.body for one in batch])
            except asyncio.CancelledError:
                for one in batch:
                    one.done.cancel()
                raise
            except Exception as error:  # noqa: BLE001 (it goes to whoever posted)
                outcomes = [error] * len(batch)
            for one, outcome in zip(batch, outcomes, strict=True):
                _answer(one.done, outcome)

    def _next(self) -> list[_Waiting]:
        """Takes as many waiting groups as fit into one request."""
        self._waiting = [one for one in self._waiting if not one.done.done()]
        size = count = 0
        for one in self._waiting[:MOST_GROUPS]:
            size += len(one.body)
            if count and size > MOST_BYTES:
                break
            count += 1
        batch, self._waiting = self._waiting[:count], self._waiting[count:]
        return batch

    async def _outcomes(self, bodies: Sequence[bytes]) -> list[Exception | None]:
        try:
            return list(await self._send(bodies))
        except InputError as error:
            if len(bodies) == 1:
                return [error]
        # The whole request was refused, perhaps for its size; try each group alone.
        return [outcome for body in bodies for outcome in await self._outcomes([body])]


def _answer(done: asyncio.Future[None], outcome: Exception | None) -> None:
    if done.done():  # the caller was cancelled
        return
    if outcome is None:
        done.set_result(None)
    else:
        done.set_exception(outcome)
