"""Calls to an HTTP server, many at once and cheaply, and what they took: the benchmark's agents."""

from __future__ import annotations

import asyncio
import os
import re
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, cast
from urllib.parse import urlsplit

_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
_END_OF_CHUNKS = b"0\r\n\r\n"


def pin(core: int) -> None:
    """Keeps this process on one core, where the system can."""
    if hasattr(os, "sched_setaffinity") and core >= 0:
        os.sched_setaffinity(0, {core})


def cpu_seconds(pid: int) -> float:
    """CPU time of a process so far, that of its kernel calls and threads too.

    By the clock that clock_getcpuclockid(3) names: /proc counts in hundredths of a second.
    """
    return time.clock_gettime((~pid << 3) | 2)


class Measured(NamedTuple):
    """What some calls took.

    Args:
        rate: calls per second.
        latencies: seconds of each call.
        asked: calls in all, those that were not measured among them.
    """

    rate: float
    latencies: list[float]
    asked: int

    def milliseconds(self, share: float) -> float:
        """The latency under which that share of the calls is."""
        ordered = sorted(self.latencies)
        return 1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))]


class _Closed(ConnectionError):
    """A connection was closed instead of an answer: as servers do where one was idle for long."""


class Client(asyncio.Protocol):
    """A connection that is kept; one request at a time, its answer is read and thrown away."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._answered: asyncio.Future[None] | None = None
        self._data = b""
        self._missing: int | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is not a subclass

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        if self._answered is not None:
            begun = self._missing is not None or self._data
            self._end(ConnectionError(f"broke off: {error}") if begun else _Closed(f"{error}"))

    def data_received(self, data: bytes) -> None:
        if self._missing is None:
            self._data += data
            head, found, data = self._data.partition(b"\r\n\r\n")
            if not found:
                return
            if b" 200 " not in head[:16]:
                self._end(ConnectionError(self._data[:2000].decode()))
                return
            length = _LENGTH.search(head)
            self._missing = int(length[1]) if length else -1
            self._data = b""
        if self._missing >= 0:
            self._missing -= len(data)
            ended = self._missing == 0
        else:
            self._data = (self._data + data)[-len(_END_OF_CHUNKS) :]
            ended = self._data == _END_OF_CHUNKS
        if ended:
            self._end(None)

    async def ask(self, url: str, request: bytes) -> None:
        """One request, to the end of its answer.

        Raises:
            ConnectionError: the answer is not HTTP 200, or breaks off.
        """
        loop = asyncio.get_running_loop()
        while True:
            fresh = self._transport is None
            if self._transport is None:
                where = urlsplit(url)
                await loop.create_connection(lambda: self, where.hostname, where.port)
            assert self._transport is not None
            self._answered = loop.create_future()
            self._transport.write(request)
            try:
                await self._answered
                return
            except _Closed:
                if fresh:
                    raise

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def _end(self, error: Exception | None) -> None:
        answered, self._answered = self._answered, None
        self._data, self._missing = b"", None
        if answered is None or answered.done():  # given up
            return
        if error is None:
            answered.set_result(None)
        else:
            answered.set_exception(error)


class Agent:
    """One client and the requests that it sends to `url`, one after the other."""

    def __init__(self, url: str, bodies: Sequence[bytes]) -> None:
        self._client = Client()
        self._url = url
        self._requests = [_request(url, body) for body in bodies]

    async def ask(self, turn: int) -> float:
        """Seconds that the request of one turn took; after the last the first comes again."""
        began = time.perf_counter()
        await self._client.ask(self._url, self._requests[turn % len(self._requests)])
        return time.perf_counter() - began

    def close(self) -> None:
        """Ends its connection."""
        self._client.close()


@contextmanager
def agents(urls: Sequence[str], bodies: Sequence[bytes]) -> Iterator[list[Agent]]:
    """An agent for each of `urls`, which sends `bodies` there."""
    made = [Agent(url, bodies) for url in urls]
    try:
        yield made
    finally:
        for agent in made:
            agent.close()


def _request(url: str, body: bytes) -> bytes:
    where = urlsplit(url)
    return (
        b"POST %b HTTP/1.1\r\nhost: %b\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n%b"
    ) % (where.path.encode(), where.netloc.encode(), len(body), body)


async def by_turns(all_agents: Sequence[Agent], turns: range) -> Measured:
    """Every agent goes through `turns`, all of them at once."""
    latencies: list[float] = []

    async def go(agent: Agent) -> None:
        for turn in turns:
            latencies.append(await agent.ask(turn))

    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for agent in all_agents:
            group.create_task(go(agent))
    return Measured(len(latencies) / (time.perf_counter() - began), latencies, len(latencies))


async def for_a_time(all_agents: Sequence[Agent], call_seconds: float, seconds: float) -> Measured:
    """Agents that begin one after the other within `call_seconds`, as if their answers had many
    lengths; measured are the calls that end once all are at work, for about `seconds`."""
    begin = time.perf_counter() + 2 * call_seconds
    end = begin + seconds
    latencies: list[float] = []
    asked = 0

    async def go(agent: Agent, pause: float) -> None:
        nonlocal asked
        await asyncio.sleep(pause)
        measured = False
        while time.perf_counter() < end or not measured:
            asked += 1
            latency = await agent.ask(0)
            measured = begin <= time.perf_counter()
            if measured:
                latencies.append(latency)

    async with asyncio.TaskGroup() as group:
        for place, agent in enumerate(all_agents):
            group.create_task(go(agent, call_seconds * place / len(all_agents)))
    # Nobody pauses between two calls; to count those of a short time would give whole numbers.
    return Measured(len(all_agents) / statistics.fmean(latencies), latencies, asked)
