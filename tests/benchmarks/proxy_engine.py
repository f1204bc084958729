"""An engine for the benchmark of the proxy: a process that answers with prebuilt bytes.

    python proxy_engine.py CORE     prints the two ports that it listens at

At the first port it answers at once: what is measured then is the proxy alone. At the second it
takes the time of an engine that batches: in each step every call in flight gets one token, and a
step takes the longer the more calls there are.
"""

import asyncio
import re
import sys
from collections.abc import Iterator
from typing import cast

import orjson
import proxy_calls as calls
import uvloop
from proxy_load import pin

STEP_SECONDS = 0.006
STEP_SECONDS_PER_CALL = 0.00005
"""At 64 calls in flight 7,000 tokens per second, at 512 16,000."""
_PROMPT = ",".join(map(str, calls.FORMAT.encode(calls.prose(200)))).encode()
_IDS = re.compile(rb'"token_ids":\[([0-9,]*)\]')
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\n%b\r\n\r\n"
_STREAM = _HEAD % (b"text/event-stream; charset=utf-8", b"transfer-encoding: chunked")


class Batch:
    """The answers that are being sampled; without `seconds` each is written at once."""

    def __init__(self, *, timed: bool) -> None:
        self._timed = timed
        self._sampling: list[tuple[asyncio.Transport, Iterator[bytes]]] = []
        self._next = 0.0

    def begin(self, transport: asyncio.Transport, parts: list[bytes]) -> None:
        """Writes `parts`, one for each token (most of them may be empty)."""
        if not self._timed:
            for part in parts:
                if part:
                    transport.write(part)
            return
        self._sampling.append((transport, iter(parts)))
        if len(self._sampling) == 1:
            self._next = asyncio.get_running_loop().time()
            self._schedule()

    def _schedule(self) -> None:
        loop = asyncio.get_running_loop()
        seconds = STEP_SECONDS + STEP_SECONDS_PER_CALL * len(self._sampling)
        self._next = max(self._next + seconds, loop.time())
        loop.call_at(self._next, self._step)

    def _step(self) -> None:
        going_on = []
        for transport, parts in self._sampling:
            part = next(parts, None)
            if part is None or transport.is_closing():
                continue
            if part:
                transport.write(part)
            going_on.append((transport, parts))
        self._sampling = going_on
        if going_on:
            self._schedule()


class Connection(asyncio.Protocol):
    """Just enough of HTTP: requests with a content-length, one at a time."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self._data = b""
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is not a subclass

    def data_received(self, data: bytes) -> None:
        self._data += data
        head, found, body = self._data.partition(b"\r\n\r\n")
        if not found:
            return
        length = re.search(rb"content-length: *(\d+)", head, re.IGNORECASE)
        size = int(length[1]) if length else 0
        if len(body) < size:
            return
        self._data = b""
        self._answer(head.split(b" ", 2)[1], body)

    def _answer(self, path: bytes, body: bytes) -> None:
        tools = b'"tools":[' in body
        streamed = b'"stream":true' in body
        match path:
            case b"/v1/chat/completions":
                if streamed:
                    self._stream(calls.chat_chunks(), _PROMPT)
                else:
                    self._sampled(calls.with_prompt(calls.chat_whole(), _PROMPT))
            case b"/v1/chat/completions/render":
                self._at_once(_rendered(body))
            case b"/inference/v1/generate":
                sent = _IDS.search(body)
                assert sent is not None
                tools = _calls_tools(body)
                if streamed:
                    self._stream(calls.generated_chunks(), sent[1])
                else:
                    self._sampled(calls.with_prompt(calls.generated(tools), sent[1]))
            case b"/v1/chat/completions/derender":
                self._at_once(calls.derendered(tools))
            case b"/v1/models":
                self._at_once(orjson.dumps({"data": [{"id": calls.MODEL}]}))
            case _:
                self._transport.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")

    def _at_once(self, data: bytes) -> None:
        self._transport.write(_whole(data))

    def _sampled(self, data: bytes) -> None:
        self._batch.begin(self._transport, [b""] * (calls.ANSWER_TOKENS - 1) + [_whole(data)])

    def _stream(self, events: list[bytes], prompt: bytes) -> None:
        first, *rest = events
        parts = [_STREAM + _piece(calls.with_prompt(first, prompt)), *map(_piece, rest)]
        # The role, the usage and the end come together with the tokens beside them.
        role = len(parts) - calls.ANSWER_TOKENS - 2
        head, tail = b"".join(parts[: role + 1]), b"".join(parts[-3:]) + b"0\r\n\r\n"
        self._batch.begin(self._transport, [head, *parts[role + 1 : -3], tail])


def _whole(data: bytes) -> bytes:
    return _HEAD % (b"application/json", b"content-length: %d" % len(data)) + data


def _piece(event: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(event), event)


_renderings: dict[bytes, bytes] = {}


def _rendered(body: bytes) -> bytes:
    """Bodies are few: each client has the same conversations."""
    if body not in _renderings:
        _renderings[body] = calls.rendered(orjson.loads(body))
    return _renderings[body]


_with_tools: dict[bytes, bool] = {}


def _calls_tools(body: bytes) -> bool:
    """Whether the prompt of a generation offers tools; told by the system message before it."""
    sent = _IDS.search(body)
    assert sent is not None
    begin = b",".join(sent[1].split(b",", 40)[:40])
    if begin not in _with_tools:
        text = calls.FORMAT.decode([int(id) for id in begin.split(b",")])
        _with_tools[begin] = "# Tools" in text
    return _with_tools[begin]


async def main(core: int) -> None:
    pin(core)
    loop = asyncio.get_running_loop()
    ports = []
    for timed in (False, True):
        batch = Batch(timed=timed)
        server = await loop.create_server(
            lambda batch=batch: Connection(batch), "127.0.0.1", 0, backlog=2048
        )
        ports.append(server.sockets[0].getsockname()[1])
    print("ports", *ports, flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1])))
