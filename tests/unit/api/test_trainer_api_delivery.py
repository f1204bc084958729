"""Delivery guarantees for trainers, over real HTTP.

Limits and filters of leases, shared and broadcast runs, lost answers, checkpoints; a restart gets
exactly the groups that its checkpoint had not seen.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from envserver_clients.http import EnvClient
from envserver_clients.records import decode_batch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.api import Api, native_group, put_native, running_api, wire_group

from envserver.api.native import runs

MSGPACK = "application/vnd.envserver.groups+msgpack"


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Api]:
    async with running_api(tmp_path / "store.db") as running:
        yield running


async def put(api: Api, *group_ids: str, trajectories: int = 2, **changes: Any) -> None:
    for group_id in group_ids:
        group = native_group(group_id, trajectories)
        await put_native(api.store, msgspec.structs.replace(group, **changes))


async def run(api: Api, name: str = "run", **wanted: Any) -> Any:
    answer = await api.http.post("/v1/runs", json={"name": name, **wanted})
    assert answer.status_code in (200, 201), answer.text
    return answer.json()


async def lease(api: Api, name: str = "run", key: str = "", **wanted: Any) -> Any:
    """The lease; one without an id or groups where nothing came."""
    headers = {"idempotency-key": key} if key else {}
    answer = await api.http.post(f"/v1/runs/{name}/lease", json=wanted, headers=headers)
    if answer.status_code == 204:
        return {"lease_id": "", "groups": []}
    assert answer.status_code == 200, answer.text
    return answer.json()


def ids(lease: Any) -> list[str]:
    return [group["group_id"] for group in lease["groups"]]


async def close(api: Api, what: str, lease: Any, name: str = "run", **more: Any) -> httpx.Response:
    body = {"lease_id": lease["lease_id"], **more}
    return await api.http.post(f"/v1/runs/{name}/{what}", json=body)


async def test_status_shows_how_far_each_run_is_behind(tmp_path: Path) -> None:
    now = 1000.0
    async with running_api(tmp_path / "s.db", clock=lambda: now) as api:
        await run(api, "all", delivery="broadcast")
        await run(api, "code", environments=["code"])
        await put(api, "a")
        now += 10
        await put(api, "b")
        now += 5

        async def shown(name: str) -> tuple[float, ...]:
            facts = (await api.get("/v1/status"))["runs"][name]
            keys = ("queued_groups", "lag_seconds", "open_leases", "leased_groups")
            return tuple(facts[key] for key in keys)

        assert await shown("all") == (2, 15, 0, 0)
        assert await shown("code") == (0, 0, 0, 0)
        await api.http.post("/v1/runs/all/lease", json={"max_groups": 1})
        assert await shown("all") == (1, 5, 1, 1)
        assert await shown("atropos") == (2, 15, 0, 0)
        await api.http.post("/v1/runs/all/close", json={})
        assert "all" not in (await api.get("/v1/status"))["runs"]


async def test_a_lease_ends_before_it_would_pass_a_limit(api: Api) -> None:
    await run(api, batch_size=1)
    await put(api, "a", "b", "c")
    await put(api, "big", trajectories=9)
    await put(api, "d", "e")
    assert ids(await lease(api, max_sequences=5)) == ["a", "b"]
    assert ids(await lease(api, max_tokens=20)) == ["c"]  # 10 tokens, and 45 would follow
    assert ids(await lease(api, max_tokens=20)) == ["big"]  # alone, however large
    assert ids(await lease(api, max_tokens=20, min_groups=3)) == []
    assert ids(await lease(api, max_tokens=20, min_groups=2)) == ["d", "e"]


async def test_a_lease_holds_only_what_it_asked_for(api: Api) -> None:
    await run(api, batch_size=9)
    await put(api, "old", policy_version=1)
    await put(api, "code", env="code", policy_version=5)
    await put(api, "math", policy_version=4)
    assert ids(await lease(api, environments=["none"])) == []
    assert ids(await lease(api, environments=["code"])) == ["code"]
    await api.post("/v1/policy-version", {"version": 6})
    assert ids(await lease(api, min_version=5)) == []
    assert ids(await lease(api, max_staleness=1)) == []
    assert ids(await lease(api, max_staleness=2)) == ["math"]
    assert ids(await lease(api)) == ["old"]


async def test_of_shared_runs_each_group_goes_to_one_and_broadcast_runs_get_all(api: Api) -> None:
    await put(api, "a", "b")
    for name, delivery in (("one", "shared"), ("two", "shared"), ("all", "broadcast")):
        made = await run(api, name, batch_size=1, delivery=delivery)
        assert made["delivery"] == delivery
    await run(api, "maths", batch_size=9, delivery="broadcast", environments=["math"])
    await put(api, "c", "d")
    await put(api, "e", env="code")
    shared = [await lease(api, name) for name in ("one", "two", "one", "two", "one")]
    assert [ids(found) for found in shared] == [["a"], ["b"], ["c"], ["d"], ["e"]]
    assert ids(await lease(api, "all", max_groups=9)) == ["a", "b", "c", "d", "e"]
    found = await lease(api, "maths")
    assert ids(found) == ["a", "b", "c", "d"]
    assert (await close(api, "ack", shared[1], "two")).status_code == 204
    assert (await close(api, "nack", found, "maths", reason="test")).status_code == 204
    assert ids(await lease(api, "maths")) == ["a", "b", "c", "d"]
    assert [ids(await lease(api, name)) for name in ("one", "two")] == [[], []]


async def test_a_lease_belongs_to_its_run(api: Api) -> None:
    await put(api, "a")
    await run(api, "mine")
    await run(api, "other")
    found = await lease(api, "mine")
    for what, more in (("ack", {}), ("nack", {}), ("extend", {"seconds": 5})):
        assert (await close(api, what, found, "other", **more)).status_code == 404
    assert (await close(api, "ack", found, "mine")).status_code == 204


async def test_a_run_keeps_its_delivery_and_may_change_the_rest(api: Api) -> None:
    await run(api, batch_size=1)
    answer = await api.http.post("/v1/runs", json={"name": "run", "delivery": "broadcast"})
    assert answer.status_code == 409
    changed = await run(api, batch_size=3, environments=["code"], settings={"lr": 1})
    assert (changed["batch_size"], changed["environments"]) == (3, ["code"])
    await put(api, "a")
    assert ids(await lease(api)) == []
    await run(api, environments=[])
    assert ids(await lease(api)) == ["a"]


async def test_a_closed_run_gives_back_and_leases_no_more(api: Api) -> None:
    await put(api, "a")
    for name in ("run", "other"):
        await run(api, name, batch_size=1)
    assert ids(await lease(api)) == ["a"]
    for _ in range(2):
        assert (await api.http.post("/v1/runs/run/close")).json()["state"] == "closed"
    refused = await api.http.post("/v1/runs/run/lease", json={})
    assert refused.status_code == 409
    assert ids(await lease(api, "other", wait_seconds=20)) == ["a"]
    assert (await run(api))["state"] == "open"
    assert ids(await lease(api)) == []
    for path in ("/v1/runs/nobody/close", "/v1/runs/nobody/ack"):
        assert (await api.http.post(path, json={"lease_id": "x"})).status_code == 404
    assert (await api.http.post("/v1/runs/atropos/close")).status_code == 409


async def test_runs_and_their_settings_have_bounds(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "MOST_OPEN_RUNS", 3)  # one is that of Atropos trainers
    for name in ("one", "two"):
        await run(api, name)
    refused = await api.http.post("/v1/runs", json={"name": "three"})
    assert (refused.status_code, "closes" in refused.json()["hint"]) == (409, True)
    await run(api, "one")  # it is there already
    await api.http.post("/v1/runs/one/close")
    await run(api, "three")
    assert (await api.http.post("/v1/runs", json={"name": "one"})).status_code == 409
    large = {"name": "two", "settings": {"notes": "x" * 1_000_000}}
    assert (await api.http.post("/v1/runs", json=large)).status_code == 422


async def test_an_answer_that_was_lost_is_had_again(api: Api) -> None:
    await run(api, batch_size=1)
    await put(api, "a", "b")
    first = await lease(api, key="k1")
    assert await lease(api, key="k1") == first
    twins = await asyncio.gather(*(lease(api, key="k2") for _ in range(4)))
    assert [ids(twin) for twin in twins] == [["b"]] * 4
    assert len({twin["lease_id"] for twin in twins}) == 1
    assert (await close(api, "ack", first)).status_code == 204
    late = await api.http.post("/v1/runs/run/lease", json={}, headers={"idempotency-key": "k1"})
    assert late.status_code == 409
    await put(api, "c")
    assert ids(await lease(api, key="k3")) == ["c"]


async def test_a_lease_that_waits_wakes_for_what_is_given_back_or_expires(api: Api) -> None:
    await run(api, batch_size=1)
    await put(api, "a")
    for what in ("nack", "expire"):
        held = await lease(api, seconds=0.3 if what == "expire" else 600)
        waiting = asyncio.create_task(lease(api, wait_seconds=30))
        await asyncio.sleep(0.05)
        if what == "nack":
            await close(api, "nack", held)
        again = await waiting
        assert ids(again) == ["a"]
        await close(api, "nack", again)


async def test_the_other_wire_takes_from_the_same_queue(api: Api) -> None:
    await run(api, batch_size=2)
    await api.register(batch_size=2)
    await api.post("/scored_data", wire_group(2, 1))
    found = await lease(api)
    assert len(ids(found)) == 1
    assert await api.batch_marks() is None
    await close(api, "nack", found)
    assert await api.batch_marks() == [1]
    assert ids(await lease(api)) == []


async def test_zstd_carries_what_lies_on_the_disk(api: Api) -> None:
    await run(api, batch_size=3)
    await put(api, "large", trajectories=50)
    await put(api, "small")
    await api.post("/scored_data", wire_group(2, 5))
    contents = []
    for encoding in ("zstd", "identity"):
        answer = await api.http.post(
            "/v1/runs/run/lease",
            json={},
            headers={
                "accept": MSGPACK,
                "accept-encoding": encoding,
                "idempotency-key": "the same lease",
            },
        )
        assert answer.headers.get("content-encoding", "identity") == encoding
        assert "Accept-Encoding" in answer.headers["vary"]
        contents.append(answer.content)
    async with EnvClient(api.url, run="run") as client:
        whole = await client.get_group("large")
    inflated, plain = (decode_batch(content) for content in contents)
    assert [group.group_id for group in plain.groups][:2] == ["large", "small"]
    assert [bytes(group.body) for group in inflated.groups] == [
        bytes(group.body) for group in plain.groups
    ]
    assert bytes(whole.body) == bytes(plain.groups[0].body)


async def test_a_copy_of_going_back_takes_nothing_back(api: Api) -> None:
    await run(api, batch_size=1)
    await put(api, "a", "b")
    await close(api, "ack", await lease(api), checkpoint="one")
    await close(api, "ack", await lease(api))
    body, key = {"name": "run", "checkpoint": "one"}, {"idempotency-key": "key"}
    first = await api.http.post("/v1/runs", json=body, headers=key)
    assert first.json()["redelivered"] == 1
    await close(api, "ack", await lease(api))
    copy = await api.http.post("/v1/runs", json=body, headers=key)
    assert (copy.status_code, copy.json()["redelivered"]) == (200, 0)
    assert ids(await lease(api)) == []
    unknown = await api.http.post("/v1/runs", json={"name": "run", "checkpoint": "none"})
    assert unknown.status_code == 404
    both = await api.http.post("/v1/runs", json=body | {"from_start": True})
    assert both.status_code == 422


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
        await put(self._api, *names, env=self._mine)
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
