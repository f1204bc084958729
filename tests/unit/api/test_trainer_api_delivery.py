"""Runs and leases of trainers, over real HTTP: who gets which groups, and how they come back.

A restart gets exactly the groups that its checkpoint had not seen. Limits, filters and checkpoints
are the store's: tests/unit/store/stories.txt says what they do. trainer.txt says what is answered.
"""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any

import httpx
import pytest
from envserver_clients.http import EnvClient
from envserver_clients.records import decode_batch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.api import Api, running_api, wire_group
from support.conversations import Conversation, conversations
from support.waiting import settled

from envserver.api.native import runs

MSGPACK = "application/vnd.envserver.groups+msgpack"


CONVERSATIONS = conversations(Path(__file__).with_name("trainer.txt"))


@pytest.mark.parametrize("title", CONVERSATIONS)
async def test_the_api_answers_trainers_as_its_conversations_say(api: Api, title: str) -> None:
    await Conversation(api).hold(CONVERSATIONS[title])


async def test_there_are_so_many_open_runs(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong in ({"name": "x" * 200}, {"name": "a", "settings": {"notes": "x" * 1_000_000}}):
        assert await api.status("POST", "/v1/runs", json=wrong) == 422
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
        assert await shown("atropos") == (2, 15, 0, 0)
        await api.http.post("/v1/runs/all/close", json={})
        assert "all" not in (await api.get("/v1/status"))["runs"]


# Leases


async def test_a_lease_that_is_asked_for_four_times_at_once_is_one(api: Api) -> None:
    await api.run(batch_size=1)
    await api.put("a", "b")
    first, *twins = await asyncio.gather(*(api.lease(key="k") for _ in range(4)))
    assert twins == [first] * 3
    assert [group["group_id"] for group in first["groups"]] == ["a"]


async def test_leases_expire_and_can_be_extended(api: Api) -> None:
    await api.run()
    await api.put("a", "b")
    kept, short = [await api.lease(max_groups=1, seconds=seconds) for seconds in (600, 0.2)]
    body = {"lease_id": kept["lease_id"], "seconds": 1200}
    extended = await api.post("/v1/runs/run/extend", body)
    assert extended["expires_at"] > kept["expires_at"] + 500
    assert await api.leased(wait_seconds=20) == ["b"]
    assert await api.end("ack", short) == 409


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


async def test_zstd_carries_what_lies_on_the_disk(api: Api) -> None:
    await api.run(batch_size=3)
    await api.put("large", trajectories=50)
    await api.put("small")
    await api.post("/scored_data", wire_group(2, 5))
    contents = []
    for encoding in ("zstd", "identity"):
        headers = {"accept": MSGPACK, "accept-encoding": encoding, "idempotency-key": "the same"}
        answer = await api.http.post("/v1/runs/run/lease", json={}, headers=headers)
        assert answer.headers.get("content-encoding", "identity") == encoding
        assert "Accept-Encoding" in answer.headers["vary"]
        contents.append(
            [(one.group_id, bytes(one.body)) for one in decode_batch(answer.content).groups]
        )
    inflated, plain = contents
    assert inflated == plain
    assert [group_id for group_id, _ in plain[:2]] == ["large", "small"]
    async with EnvClient(api.url, run="run") as client:
        assert bytes((await client.get_group("large")).body) == plain[0][1]


EXAMPLES = itertools.count()
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.integers(1, 3)),
        st.tuples(st.just("lease"), st.integers(1, 3)),
        st.tuples(st.sampled_from(["ack", "save", "nack"]), st.integers(0, 3)),
        st.tuples(st.just("resume"), st.integers(-1, 3)),
    ),
    max_size=14,
)


@given(steps=STEPS, delivery=st.sampled_from(["shared", "broadcast"]))
@settings(
    max_examples=7,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
async def test_a_restart_gets_exactly_what_its_checkpoint_had_not_seen(
    api: Api, steps: list[tuple[str, int]], delivery: Any
) -> None:
    """Whatever happened before. Each example has an environment and a run of its own."""
    mine = f"example{next(EXAMPLES)}"
    wanted: Any = {"run": mine, "delivery": delivery, "environments": [mine], "batch_size": 99}
    trainer = Trainer(api, mine)
    async with EnvClient(api.url, **wanted) as trainer.client:
        for step, number in steps:
            await getattr(trainer, step)(number)
        await trainer.resume(len(trainer.saved) - 1)
        batch = await trainer.client.lease(whole=False)
        found = [] if batch is None else [group.group_id for group in batch.groups]
        assert found == [name for name in trainer.made if name not in trainer.acked]
        assert [one["name"] for one in await trainer.client.checkpoints()] == [
            name for name, _ in trainer.saved
        ]
        await trainer.client.close_run()


class Trainer:
    """A client, and what it knows it did: the model that the server is held against."""

    client: EnvClient

    def __init__(self, api: Api, mine: str) -> None:
        self._api = api
        self._mine = mine
        self.made: list[str] = []
        self.acked: list[str] = []
        self.saved: list[tuple[str, int]] = []
        self._held: list[Any] = []
        self._names = itertools.count()

    async def put(self, number: int) -> None:
        names = [f"{self._mine}-{len(self.made) + index}" for index in range(number)]
        await self._api.put(*names, env=self._mine)
        self.made += names

    async def lease(self, number: int) -> None:
        if batch := await self.client.lease(whole=False, max_groups=number):
            self._held.append(batch)

    async def ack(self, index: int, checkpoint: str | None = None) -> None:
        if index < len(self._held):
            batch = self._held.pop(index)
            await self.client.ack(batch, checkpoint=checkpoint)
            self.acked += [group.group_id for group in batch.groups]
            if checkpoint is not None:
                self.saved.append((checkpoint, len(self.acked)))

    async def save(self, index: int) -> None:
        await self.ack(index, f"checkpoint-{next(self._names)}")

    async def nack(self, index: int) -> None:
        if index < len(self._held):
            await self.client.nack(self._held.pop(index), reason="test")

    async def resume(self, index: int) -> None:
        """Back to a checkpoint; -1: to the start."""
        if index >= len(self.saved):
            return
        name, acked = self.saved[index] if index >= 0 else (None, 0)
        await self.client.resume(name)
        self.acked = self.acked[:acked]
        self.saved = self.saved[: index + 1]
        self._held.clear()
