"""Titles and summaries of coding programs are recorded for the agent "side", and not trained."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from support.proxy_house import TOOLS, House, house
from support.waiting import until

from envserver.proxy import ProxyAttempt

PATH = "v1/chat/completions"
OPENCODE = {"user-agent": "opencode/1.18.33 ai-sdk/provider-utils/4.0.23 runtime/bun/1.3.14"}
SCRIPT = {"user-agent": "AsyncOpenAI/Python 3.54.0"}
TITLE = {"type": "object", "properties": {"title": {"type": "string"}}, "required": ["title"]}


@pytest.fixture
async def home() -> AsyncIterator[House]:
    async with house() as made:
        yield made


async def ask(
    home: House, attempt: ProxyAttempt, text: str, *, program: Any = OPENCODE, **more: Any
) -> int:
    body = {"model": "any", "messages": [{"role": "user", "content": text}], **more}
    status, _ = await home.post(attempt.key, PATH, body, **program)
    return status


def recorded(attempt: ProxyAttempt) -> list[tuple[str, str | None, bool]]:
    return [(call.messages[0]["content"], call.agent, call.trained) for call in attempt.calls]


async def test_what_a_program_asks_without_tools_beside_its_conversation_is_not_trained(
    home: House,
) -> None:
    attempt, _ = home.open(max_turns=2)
    await ask(home, attempt, "Title?")
    assert recorded(attempt) == [("Title?", None, True)]  # it could be all that is asked
    await ask(home, attempt, "Work.", tools=TOOLS)
    await ask(home, attempt, "Summary?")
    await ask(home, attempt, "More.", tools=TOOLS)
    assert recorded(attempt) == [
        ("Title?", "side", False),
        ("Work.", None, True),
        ("Summary?", "side", False),
        ("More.", None, True),
    ]
    # Each has its own turns.
    assert await ask(home, attempt, "Even more.", tools=TOOLS) == 400
    assert await ask(home, attempt, "Another summary?") == 400


async def test_a_title_that_comes_late_or_alone_is_known_too(home: House) -> None:
    home.fake.held = asyncio.Event()
    attempt, _ = home.open(agents=["main", "helper"])
    title = asyncio.create_task(ask(home, attempt, "Title?"))
    await until(lambda: home.fake.requests)
    work = asyncio.create_task(ask(home, attempt, "Work.", tools=TOOLS))
    await until(lambda: len(home.fake.requests) == 2)
    home.fake.held.set()
    await asyncio.gather(title, work)
    assert sorted(recorded(attempt)) == [("Title?", "side", False), ("Work.", "main", True)]
    failed, _ = home.open()
    await ask(home, failed, "Title?")
    home.fake.faults.extend([500, 500])
    assert await ask(home, failed, "Work.", tools=TOOLS) == 502
    assert recorded(failed) == [("Title?", "side", False)]


async def test_other_agents_are_trained_on_what_they_ask_without_tools(home: House) -> None:
    attempt, _ = home.open()
    await ask(home, attempt, "Plan.", program=SCRIPT)
    await ask(home, attempt, "Work.", program=SCRIPT, tools=TOOLS)
    title = {"type": "json_schema", "json_schema": {"name": "output", "schema": TITLE}}
    await ask(home, attempt, "Title?", program=SCRIPT, response_format=title)
    await ask(home, attempt, "Answer.", program=SCRIPT)
    assert recorded(attempt) == [
        ("Plan.", None, True),
        ("Work.", None, True),
        ("Title?", "side", False),
        ("Answer.", None, True),
    ]


async def test_tokens_of_side_calls_do_not_count(home: House) -> None:
    attempt, _ = home.open(max_completion_tokens=14)  # an answer has eight
    for text in ("Title?", "Other title?"):
        await ask(home, attempt, text)
    assert await ask(home, attempt, "Work.", tools=TOOLS) == 200
    assert await ask(home, attempt, "More.", tools=TOOLS) == 200
    assert await ask(home, attempt, "Summary?") == 400
