"""Weights that change, are missing, or were lost when their engine was restarted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from itertools import pairwise
from typing import Any

import msgspec
import openai
import pytest
from envserver_records.records import VersionSpan
from support.proxy_house import House, chat, house
from support.serving import attempt_spec
from support.waiting import until

from envserver.proxy.attempts import ProxyAttempt
from envserver.tokens import DEFAULT


@pytest.fixture
async def home() -> AsyncIterator[House]:
    async with house() as made:
        made.proxy.publish_version(1)
        yield made


def named(home: House) -> tuple[ProxyAttempt, openai.AsyncOpenAI]:
    attempt = home.proxy.open(msgspec.structs.replace(attempt_spec(), model="policy@{version}"))
    return attempt, home.client(attempt.key)


def names_weights(home: House, monkeypatch: pytest.MonkeyPatch, *versions: str) -> None:
    """The engine says of its answers, one after the other, that these sampled them; two names with
    a blank between them: the first token, and the others."""
    told, answer = iter(versions), home.fake.answer

    def with_version(body: Any) -> Any:
        made = answer(body)
        choice, names = made["choices"][0], next(told).split()
        edges = (
            [0, 1, len(choice["token_ids"])] if len(names) == 2 else [0, len(choice["token_ids"])]
        )
        choice["weight_versions"] = [
            {"version": name, "start": start, "end": end}
            for name, (start, end) in zip(names, pairwise(edges), strict=True)
        ]
        return made

    monkeypatch.setattr(home.fake, "answer", with_version)


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_version_that_went_is_asked_for_by_the_name_of_now(
    home: House, streamed: bool
) -> None:
    """As when the call waited so long for room that its adapter was unloaded meanwhile."""
    home.fake.faults.extend([404, 404])
    attempt, client = named(home)
    asking = asyncio.create_task(chat(client, streamed))
    await until(lambda: home.fake.requests)
    home.proxy.publish_version(6)
    await asking
    assert [sent["model"] for sent in home.fake.requests][::2] == ["policy@1", "policy@6"]
    (call,) = attempt.calls
    assert call.versions == [VersionSpan(6, 0, len(call.completion_ids))]
    assert call.flags == []


async def test_a_version_that_does_not_come_is_the_engines_fault(
    home: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("envserver.proxy.missing_version.PATIENCE_SECONDS", 1.0)
    home.fake.faults.extend([404] * 20)
    attempt, client = named(home)
    with pytest.raises(openai.APIError):
        await chat(client, streamed=False)
    assert attempt.engine_failure is not None
    assert attempt.engine_failure.kind == "engine_unavailable"
    assert "no model 'policy@1'" in attempt.engine_failure.message
    assert len(home.fake.requests) > 1


async def test_other_refusals_are_final(home: House) -> None:
    home.fake.faults.extend([(400, "too long")])
    attempt, client = named(home)
    with pytest.raises(openai.APIError):
        await chat(client, streamed=False)
    home.fake.faults.extend([404])
    plain, other = home.open()
    with pytest.raises(openai.APIError):
        await chat(other, streamed=False)
    assert len(home.fake.requests) == 2
    assert attempt.engine_failure is not None
    assert plain.engine_failure is not None
    assert plain.engine_failure.kind == attempt.engine_failure.kind == "engine_refused"


async def test_the_name_that_was_asked_for_decides(
    home: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine speaks of the weights below the adapter."""
    names_weights(home, monkeypatch, "version-40", "default")
    attempt, client = named(home)
    await chat(client, streamed=False)
    await chat(client, streamed=False)
    assert [call.versions[0].version for call in attempt.calls] == [1, 1]
    assert [call.flags for call in attempt.calls] == [[], []]


async def test_tokens_of_an_engine_that_lost_its_weights_are_not_delivered(
    home: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    names_weights(home, monkeypatch, "default", "version-1", "default", "version-1")
    attempt, client = home.open()
    for _ in range(4):
        await chat(client, streamed=False)
    assert [call.flags for call in attempt.calls] == [[], [], ["weights_lost"], []]
    assert DEFAULT.of("weights_lost") == "drop"


async def test_what_was_sampled_before_the_first_version_is_of_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first weights come while calls are at the engine, and go on with them."""
    async with house() as home:
        change = "default version-0"
        names_weights(home, monkeypatch, change, change, "version-0 default", change)
        attempt, client = home.open()
        for _ in range(3):
            await chat(client, streamed=False)
        home.proxy.publish_version(0)
        await chat(client, streamed=False)
    size = len(attempt.calls[0].completion_ids)
    assert attempt.calls[0].versions == [VersionSpan(-1, 0, 1), VersionSpan(0, 1, size)]
    flags = [call.flags for call in attempt.calls]
    assert flags == [["mixed_versions"], ["mixed_versions"], ["weights_lost"], ["weights_lost"]]
