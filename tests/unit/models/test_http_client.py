"""The HTTP client of engines: connections that are kept, that end, and whose reader is slow.

What it makes of bytes that are not as they should be is in `test_engine_fuzz.py`.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from support.raw_server import RawServer, head, raw_server
from support.waiting import until

from envserver.models.connections import watchful_socket
from envserver.models.http_client import BrokenOff, HttpPool, Response, origin_of

LARGE = 32_000_000


async def resolve(host: str, port: int) -> list[Any]:
    """The addresses of a host."""
    return await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)


@asynccontextmanager
async def server_and_pool() -> AsyncIterator[tuple[RawServer, HttpPool]]:
    async with raw_server() as raw:
        pool = HttpPool(resolve, watchful_socket)
        yield raw, pool
        pool.close()
        await until(lambda: not raw.connections)


async def ask(pool: HttpPool, raw: RawServer, method: str = "POST") -> Response:
    payload = b"{}" if method == "POST" else None
    return await pool.send(origin_of(raw.url), method, "/x", b"", payload)


async def read(response: Response) -> bytes:
    parts = []
    while part := await response.read():
        parts.append(part)
    response.release()
    return b"".join(parts)


async def test_a_connection_is_kept_after_a_whole_answer_and_closed_after_a_part() -> None:
    async with server_and_pool() as (raw, pool):
        raw.pieces, raw.end = [head("text/plain", 2), b"hi"], "keep"
        for _ in range(3):
            assert await read(await ask(pool, raw)) == b"hi"
        assert raw.accepted == 1
        raw.pieces = [head("text/plain", 4), b"hi"]
        (await ask(pool, raw)).release()
        raw.pieces = [head("text/plain", 2), b"hi"]
        assert await read(await ask(pool, raw)) == b"hi"
        assert raw.accepted == 2


async def test_a_get_on_a_connection_that_has_ended_is_sent_again_and_a_post_is_not() -> None:
    async with server_and_pool() as (raw, pool):
        raw.pieces, raw.end = [head("text/plain", 2), b"hi"], "keep"
        await read(await ask(pool, raw))
        # It answers once more, and then ends: with nothing.
        raw.pieces, raw.end = [], "close"
        with pytest.raises(BrokenOff):
            await ask(pool, raw)
        raw.pieces, raw.end = [head("text/plain", 2), b"hi"], "keep"
        await read(await ask(pool, raw))
        raw.pieces, raw.end = [], "close"
        asking = asyncio.create_task(ask(pool, raw, "GET"))
        await until(lambda: raw.accepted == 3)
        with pytest.raises(BrokenOff):
            await asking


async def test_a_peer_waits_for_a_slow_reader() -> None:
    async with server_and_pool() as (raw, pool):
        raw.pieces, raw.end = [head("text/plain", LARGE), bytes(LARGE)], "keep"
        response = await ask(pool, raw)
        await asyncio.sleep(0.2)
        first = len(await response.read())
        assert first < LARGE / 10
        assert first + len(await read(response)) == LARGE
        assert raw.accepted == 1 and response.complete
