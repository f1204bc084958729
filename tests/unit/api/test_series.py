"""The server's numbers over time: in memory for hours, in the store for weeks."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
from envserver_records.errors import StoreError
from prometheus_client.core import Metric
from support.api import running_api
from support.waiting import until

from envserver.api.metrics import Metrics
from envserver.api.recording import Recorder
from envserver.store import open_store
from envserver.telemetry.families import counter, gauge
from envserver.telemetry.history import MOST_NAMES, History, Name, curves

DELIVERED = Name("envserver_groups_delivered_total", (("environment", "math"),))


class Server:
    """What a server counts, and its clock."""

    def __init__(self) -> None:
        self.now, self.delivered = 6_000_000.0, 0.0
        self.metrics = Metrics()
        self.metrics.add(self.families)

    async def families(self) -> Iterable[Metric]:
        name, labels = "envserver_groups_delivered", ("environment",)
        return [
            counter(name, "", labels, [(("math",), self.delivered)]),
            gauge("envserver_secret", "", (), [((), 1.0)]),
        ]

    async def record(self, recorder: Recorder, *, after: float, delivered: float) -> None:
        self.now += after
        self.delivered = delivered
        await recorder.record()


async def test_minutes_survive_a_restart_and_come_before_what_memory_has(where: str) -> None:
    server = Server()
    async with open_store(where) as store:
        recorder = Recorder(server.metrics, store, lambda: server.now)
        for after, delivered in ((0, 1), (10, 2), (50, 3), (30, 4)):
            await server.record(recorder, after=after, delivered=delivered)
        rows = await recorder.between(server.now - 3600, server.now, 100)
        assert [numbers[DELIVERED] for _, numbers in rows] == [1, 2, 3, 4]
        assert {one.name for one in rows[0][1]} > {"process_cpu_seconds_total", DELIVERED.name}
        assert "envserver_secret" not in {one.name for one in rows[0][1]}
    async with open_store(where) as store:
        recorder = Recorder(server.metrics, store, lambda: server.now)
        await server.record(recorder, after=60, delivered=5)
        rows = await recorder.between(server.now - 3600, server.now, 100)
        assert [numbers[DELIVERED] for _, numbers in rows] == [1, 3, 5]
        later = await recorder.between(rows[1][0], server.now, 100)
        assert [numbers[DELIVERED] for _, numbers in later] == [3, 5]
        await server.record(recorder, after=30 * 24 * 3600, delivered=6)
        left = await store.minutes_between(0, int(server.now // 60), 1)
        assert len(left) == 2  # the minute thirty days ago, and this one


async def test_a_minute_that_the_store_refuses_is_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def put_minute(*_: object) -> None:
        raise StoreError("The disk is full.")

    server = Server()
    async with open_store(str(tmp_path / "s.db")) as store:
        monkeypatch.setattr(store, "put_minute", put_minute)
        recorder = Recorder(server.metrics, store, lambda: server.now)
        await server.record(recorder, after=0, delivered=1)
        assert len(await recorder.between(server.now - 3600, server.now, 10)) == 1


async def test_the_route_answers_curves(tmp_path: Path) -> None:
    async with running_api(tmp_path / "s.db", metrics=Server().metrics) as api:
        path = f"/v1/series?names={DELIVERED.name}"

        async def is_recorded() -> bool:
            return bool((await api.get(path))["series"])

        await until(is_recorded)
        found = await api.get(path)
        (one,) = found["series"]
        assert (one["name"], one["labels"]) == (DELIVERED.name, {"environment": "math"})
        assert set(one["values"]) == {0.0} and len(one["values"]) == len(found["times"])
        assert (await api.get("/v1/series?end=5"))["times"] == []
        assert await api.status("GET", "/v1/series?points=0") == 422


def test_curves_are_thinned_out_to_their_last_rows_and_names_are_bounded() -> None:
    history = History(100)
    for at in range(150):
        history.add(float(at), {DELIVERED: float(at), Name("late", ()): 1.0} if at > 120 else {})
    found = curves(history.between(0, 200), 3, frozenset([DELIVERED.name]))
    assert found["times"] == [50.0, 99.0, 149.0]
    assert [one["values"] for one in found["series"]] == [[None, None, 149.0]]
    history.add(200.0, {Name(str(index), ()): 0.0 for index in range(2 * MOST_NAMES)})
    assert len(history.between(200, 200)[0][1]) == MOST_NAMES - 2
