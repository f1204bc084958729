"""Sends a worker's log lines, and its readable steps in batches, to the server.

Neither waits for the server. Steps are sent a moment after they are logged, those of that moment
together, one request at a time: what is lost when the worker is killed is that moment.
"""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from contextvars import Context
from typing import Any

import orjson

from ..actions import MAX_STEPS, batch
from .http_client import HttpClient, RequestFailed

MAX_WAITING_LOG_LINES = 1000
TELL_SECONDS = 5.0
GATHER_SECONDS = 0.1
"""Maximum delay between a step and the request that sends it."""
_BATCH_BYTES = 1 << 20
_TRIES = 3


class EventUploader:
    """Sends the events of one attempt; its methods are called on the loop.

    Args:
        url: of the attempt, with its key.
    """

    def __init__(self, rollout_id: str, url: str, http: HttpClient) -> None:
        self._rollout_id = rollout_id
        self._url = url
        self._http = http
        self._lines: deque[bytes] = deque()
        self._lines_dropped = 0
        self._sending_lines: asyncio.Task[None] | None = None
        self._steps: deque[bytes] = deque()
        self._steps_sent = 0
        self._steps_dropped = 0
        self._sending_steps: asyncio.Task[None] | None = None
        self._hurry = asyncio.Event()

    def line(self, line: bytes) -> None:
        """A log line (JSON) to be sent; what is over the bound is dropped and counted."""
        if len(self._lines) >= MAX_WAITING_LOG_LINES:
            self._lines_dropped += 1
            return
        self._lines.append(line)
        if self._sending_lines is None or self._sending_lines.done():
            self._sending_lines = _started(self._send_lines())

    def step(self, step: bytes) -> None:
        """A step (see `actions.encode`) to be sent."""
        if self._steps_sent + len(self._steps) >= MAX_STEPS:
            self._steps_dropped += 1
            return
        self._steps.append(step)
        if self._sending_steps is None or self._sending_steps.done():
            self._sending_steps = _started(self._send_steps())

    async def finish(self) -> None:
        """Sends what waits."""
        self._hurry.set()
        if self._sending_steps is not None:
            await self._sending_steps
        if self._steps_dropped:
            await self._post("actions", batch(self._steps_sent, [], self._steps_dropped))
        if self._sending_lines is not None:
            await self._sending_lines
        if self._lines_dropped:
            facts = {"lines": self._lines_dropped}
            await self._send_line(orjson.dumps({"event": "log_lines_dropped", "facts": facts}))

    async def _send_lines(self) -> None:
        while self._lines:
            await self._send_line(self._lines.popleft())

    async def _send_line(self, line: bytes) -> None:
        if not await self._post("log", line):  # stderr still reaches the server's log
            sys.stderr.write(f"{self._rollout_id}: {line.decode(errors='replace')}\n")

    async def _send_steps(self) -> None:
        while self._steps:
            if not self._hurry.is_set():
                await _either(self._hurry, GATHER_SECONDS)
            steps = self._next_steps()
            body = batch(self._steps_sent, steps, self._steps_dropped)
            self._steps_sent += len(steps)
            for _ in range(_TRIES):  # the server takes each step once
                if await self._post("actions", body):
                    break

    def _next_steps(self) -> list[bytes]:
        steps: list[bytes] = []
        size = 0
        while self._steps and (not steps or size + len(self._steps[0]) <= _BATCH_BYTES):
            steps.append(self._steps.popleft())
            size += len(steps[-1])
        return steps

    async def _post(self, path: str, body: bytes) -> bool:
        """Returns whether the server took it."""
        headers = {"content-type": "application/json"}
        try:
            answer = await self._http.request(
                "POST", f"{self._url}/{path}", body, headers=headers, seconds=TELL_SECONDS
            )
        except (RequestFailed, TimeoutError):
            return False
        return answer.status < 400


def _started(work: Any) -> asyncio.Task[None]:
    """Not one of the agent's own tasks, which end with it."""
    return asyncio.get_running_loop().create_task(work, context=Context())


async def _either(event: asyncio.Event, seconds: float) -> None:
    """Returns when `event` is set, or after `seconds`."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return
