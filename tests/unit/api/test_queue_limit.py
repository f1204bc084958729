"""What posters are told while too much waits for the trainers, and what waiting costs."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from pathlib import Path

import orjson
import pytest
from support.api import running_api, wire_group
from support.waiting import until


@pytest.mark.parametrize(("limit", "most"), [("max_waiting_groups", 2), ("max_waiting_gb", 1e-9)])
async def test_posts_are_refused_while_too_much_waits(
    tmp_path: Path, limit: str, most: float
) -> None:
    async with running_api(tmp_path / "store.db", server={limit: most}) as api:
        await api.http.post("/v1/runs", json={"name": "native", "batch_size": 1})
        answers = [await api.http.post("/scored_data", json=wire_group())]
        while answers[-1].status_code == 200:
            await asyncio.sleep(0.05)  # the size is asked for a few times a second
            answers.append(await api.http.post("/scored_data", json=wire_group()))
        refused = answers[-1]
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "5")
        assert f"--server.{limit} is" in refused.json()["detail"]
        assert (await api.store.counts())["queued"] == len(answers) - 1
        lease = (await api.http.post("/v1/runs/native/lease", json={"max_groups": 100})).json()
        # What is leased still counts, since it may come back.
        assert (await api.http.post("/scored_data", json=wire_group())).status_code == 429
        await api.http.post("/v1/runs/native/ack", json={"lease_id": lease["lease_id"]})

        async def accepted() -> bool:
            answer = await api.http.post("/scored_data", json=wire_group())
            return answer.status_code == 200

        await until(accepted)


async def test_a_waiting_group_takes_less_than_a_kilobyte_of_memory(tmp_path: Path) -> None:
    at_once, lists = 250, 20
    body = orjson.dumps([wire_group(rows=4, tokens=[[1] * 64] * 4, masks=[[1] * 64] * 4)] * at_once)
    async with running_api(tmp_path / "store.db") as api:

        async def fill(times: int) -> None:
            for _ in range(times):
                answer = await api.http.post("/scored_data_list", content=body)
                assert answer.status_code == 200, answer.text

        await fill(2)  # what is made once
        gc.collect()
        tracemalloc.start()
        try:
            await fill(lists)
            gc.collect()
            size, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert (await api.store.counts())["queued"] == at_once * (lists + 2)
        assert size / (at_once * lists) < 1000
