"""The parts of workers: what is kept of their output, and their HTTP client."""

from __future__ import annotations

import asyncio
import secrets

import pytest

from envserver.workers.http_client import Answer, HttpClient, RequestFailed
from envserver.workers.output import OutputLimiter


def test_output_holds_no_key_of_an_attempt() -> None:
    lines = OutputLimiter(0.0)
    key = secrets.token_urlsafe(24)
    passed = lines.feed(f"HTTP Request: POST http://127.0.0.1:1/r/{key}/v1/models\n".encode(), 0.0)
    assert passed == ["HTTP Request: POST http://127.0.0.1:1/r/***/v1/models"]
    assert key not in lines.tail()


OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi"


@pytest.mark.parametrize("answer", [b"", OK[:-1], b"220 mail ready\r\n"])
async def test_without_a_whole_answer_a_request_fails_and_is_not_sent_again(answer: bytes) -> None:
    answers = [OK.replace(b"\r\n", b"\r\nconnection: close\r\n", 1), answer, OK]

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answers.pop(0))
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server, HttpClient() as client:
        url = "http://127.0.0.1:{1}/r/key".format(*server.sockets[0].getsockname())
        assert await client.request("GET", url, seconds=30) == Answer(200, b"hi")
        with pytest.raises(RequestFailed):
            await client.request("GET", url, seconds=30)
    assert answers == [OK]
