"""A trainer pauses the agents' calls over HTTP while it changes the engine's weights."""

from __future__ import annotations

import asyncio
from pathlib import Path

from envserver_clients.http import EnvClient
from support.api import running_api

from envserver.proxy import Gate
from envserver.remote.messages import KEY_HEADER


async def test_a_trainer_pauses_and_resumes_with_a_new_version(tmp_path: Path) -> None:
    gate = Gate()
    async with running_api(tmp_path / "store.db", gate=gate) as api:
        assert await api.get("/v1/policy") == {
            "paused": False,
            "in_flight": 0,
            "waiting": 0,
            "version": -1,
        }
        async with gate.passing():
            paused = await api.post("/v1/policy/pause", {"timeout_seconds": 0.05})
            assert (paused["paused"], paused["idle"], paused["in_flight"]) == (True, False, 1)
            kept = await api.post("/v1/policy/pause", {"in_flight": "keep"})
            assert kept["idle"]
        assert (await api.post("/v1/policy/pause", {"in_flight": "abort"}))["idle"]

        async def call() -> None:
            async with gate.passing():
                return

        waiting = asyncio.create_task(call())
        await asyncio.sleep(0)
        assert (await api.get("/v1/policy"))["waiting"] == 1
        resumed = await api.post("/v1/policy/resume", {"version": 7})
        assert (resumed["paused"], resumed["version"]) == (False, 7)
        await waiting


async def test_the_client_pauses_and_resumes(tmp_path: Path) -> None:
    gate = Gate()
    async with (
        running_api(tmp_path / "store.db", gate=gate) as api,
        EnvClient(api.url, run="run", batch_size=1) as client,
    ):
        async with gate.passing():
            assert not await client.pause_calls("drain", timeout_seconds=0.05)
        assert await client.pause_calls("abort")
        assert gate.paused
        await client.resume_calls(version=4)
        assert not gate.paused
        assert (await api.get("/v1/policy"))["version"] == 4


async def test_calls_stay_paused_when_the_server_restarts(tmp_path: Path) -> None:
    async with running_api(tmp_path / "store.db", gate=Gate()) as api:
        await api.post("/v1/policy/pause", {"in_flight": "abort"})
    again = Gate()
    async with running_api(tmp_path / "store.db", gate=again) as api:
        assert (await api.get("/v1/policy"))["paused"]
        joined = {"name": "a@b", "instance": "instance", "env": "math", "split": "train", "seed": 0}
        joining = await api.http.post("/v1/environments", json=joined | {"group_size": 2})
        welcome = joining.json()
        key = {KEY_HEADER: welcome["key"]}
        beat = {"open": 0, "capacity": 1, "begun": 0}
        path = f"/v1/environments/{welcome['id']}/heartbeat"
        news = (await api.http.post(path, json=beat, headers=key)).json()
        assert news["pause"]["in_flight"] == "abort"
        await api.post("/v1/policy/resume", {"version": 1})
        assert not again.paused
        assert (await api.http.post(path, json=beat, headers=key)).json()["pause"] is None
    async with running_api(tmp_path / "store.db", gate=Gate()) as api:
        assert not (await api.get("/v1/policy"))["paused"]


async def test_what_cannot_be_paused_or_resumed_is_said(tmp_path: Path) -> None:
    async with running_api(tmp_path / "store.db", gate=Gate()) as api:
        assert not (await api.post("/v1/policy/resume", {}))["paused"]
        wrong = await api.http.post("/v1/policy/pause", json={"in_flight": "drop"})
        assert wrong.status_code == 422
        assert "in_flight" in wrong.text
        await api.post("/v1/policy/pause", {})
        await api.post("/v1/policy-version", {"version": 3})
        lower = await api.http.post("/v1/policy/resume", json={"version": 2})
        assert lower.status_code == 409
        assert (await api.get("/v1/policy"))["paused"]
    async with running_api(tmp_path / "store.db") as api:
        assert (await api.http.post("/v1/policy/pause", json={})).status_code == 404
