"""Any bytes from an engine give a correct answer or a typed error, in time and without leaks.

Hypothesis writes to a real socket; the engine's client reads.
"""

import asyncio
import gzip
import itertools
import json
import zlib
from collections.abc import Iterator
from typing import Any

import pytest
from envserver_records.errors import EngineError, EngineGarbage, EngineTimeout
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.cases import cases_of
from support.extent import examples
from support.raw_server import End, RawServer, chunked, cut, head, raw_server
from support.waiting import PATIENCE, until

from envserver import OpenAIConfig
from envserver.models.connections import retry_after
from envserver.models.engine import EngineRequest
from envserver.models.openai import OpenAIEngine

SECONDS, HANG_SECONDS = 60.0, 0.1
"""For a call; where nothing comes any more."""
ASK: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
slow = settings(
    max_examples=examples(60),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
)


class Bench:
    """An engine before a server that writes what it is told, on a loop of its own."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()
        self.raw: RawServer
        self.engine: OpenAIEngine
        self._runner.run(self._open())

    async def _open(self) -> None:
        self._serving = raw_server()
        self.raw = await self._serving.__aenter__()
        self.engine = OpenAIEngine(
            OpenAIConfig(base_url=self.raw.url),
            tries=4,
            pause_seconds=0.001,
            check_seconds=0.1,
            measure_seconds=0.01,
        )
        await self.engine.__aenter__()

    def close(self) -> None:
        """Ends both. Fails if a connection is left, or if the engine's background had died."""

        async def end() -> None:
            await self.engine.__aexit__(None, None, None)
            await until(lambda: not self.raw.connections)
            await self._serving.__aexit__(None, None, None)

        self._runner.run(end())
        self._runner.close()

    def post(self, pieces: list[bytes], end: End) -> Any:
        """What a call gives if that is written: its answer, or the EngineError."""
        return self._runner.run(self._call(pieces, end, self._post))

    def stream(self, pieces: list[bytes], end: End) -> tuple[list[Any], EngineError | None]:
        """The chunks that arrive, and the error behind them."""
        chunks: list[Any] = []
        ended = self._runner.run(
            self._call(pieces, end, lambda seconds: self._stream(chunks, seconds))
        )
        return chunks, ended if isinstance(ended, EngineError) else None

    async def _call(self, pieces: list[bytes], end: End, work: Any) -> Any:
        self.raw.pieces, self.raw.end = pieces, end
        seconds = HANG_SECONDS if end == "hang" else SECONDS
        async with asyncio.timeout(PATIENCE):
            try:
                result = await work(seconds)
            except EngineError as error:
                result = error
        (replica,) = await self.engine.health()
        assert (replica.in_flight, replica.waiting) == (0, 0)
        # One is kept for the next call; health checks and metrics may be using others.
        await until(lambda: len(self.raw.connections) <= 3)
        return result

    async def _post(self, seconds: float) -> Any:
        return await self.engine.post(EngineRequest("/v1/x", ASK, "r", seconds))

    async def _stream(self, chunks: list[Any], seconds: float) -> None:
        async with self.engine.stream(
            EngineRequest("/v1/x", {**ASK, "stream": True}, "r", seconds)
        ) as streamed:
            async for chunk in streamed:
                chunks.append(chunk)


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.close()


# Bodies

BYTES: dict[str, list[bytes]] = {
    name: [text.encode("latin-1") for text in texts]
    for name, texts in cases_of(__file__, "engine_bytes.toml").items()
}


def deep(levels: int) -> bytes:
    return b'{"a":' * levels + b"1" + b"}" * levels


ERRORS = [*BYTES["errors"], b'{"error": %b}' % deep(200)]
GARBAGE = [*BYTES["garbage"], deep(2000), deep(200)]


places = st.lists(st.integers(0, 200), max_size=4)


ENDS = st.sampled_from(["close"] * 4 + ["reset"] * 4 + ["hang"])


@slow
@given(data=st.data(), places=places, end=ENDS)
def test_an_answer_that_breaks_off_is_a_typed_error(
    bench: Bench, data: st.DataObject, places: list[int], end: End
) -> None:
    body = b'{"id": "an answer of some length"}'
    whole = data.draw(
        st.sampled_from(
            [
                head("application/json", len(body)) + body,
                head("application/json", None, "transfer-encoding: chunked")
                + chunked(cut(body, [9])),
            ]
        )
    )
    got = bench.post(cut(whole[: data.draw(st.integers(0, len(whole) - 1))], places), end)
    assert type(got) is (EngineTimeout if end == "hang" else EngineGarbage)


FIELDS = [*BYTES["fields"], b"x: " + b"y" * 10_000 + b"\r\n"]
ZIPPED = gzip.compress(b'{"id": "x"}')
TAILS = [
    *BYTES["tails"],
    *(ZIPPED, ZIPPED[:-9], ZIPPED + b"rest", zlib.compress(b'{"id": "x"}')),
    b"%x\r\n%s\r\n0\r\n\r\n" % (len(ZIPPED), ZIPPED),
]


