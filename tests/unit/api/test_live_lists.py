"""What a server shows of now: failures and drops, leases, engines, answer times."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from envserver_records.errors import EngineTimeout, LimitReached, RolloutError, Stale
from support.api import Api, native_group, put_native, running_api
from support.joined import join
from support.watching import Page, watching

from envserver.api.live import EngineSource, Live
from envserver.api.live.failures import MOST_ROWS
from envserver.config import SimConfig
from envserver.models.measured import MeasuredEngine
from envserver.models.sim import SimEngine
from envserver.rollouts.events import GroupDropped, RolloutFailed
from envserver.telemetry.numbers import Distribution


def failed(error: RolloutError, group_id: str = "g", *, final: bool = False) -> RolloutFailed:
    return RolloutFailed(
        group_id=group_id,
        index=0,
        task_id="task",
        rollout_id=f"{group_id}-r2",
        attempt=3,
        failure=error.failure(),
        final=final,
        at=time.time(),
    )


def dropped(reason: str, group_id: str = "g", *, is_failure: bool = False) -> GroupDropped:
    return GroupDropped(
        group_id=group_id,
        index=0,
        task_id="task",
        reason=reason,
        failed=is_failure,
        message="why",
        at=time.time(),
    )


class Server:
    """An API and what its parts tell of."""

    def __init__(self, api: Api, live: Live) -> None:
        self.api, self.live = api, live
        self.tell = live.failures.observer("math")

    async def failures(self, **query: Any) -> dict[str, Any]:
        answer = await self.api.get("/v1/failures", params=query)
        return dict(answer)


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    live = Live()
    async with running_api(tmp_path / "s.db", live=live) as api:
        yield Server(api, live)


async def test_failures_say_whose_fault_in_words_without_secrets(server: Server) -> None:
    key = "sk-abcdefghijklmnopqrstuvwx"
    server.tell(failed(EngineTimeout(f"No answer to\x1b[1m {key}.")))
    server.tell(failed(LimitReached("Too many turns."), final=True))
    server.tell(failed(Stale("Too old."), "other", final=True))
    server.tell(dropped("incomplete", is_failure=True))
    server.tell(dropped("zero_variance", "all alike"))
    found = await server.failures()
    assert [(row["kind"], row["fault"], row["what"]) for row in found["failures"]] == [
        ("zero_variance", "model", "drop"),
        ("incomplete", "model", "group"),
        ("stale", "trainer", "rollout"),
        ("limit_reached", "model", "rollout"),
        ("engine_timeout", "engine", "attempt"),
    ]
    last = found["failures"][-1]
    assert (last["environment"], last["task_id"], last["group_id"]) == ("math", "task", "g")
    assert (last["rollout"], last["attempt"]) == (2, 3)
    assert last["message"] == "No answer to [redacted]."


async def test_failures_are_filtered_counted_and_paged(server: Server) -> None:
    for number in range(MOST_ROWS + 5):
        error = EngineTimeout("late") if number % 5 else LimitReached("turns")
        server.tell(failed(error))
    found = await server.failures(fault="engine", limit=300)
    assert found["counts"] == {"engine_timeout": 800}
    seen = found["failures"]
    while found["next"] is not None:
        found = await server.failures(fault="engine", limit=300, before=found["next"])
        seen += found["failures"]
    assert len(seen) == 800
    assert [row["n"] for row in seen] == sorted({row["n"] for row in seen}, reverse=True)
    found = await server.failures(kind="limit_reached", limit=1)
    assert found["counts"] == {"engine_timeout": 800, "limit_reached": 200}
    assert (await server.failures(environment="other"))["failures"] == []
    assert (await server.api.http.get("/v1/failures?fault=nobody")).status_code == 422


async def test_runners_and_trainers_tell_of_failures_too(server: Server) -> None:
    joined = await join(server.api)
    await joined.beat(failures={"engine_timeout": 7}, dropped={})  # from before
    await joined.beat(failures={"engine_timeout": 9, "agent_error": 1}, dropped={"too_long": 3})
    found = await server.failures()
    told = {row["kind"]: (row["fault"], row["count"], row["what"]) for row in found["failures"]}
    assert told == {
        "engine_timeout": ("engine", 2, "attempt"),
        "agent_error": ("environment", 1, "attempt"),
        "too_long": ("model", 3, "drop"),
    }
    assert found["failures"][0]["runner"] == "math@one"
    api = server.api
    await put_native(api.store, native_group("useless"))
    await api.http.post("/v1/runs", json={"name": "run"})
    lease = (await api.http.post("/v1/runs/run/lease", json={})).json()["lease_id"]
    body = {"lease_id": lease, "reason": "too hard", "group_ids": ["useless"]}
    await api.http.post("/v1/runs/run/nack", json=body)
    (row,) = (await server.failures(fault="trainer"))["failures"]
    assert (row["group_id"], row["environment"], row["kind"]) == ("useless", "math", "set_aside")
    assert (row["message"], row["what"]) == ("too hard", "drop")


@pytest.mark.thorough
async def test_many_failures_are_one_event(server: Server) -> None:
    page = Page()
    async with watching(server.api.http, page) as connection:
        server.tell(failed(EngineTimeout("late")))
        row = await connection.until("failure")
        assert (row["n"], row["message"]) == (1, "late")
        for _ in range(500):
            server.tell(failed(EngineTimeout("late")))
        assert await connection.until("failures") == {"count": 500, "first": 2, "last": 501}


async def test_leased_groups_are_shown_without_their_leases(where: str) -> None:
    async with running_api(where) as api:
        for name in "abc":
            await put_native(api.store, native_group(name))
        for run in ("run", "all"):
            delivery = "broadcast" if run == "all" else "shared"
            body = {"name": run, "batch_size": 1, "delivery": delivery}
            assert (await api.http.post("/v1/runs", json=body)).status_code == 201
        leases = [
            (await api.post("/v1/runs/run/lease", {"max_groups": 2, "seconds": 60})),
            (await api.post("/v1/runs/run/lease", {"max_groups": 1, "seconds": 60})),
            (await api.post("/v1/runs/all/lease", {"max_groups": 3, "seconds": 600})),
        ]
        found = await api.get("/v1/runs/run/leases")
        assert [row["group_id"] for row in found["leases"]] == ["a", "b", "c"]
        assert found["total"] == 3
        row = found["leases"][0]
        assert row["environment"] == "math"
        assert 0 <= row["age_seconds"] < 60
        assert 0 < row["expires_in_seconds"] <= 60
        text = str(found)
        assert not [one["lease_id"] for one in leases if one["lease_id"] in text]
        await api.http.post("/v1/runs/run/ack", json={"lease_id": leases[0]["lease_id"]})
        assert (await api.get("/v1/runs/run/leases"))["total"] == 1
        few = await api.get("/v1/runs/all/leases?limit=2")
        assert (len(few["leases"]), few["total"]) == (2, 3)
        assert few["leases"][0]["expires_in_seconds"] > 60
        assert (await api.http.get("/v1/runs/nobody/leases")).status_code == 404


async def test_an_engine_is_told_of_when_it_changes(server: Server) -> None:
    version = 1
    async with MeasuredEngine(SimEngine(SimConfig())) as engine:
        server.live.engines.append(EngineSource("", engine, "tiny", lambda: version))
        (row,) = (await server.api.get("/v1/engines"))["engines"]
        assert (row["url"], row["weights_version"], row["calls_total"]) == ("sim", 1, 0)
        assert (row["seconds_p50"], row["breaker"], row["ready"]) == (None, "closed", True)
        page = Page()
        async with watching(server.api.http, page) as connection:
            version = 2
            await connection.until("engine", weights_version=2)


def test_a_quantile_is_known_to_the_width_of_a_bound() -> None:
    seen = Distribution((1.0, 2.0, 4.0))
    assert seen.quantile(0.5) is None
    for value in (0.5, 1.5, 1.5, 3.0):
        seen.add(value)
    assert seen.quantile(0.5) == 1.5
    assert 2 < (seen.quantile(0.95) or 0) <= 4
    seen.add(100)
    assert seen.quantile(1) == 4
