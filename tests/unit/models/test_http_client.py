"""The HTTP client of engines: connections that are kept, that end, and whose reader is slow.

What it makes of bytes that are not as they should be is in `test_engine_fuzz.py`.
"""

from __future__ import annotations

import asyncio
import gzip
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from support.raw_server import RawServer, head, raw_server
from support.waiting import until

from envserver.models.connections import watchful_socket
from envserver.models.http_client import BrokenOff, HttpPool, NoConnection, Response, origin_of

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


HI = head("text/plain", 2) + b"hi"
NO = head("text/plain", 2) + b"no"


@pytest.mark.parametrize(
    ("answer", "body", "kept"),
    [
        (HI, b"hi", True),
        (HI + b"\0", b"hi", False),  # what follows an answer does not change it
        (HI + NO, b"hi", False),
        (b"HTTP/1.1 101 Else\r\n\r\n", b"", False),
    ],
)
async def test_a_connection_is_kept_after_a_whole_answer_only(
    answer: bytes, body: bytes, kept: bool
) -> None:
    async with server_and_pool() as (raw, pool):
        raw.pieces, raw.end = [answer], "keep"
        for count in (1, 2, 3):
            assert await read(await ask(pool, raw)) == body
            assert raw.accepted == (1 if kept else count)
        accepted = raw.accepted
        raw.pieces = [head("text/plain", 4), b"hi"]
        (await ask(pool, raw)).release()
        raw.pieces = [HI]
        assert await read(await ask(pool, raw)) == b"hi"
        assert raw.accepted == accepted + (1 if kept else 2)


async def test_a_get_on_a_connection_that_has_ended_is_sent_again_and_a_post_is_not() -> None:
    async with server_and_pool() as (raw, pool):
        raw.pieces, raw.end = [HI], "keep"
        await read(await ask(pool, raw))
        # It answers once more, and then ends: with nothing.
        raw.pieces, raw.end = [], "close"
        with pytest.raises(BrokenOff):
            await ask(pool, raw)
        raw.pieces, raw.end = [HI], "keep"
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


@pytest.mark.parametrize("late", ["answer", "end"])
async def test_a_kept_connection_on_which_something_came_is_not_used(late: str) -> None:
    async with server_and_pool() as (raw, pool):
        raw.pieces, raw.end = [HI], "keep"
        await read(await ask(pool, raw))
        (writer,) = raw.connections
        # It is there before the next request, and the client's loop has not read it yet.
        if late == "answer":
            writer.write(NO)
        else:
            writer.write_eof()
        assert await read(await ask(pool, raw)) == b"hi"
        assert raw.accepted == 2


@pytest.mark.parametrize(
    "field",
    [
        "transfer-encoding: gzip\r\ntransfer-encoding: chunked",
        "transfer-encoding: chunked;x",
        "content-encoding: gzip",
    ],
)
async def test_a_body_that_is_damaged_or_has_no_end_is_cut_off(field: str) -> None:
    async with server_and_pool() as (raw, pool):
        raw.pieces = [head("text/plain", None, field), b"2\r\nhi\r\n"]
        response = await ask(pool, raw)
        with pytest.raises(BrokenOff):
            await read(response)
        response.release()


async def test_a_body_zipped_in_parts_is_read_whole_and_others_have_their_turn_meanwhile() -> None:
    async with server_and_pool() as (raw, pool):
        zipped = gzip.compress(b"one ") + gzip.compress(b"two")
        raw.pieces, raw.end = [head("", len(zipped), "content-encoding: gzip"), zipped], "keep"
        assert await read(await ask(pool, raw)) == b"one two"
        zipped = gzip.compress(bytes(LARGE)) + gzip.compress(b"") * 1000
        raw.pieces, raw.end = [head("", len(zipped), "content-encoding: gzip"), zipped], "keep"
        turns = 0

        async def other() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        response = await ask(pool, raw)
        await until(lambda: response.complete)
        turning = asyncio.create_task(other())
        assert len(await read(response)) == LARGE
        turning.cancel()
        assert turns > 1000 + LARGE / 1_000_000


async def test_a_closed_pool_makes_no_connection() -> None:
    async def slowly(host: str, port: int) -> list[Any]:
        pool.close()
        return await resolve(host, port)

    async with raw_server() as raw:
        pool = HttpPool(slowly, watchful_socket)
        with pytest.raises(NoConnection):
            await ask(pool, raw)
        await until(lambda: not raw.connections)
