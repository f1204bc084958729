"""Runs and leases of trainers, over real HTTP: who gets which groups, and how they come back.

Limits, filters and checkpoints are the store's: tests/unit/store/stories.txt says what they do.
trainer.txt says what is answered.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest
from support.api import Api, running_api
from support.conversations import Conversation, conversations
from support.waiting import settled

from envserver.api.native import runs

CONVERSATIONS = conversations(Path(__file__).with_name("trainer.txt"))


@pytest.mark.parametrize("title", CONVERSATIONS)
async def test_the_api_answers_trainers_as_its_conversations_say(api: Api, title: str) -> None:
    await Conversation(api).hold(CONVERSATIONS[title])


async def test_there_are_so_many_open_runs(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    large = {"name": "a", "settings": {"notes": "x" * 1_000_000}}
    assert await api.status("POST", "/v1/runs", json=large) == 422
    monkeypatch.setattr(runs, "MOST_OPEN_RUNS", 3)  # one is that of Atropos trainers
    for name in ("one", "two"):
        await api.run(name)
    refused = await api.http.post("/v1/runs", json={"name": "three"})
    assert (refused.status_code, "closes" in refused.json()["hint"]) == (409, True)
    await api.run("one")  # it is there already
    await api.http.post("/v1/runs/one/close")
    await api.run("three")
    assert await api.status("POST", "/v1/runs", json={"name": "one"}) == 409


async def test_status_shows_how_far_each_run_is_behind(tmp_path: Path) -> None:
    now = 1000.0
    async with running_api(tmp_path / "s.db", clock=lambda: now) as api:

        async def shown(name: str) -> tuple[float, ...]:
            facts = (await api.get("/v1/status"))["runs"][name]
            keys = ("queued_groups", "lag_seconds", "open_leases", "leased_groups")
            return tuple(facts[key] for key in keys)

        await api.run("all", delivery="broadcast")
        await api.run("code", environments=["code"])
        await api.put("a")
        now += 10
        await api.put("b")
        now += 5
        assert await shown("all") == (2, 15, 0, 0)
        assert await shown("code") == (0, 0, 0, 0)
        await api.lease("all", max_groups=1)
        assert await shown("all") == (1, 5, 1, 1)


# Leases


async def test_a_lease_that_is_asked_for_four_times_at_once_is_one(api: Api) -> None:
    await api.run(batch_size=1)
    await api.put("a", "b")
    first, *twins = await asyncio.gather(*(api.lease(key="k") for _ in range(4)))
    assert twins == [first] * 3
    assert [group["group_id"] for group in first["groups"]] == ["a"]


async def test_a_lease_waits_for_groups_that_come_are_given_back_or_expire(api: Api) -> None:
    await api.run(batch_size=2)
    with pytest.raises(httpx.ReadTimeout):  # a client that went away takes nothing
        body = {"wait_seconds": 30}
        await api.http.post("/v1/runs/run/lease", json=body, timeout=httpx.Timeout(60, read=0.3))
    waiting = asyncio.create_task(api.leased(min_groups=2, wait_seconds=30))
    await api.put("a")
    await asyncio.sleep(0.05)
    assert not waiting.done()
    await api.put("b")
    assert await waiting == ["a", "b"]
    assert await api.leased(wait_seconds=0.05) == []
    await api.put("c")
    for what in ("nack", "expire"):
        held = await api.lease(seconds=0.3 if what == "expire" else 600)
        again = asyncio.create_task(api.lease(wait_seconds=30))
        await settled()
        if what == "nack":
            await api.end("nack", held)
        found = await again
        assert [group["group_id"] for group in found["groups"]] == ["c"]
        await api.end("nack", found)