@slow
@given(
    start=st.sampled_from(BYTES["heads"]),
    fields=st.lists(st.sampled_from(FIELDS), max_size=4),
    tail=st.sampled_from(TAILS) | st.binary(max_size=60),
    places=places,
    end=ENDS,
    streams=st.booleans(),
)
def test_whatever_is_sent_for_http_ends_typed_and_in_time(
    bench: Bench,
    start: bytes,
    fields: list[bytes],
    tail: bytes,
    places: Any,
    end: End,
    streams: bool,
) -> None:
    pieces = cut(start + b"".join(fields) + b"\r\n" + tail, places)
    if streams:
        chunks, error = bench.stream(pieces, end)
        assert error is not None or b"[DONE]" in tail
        assert all(isinstance(chunk, dict) for chunk in chunks)
    else:
        got = bench.post(pieces, end)
        assert isinstance(got, EngineError) or got in ({"id": "x"}, {})


def test_any_date_of_retry_after_is_a_number_of_seconds() -> None:
    zones = ("+0000", "-2359", "+99999999", "+999999999999", "-" + "9" * 40, "x")
    for zone, year in itertools.product(zones, ("1", "0001", "2100", "9999", "99999")):
        assert retry_after({"retry-after": f"Fri, 01 Jan {year} 00:00:00 {zone}"}) >= 0, zone


@pytest.mark.parametrize("body", [ERRORS[-1], b"<p>" * 30_000, b'{"error": [[[1]]]}', b"\xff"])
def test_the_body_of_a_failure_is_told_whatever_it_is(bench: Bench, body: bytes) -> None:
    for status in (b"500", b"404"):
        data = b"HTTP/1.1 %b X\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body)
        assert f"HTTP {status.decode()}" in bench.post([data], "keep").message


# Streams

CHUNKS = [{"id": "a", "choices": [{"delta": {"content": "Hé"}}]}, {"id": "b"}, {"usage": None}]
END = st.sampled_from(["\n", "\n", "\r\n", "\r"])
NOISE = st.sampled_from([": keep-alive", "", "event: x", "id: 1", "retry: 5", "data", "what"])


def written(chunk: dict[str, Any], lines: bool, end: str) -> str:
    """`chunk` as one event, its JSON over several `data` lines if `lines`."""
    text = json.dumps(chunk, indent=1 if lines else None, ensure_ascii=False)
    return "".join(f"data: {line}{end}" for line in text.split("\n")) + end


@st.composite
def streams(draw: st.DrawFn) -> tuple[bytes, list[dict[str, Any]]]:
    """A stream up to its `[DONE]`, and the chunks in it."""
    text = draw(st.sampled_from(["", "\ufeff"]))
    chunks = draw(st.lists(st.sampled_from(CHUNKS), max_size=6))
    for chunk in chunks:
        for noise in draw(st.lists(NOISE, max_size=2)):
            text += noise + draw(END)
            # An empty `data` is an event of its own, or a line break in the next chunk's JSON.
            text += "\n" if noise == "data" else ""
        text += written(chunk, draw(st.booleans()), draw(END))
    return (
        text + draw(st.sampled_from(["data: [DONE]\n\n", "data:[DONE]\r\n\r\n", "data: [DONE]"]))
    ).encode(), chunks


cuts = st.lists(st.integers(0, 500), max_size=30)


def sent(data: bytes, cuts: list[int], way: str) -> list[bytes]:
    """A stream as it goes over the wire."""
    pieces = cut(data, cuts)
    if way == "chunks":
        body = chunked(pieces)
        return [head("text/event-stream", None, "transfer-encoding: chunked"), *cut(body, cuts)]
    length = len(data) if way == "length" else None
    return [head("Text/Event-Stream; charset=utf-8", length), *pieces]


WAYS = st.sampled_from(["chunks", "chunks", "length", "close"])


@slow
@given(stream=streams(), cuts=cuts, way=WAYS)
def test_a_stream_is_read_however_it_is_sent(
    bench: Bench, stream: tuple[bytes, list[Any]], cuts: list[int], way: str
) -> None:
    data, chunks = stream
    assert bench.stream(sent(data, cuts, way), "close" if way == "close" else "keep") == (
        chunks,
        None,
    )


@slow
@given(stream=streams(), cuts=cuts, way=WAYS, end=ENDS, share=st.floats(0, 1))
def test_a_stream_that_breaks_off_gives_its_beginning_and_a_typed_error(
    bench: Bench, stream: tuple[bytes, list[Any]], cuts: list[int], way: str, end: End, share: float
) -> None:
    data, chunks = stream
    whole = b"".join(sent(data[: data.rindex(b"[DONE]")], cuts, way))
    # What is complete has ended, whether or not the connection hangs then.
    size = min(int(share * len(whole)), len(whole) - (end == "hang"))
    got, error = bench.stream(cut(whole[:size], cuts), end)
    assert got == chunks[: len(got)]
    assert isinstance(error, EngineTimeout if end == "hang" else EngineError)


BAD_EVENTS = st.sampled_from([*ERRORS, *[body for body in GARBAGE if body and b"\n" not in body]])


@slow
@given(before=st.lists(st.sampled_from(CHUNKS), max_size=3), bad=BAD_EVENTS, cuts=cuts, way=WAYS)
def test_an_event_that_is_no_chunk_ends_a_stream_with_a_typed_error(
    bench: Bench, before: list[dict[str, Any]], bad: bytes, cuts: list[int], way: str
) -> None:
    text = "".join(written(chunk, False, "\n") for chunk in before).encode()
    data = text + b"data: " + bad + b"\n\n" + b"data: [DONE]\n\n"
    chunks, error = bench.stream(sent(data, cuts, way), "close")
    assert chunks == before
    assert error is not None
