"""The worker's HTTP client, against servers that answer by the byte."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from envserver.workers.http_client import Answer, HttpClient, RequestFailed

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi"


class Server:
    """Gives the requests of all connections one answer each, in their order, byte by byte.

    The connection of the last answer is closed after it; later requests get none.
    """

    def __init__(self, answers: Sequence[bytes]) -> None:
        self.connections = 0
        self.seen: list[bytes] = []
        self.url = ""
        self._answers = list(answers)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = head.partition(b"content-length: ")[2].partition(b"\r")[0]
                self.seen.append(head + await reader.readexactly(int(length or 0)))
                if not self._answers:
                    continue
                for byte in self._answers.pop(0):
                    writer.write(bytes([byte]))
                    await writer.drain()
                if not self._answers:
                    return
        except asyncio.IncompleteReadError:  # the client closed its end
            return
        finally:
            writer.close()


@asynccontextmanager
async def served(*answers: bytes) -> AsyncIterator[tuple[Server, HttpClient]]:
    server = Server(answers)
    async with await asyncio.start_server(server.serve, "127.0.0.1", 0) as listening:
        port = listening.sockets[0].getsockname()[1]
        server.url = f"http://127.0.0.1:{port}/r/key"
        async with HttpClient() as client:
            yield server, client


async def test_requests_in_a_row_share_a_connection_and_those_at_a_time_do_not() -> None:
    chunked = b"HTTP/1.1 404 No\r\ntransfer-encoding: chunked\r\n\r\n2\r\nno\r\n1\r\n!\r\n0\r\n\r\n"
    early = b"HTTP/1.1 100 Continue\r\n\r\n"
    async with served(OK, chunked, early + OK, OK) as (server, client):
        url = f"{server.url}/x"
        got = await client.request("POST", url, b"\0\xff", headers={"a": "ä"}, seconds=30)
        assert got == Answer(200, b"hi")
        assert await client.request("GET", url, seconds=30) == Answer(404, b"no!")
        assert server.connections == 1
        both = [client.request("GET", url, seconds=30) for _ in range(2)]
        assert await asyncio.gather(*both) == [Answer(200, b"hi")] * 2
        assert server.connections == 2
        first, second = server.seen[:2]
        head, _, body = first.partition(b"\r\n\r\n")
        lines = head.decode().split("\r\n")
        assert (lines[0], body) == ("POST /r/key/x HTTP/1.1", b"\0\xff")
        assert {"a: ä", "content-length: 2"} < set(lines)
        assert b"content-length" not in second


@pytest.mark.parametrize("answer", [b"", OK[:-1], b"220 mail ready\r\n"])
async def test_without_a_whole_answer_a_request_fails_and_is_not_sent_again(answer: bytes) -> None:
    closed = OK.replace(b"\r\n", b"\r\nconnection: close\r\n", 1)
    async with served(closed, answer) as (server, client):
        assert await client.request("GET", server.url, seconds=30) == Answer(200, b"hi")
        with pytest.raises(RequestFailed):
            await client.request("GET", server.url, seconds=30)
        assert (len(server.seen), server.connections) == (2, 2)
        with pytest.raises(TimeoutError):
            await client.request("GET", server.url, seconds=0.05)


async def test_a_server_that_is_not_there_and_a_header_of_two_lines_are_refused() -> None:
    async with served() as (server, client):
        with pytest.raises(ValueError, match="of one line"):
            await client.request("GET", server.url, headers={"a": "b\r\nc: d"}, seconds=30)
        url = server.url
    async with HttpClient() as client:
        with pytest.raises(RequestFailed) as refused:
            await client.request("GET", url, seconds=30)
    assert refused.value.errno == errno.ECONNREFUSED
    assert not server.seen
