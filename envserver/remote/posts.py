"""What is ready while one request is under way goes into the next one together.

In: bodies from any number of callers. Out: to each its own outcome. What holds: one request is
under way at a time, so that a joiner that makes many groups posts many at once; one that is idle
waits for nobody.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from envserver_records.errors import InputError

from .batch import MOST_BYTES, MOST_GROUPS

Send = Callable[[Sequence[bytes]], Awaitable[Sequence[InputError | None]]]
"""Returns for each body why it is refused, None where it is on disk."""


class _Waiting(NamedTuple):
    body: bytes
    done: asyncio.Future[None]


class GroupPoster:
    """GroupPoster through `send`; `close` it."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._waiting: list[_Waiting] = []
        self._task: asyncio.Task[None] | None = None

    async def put(self, body: bytes) -> None:
        """Returns when the request with `body` was answered.

        Raises:
            InputError: it is refused.
            Exception: what `send` raised.
        """
        waiting = _Waiting(body, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="posts")
        await waiting.done

    async def close(self) -> None:
        """Gives up what waits."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
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
        """What waits, as much as one request may hold."""
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
        # It was the request that was refused, perhaps for its size: each by itself may do.
        return [outcome for body in bodies for outcome in await self._outcomes([body])]


def _answer(done: asyncio.Future[None], outcome: Exception | None) -> None:
    if done.done():  # its caller was cancelled
        return
    if outcome is None:
        done.set_result(None)
    else:
        done.set_exception(outcome)
