"""Long conversations are planned off the event loop, with the same results as short ones."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest
from envserver_records.records import Message
from support.fake_scale_out import ScaleOut
from support.proxy_house import asgi_post
from support.serving import attempt_spec
from support.templates import CHATML, chat_format

from envserver.models import ProbeResult
from envserver.proxy import Capabilities, EngineEndpoint, Proxy, ProxyAttempt
from envserver.tokens import History

TURN: list[Message] = [
    {"role": "user", "content": "And then?"},
    {"role": "assistant", "content": "Two."},
]
SHORT = [*TURN, {"role": "user", "content": "More."}]
MANY = [*TURN * 100, {"role": "user", "content": "More."}]
WORDY = [*TURN, {"role": "user", "content": "Look at this list, of course: 2 + 2 = 4. " * 500}]


@pytest.mark.parametrize("messages, aside", [(SHORT, False), (MANY, True), (WORDY, True)])
async def test_a_long_request_is_planned_in_another_thread(
    messages: list[Message], aside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[bool] = []
    plan = History.plan

    def noted(*args: Any, **kwargs: Any) -> Any:
        threads.append(threading.current_thread() is not threading.main_thread())
        return plan(*args, **kwargs)

    monkeypatch.setattr(History, "plan", noted)
    proxy, attempts = _proxy(), []
    for _ in range(4):
        attempts.append(proxy.open(attempt_spec(seconds=600.0)))
    await asyncio.gather(*(_talk(proxy, attempt, messages) for attempt in attempts))
    assert threads.count(True) == (8 if aside else 0)
    for attempt in attempts:
        root, going_on = attempt.calls
        assert going_on.planned_parent == 0 and going_on.edge == "exact"
        seen = [*root.prompt_ids.tolist(), *root.completion_ids.tolist()]
        assert going_on.prompt_ids.tolist()[: len(seen)] == seen


async def _talk(proxy: Proxy, attempt: ProxyAttempt, messages: list[Message]) -> None:
    """Two calls; the second goes on from the first by as much again."""
    await _ask(proxy, attempt, messages)
    said = {"role": "assistant", "content": "Two."}
    await _ask(proxy, attempt, [*messages, said, messages[-1]])


async def _ask(proxy: Proxy, attempt: ProxyAttempt, messages: list[Message]) -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    await asgi_post(proxy, attempt.key, {"model": "tiny", "messages": messages}, send)
    assert sent[0]["status"] == 200, json.loads(sent[1]["body"])


def _proxy() -> Proxy:
    format = chat_format(CHATML, stops=["<|im_end|>"])
    engine = ScaleOut(format, "Two.")

    async def find() -> Capabilities:
        return Capabilities(probe_result=ProbeResult(mode="tokens", model="tiny"), format=format)

    return Proxy(engine, endpoint=EngineEndpoint(engine, find=find))
