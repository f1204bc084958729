"""The parts of workers: frames, limited output, the blame for a death, and their HTTP client."""

from __future__ import annotations

import asyncio
import errno
import secrets
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest
from envserver_records.errors import WorkerError, WorkerGarbage, WorkerHung
from hypothesis import given
from hypothesis import strategies as st

from envserver.telemetry.log_budget import BURST_BYTES, BYTES_PER_SECOND
from envserver.workers.deaths import KillReason, ProcessEnd, errors_by_rollout
from envserver.workers.frames import FrameReader, encode
from envserver.workers.http_client import Answer, HttpClient, RequestFailed
from envserver.workers.output import TAIL_BYTES, OutputLimiter


@given(st.lists(st.lists(st.text(), min_size=1), max_size=5), st.integers(1, 7))
def test_frames_survive_any_cut(frames: list[list[str]], step: int) -> None:
    data = b"".join(encode(*frame) for frame in frames)
    reader = FrameReader()
    pieces = (data[start : start + step] for start in range(0, len(data), step))
    assert [frame for piece in pieces for frame in reader.feed(piece)] == frames


@given(st.binary(max_size=300))
def test_what_is_no_frame_is_refused_or_waits(data: bytes) -> None:
    try:
        for frame in FrameReader().feed(data):
            assert frame and all(isinstance(part, str) for part in frame)
    except ValueError:
        return


PIECES = st.builds(
    lambda size, end: b"x" * size + end, st.integers(0, 9000), st.sampled_from([b"", b"\n"])
)


@given(st.lists(PIECES, max_size=60), st.floats(0, 2))
def test_every_byte_of_output_is_passed_on_or_counted(pieces: list[bytes], pause: float) -> None:
    lines, passed, dropped = OutputLimiter(0.0), 0, 0
    for number, piece in enumerate(pieces):
        passed += sum(len(line) for line in lines.feed(piece, number * pause))
        dropped += lines.take_dropped(number * pause)
    passed += sum(len(line) for line in lines.finish(len(pieces) * pause))
    dropped += lines.take_dropped()
    assert passed + dropped == b"".join(pieces).count(b"x")
    assert passed <= BURST_BYTES + len(pieces) * pause * BYTES_PER_SECOND
    assert lines.tail().encode() == b"".join(pieces)[-TAIL_BYTES:].strip()


def test_a_flood_is_told_once_a_second() -> None:
    lines = OutputLimiter(0.0)
    told = []
    for tick in range(300):  # three seconds of a megabyte a tick
        lines.feed(b"y" * 1_000_000 + b"\n", tick / 100)
        told.append(lines.take_dropped(tick / 100))
    assert sum(map(bool, told)) == 3
    assert sum(told) + lines.take_dropped() > 298_000_000


def test_output_holds_no_key_of_an_attempt() -> None:
    lines = OutputLimiter(0.0)
    key = secrets.token_urlsafe(24)
    passed = lines.feed(f"HTTP Request: POST http://127.0.0.1:1/r/{key}/v1/models\n".encode(), 0.0)
    assert passed == ["HTTP Request: POST http://127.0.0.1:1/r/***/v1/models"]
    assert key not in lines.tail()


@given(
    st.sets(st.text(min_size=1), max_size=6),
    st.sampled_from([None, WorkerHung, WorkerGarbage]),
    st.integers(0, 3),
    st.sampled_from([0, 3 << 8, signal.SIGKILL, signal.SIGSEGV, None]),
)
def test_a_death_blames_those_who_are_known_or_suspects_all(
    running: set[str], kind: type[WorkerError] | None, known: int, status: int | None
) -> None:
    culprits = frozenset(sorted(running)[:known]) if kind else frozenset()
    reason = KillReason(kind, "so", culprits) if kind else None
    errors = errors_by_rollout(running, ProcessEnd(status), reason)
    assert set(errors) == running
    blamed = {one for one, error in errors.items() if not error.detail.get("mate")}
    suspects = {one for one, error in errors.items() if error.detail.get("suspect")}
    if culprits:
        assert (blamed, suspects) == (culprits, set())
    elif len(running) == 1:
        assert (blamed, suspects) == (running, set())
    else:
        assert (blamed, suspects) == (set(), running)


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
