"""Reading one rollout's requests takes a bounded share of the time that all have."""

from __future__ import annotations

import time

import orjson
import pytest
from support.proxy_house import ASK, chat, house

from envserver.proxy import bounds
from envserver.proxy.dialects import DIALECTS

DENSE = b'{"messages": [], "x": [%b[]]}' % (b"[]," * 200_000)
"""A body whose values cost as much to read as a text of a hundred times its size."""


async def test_an_attempt_waits_that_had_more_than_its_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bounds, "READING_BURST_SECONDS", 0.01)
    async with house(max_body_bytes=10**6) as home:
        (greedy, _), (other, client) = home.open(), home.open()
        began = time.monotonic()
        for _ in range(4):
            before = greedy.in_flight.reading_seconds
            status, _ = await home.post(greedy.key, "v1/chat/completions", DENSE)
            assert status == 400
            least = (before - bounds.READING_BURST_SECONDS) / bounds.READING_SHARE
            assert time.monotonic() - began >= least
        assert before > bounds.READING_BURST_SECONDS
        assert (await chat(client)).message.content
        assert other.in_flight.reading_seconds < before


def test_reading_calls_of_one_answer_takes_linear_time() -> None:
    """In the number of steps, which any machine counts alike: no list is built anew for each."""
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}

    def seconds(calls: int) -> float:
        body = {"input": [call] * calls}
        began = time.process_time()
        (message,) = DIALECTS["v1/responses"].read(orjson.loads(orjson.dumps(body)), {}).messages
        assert len(message["tool_calls"]) == calls
        return time.process_time() - began

    fewer = min(seconds(4_000) for _ in range(3))
    assert seconds(64_000) < 16 * 8 * fewer


async def test_a_request_of_ordinary_size_never_waits() -> None:
    async with house() as home:
        attempt, client = home.open()
        for _ in range(20):
            await chat(client, messages=ASK)
        assert attempt.in_flight.reading_seconds < bounds.READING_BURST_SECONDS / 2
