"""The policy version that the proxy records with a call, over HTTP with OpenAI's own client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from envserver_records.records import VersionSpan
from support.proxy_house import House, chat, house, until
from support.serving import attempt_spec


@pytest.fixture
async def home() -> AsyncIterator[House]:
    async with house() as made:
        yield made


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_version_that_changes_meanwhile_is_flagged(home: House, streamed: bool) -> None:
    home.fake.held = asyncio.Event()
    home.proxy.publish_version(3)
    attempt, client = home.open()
    asking = asyncio.create_task(chat(client, streamed))
    await until(lambda: home.fake.requests)
    home.proxy.publish_version(4)
    home.fake.held.set()
    await asking
    assert attempt.calls[0].versions == [VersionSpan(3, 0, 8)]
    assert attempt.calls[0].flags == ["mixed_versions"]


@pytest.mark.parametrize("name", ["policy@{version}", "{version}-of-8b", "v{version}.2"])
async def test_a_version_in_the_models_name_is_asked_for_and_recorded(
    home: House, name: str
) -> None:
    spec = msgspec.structs.replace(attempt_spec(), model=name)
    attempt = home.proxy.open(spec)
    client = home.client(attempt.key)
    await chat(client)
    home.proxy.publish_version(3)
    await chat(client, streamed=True)
    asked = [sent["model"] for sent in home.fake.requests]
    assert asked == [name.replace("{version}", "0"), name.replace("{version}", "3")]
    assert [call.versions[0].version for call in attempt.calls] == [0, 3]
    assert {call.model for call in attempt.calls} == {name}
    assert [call.flags for call in attempt.calls] == [[], []]


@pytest.mark.parametrize(
    ("told", "version"),
    [
        (7, 7),
        ("step-7", 7),
        ("default", 3),
        ("v2.5", 3),
        ("20261120093000", 3),
        (2**40, 3),
        (-1, 3),
        (True, 3),
    ],
)
async def test_a_version_that_the_engine_tells_counts_where_it_is_one(
    home: House, monkeypatch: pytest.MonkeyPatch, told: Any, version: int
) -> None:
    answer = home.fake.answer

    def answer_with_version(body: Any) -> Any:
        made = answer(body)
        made["choices"][0]["weight_versions"] = [{"version": told, "start": 0, "end": 8}]
        return made

    monkeypatch.setattr(home.fake, "answer", answer_with_version)
    home.proxy.publish_version(3)
    attempt, client = home.open()
    await chat(client)
    assert attempt.calls[0].versions == [VersionSpan(version, 0, 8)]


async def test_an_engine_that_serves_another_version_than_asked_for_is_flagged(
    home: House,
) -> None:
    home.fake.served = "policy@2"
    attempt = home.proxy.open(msgspec.structs.replace(attempt_spec(), model="policy@{version}"))
    home.proxy.publish_version(3)
    await chat(home.client(attempt.key))
    assert attempt.calls[0].flags == ["other_model_served"]
