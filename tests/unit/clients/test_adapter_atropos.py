"""A trainer on the Atropos wire gets the rows that the native client gives."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from envserver_clients.adapters.atropos import AtroposTrainerClient
from envserver_clients.http import EnvClient, Retries, ServerUnreachable
from envserver_clients.records import Batch, Row
from support.api import Api, wire_group

from envserver import ConflictError, InputError


def told(row: Row) -> list[object]:
    logprobs = None if row.logprobs is None else row.logprobs.tolist()
    return [row.tokens.tolist(), row.mask.tolist(), logprobs, row.reward, row.learn]


async def batches(api: Api, size: int) -> list[Batch]:
    def loop() -> list[Batch]:
        with AtroposTrainerClient(api.url, group_size=2, batch_size=size) as trainer:
            return list(trainer.batches(idle_seconds=0.3))

    return await asyncio.to_thread(loop)


async def test_rows_are_those_of_the_native_client(api: Api) -> None:
    await api.put("a", truncated=True)
    await api.put("b")
    async with EnvClient(api.url, run="all", batch_size=2, delivery="broadcast") as client:
        native = await client.lease(whole=False)
        assert native is not None
        (batch,) = await batches(api, 2)
    assert len(batch.groups) == 2
    assert [told(row) for row in batch.rows] == [told(row) for row in native.rows]
    assert {row.versions[-1] for row in batch.rows} == {-1}


async def test_groups_of_others_keep_their_scores_and_masks(api: Api) -> None:
    logprobs = [[1.0, -0.5, -0.25]] * 2
    for mark in (1, 2):
        await api.post("/scored_data", wire_group(2, mark, inference_logprobs=logprobs))
    rows = [row for batch in await batches(api, 1) for row in batch.rows]
    assert [row.tokens[0] for row in rows] == [1, 1, 2, 2]
    assert told(rows[0]) == [[1, 5, 6], [0, 1, 1], [0.0, -0.5, -0.25], 0.5, True]
    assert len({row.group_id for row in rows}) == 2


async def test_fetching_is_not_acknowledging_for_who_asked_for_that(api: Api) -> None:
    for mark in (1, 2):
        await api.post("/scored_data", wire_group(2, mark))

    def train() -> None:
        with AtroposTrainerClient(
            api.url, group_size=2, batch_size=1, acknowledged=True
        ) as trainer:
            learned, left = trainer.lease(wait_seconds=5), trainer.lease(wait_seconds=5)
            assert learned is not None and left is not None
            assert learned.lease_id != left.lease_id
            trainer.ack(learned, checkpoint="step-1")

    await asyncio.to_thread(train)
    states = (await api.get("/v1/status"))["groups"]
    assert (states["acked"], states["leased"]) == (1, 1)


def test_failures_have_types() -> None:
    answers = {
        "/register": httpx.Response(200, json={"uuid": 1}),
        "/batch": httpx.Response(200, json={"status": "error", "message": "No.", "batch": []}),
    }
    wire = httpx.MockTransport(lambda request: answers[request.url.path])
    with AtroposTrainerClient("http://x", group_size=2, transport=wire) as trainer:
        with pytest.raises(ConflictError, match=r"There is no batch: No\."):
            trainer.lease()
        answers["/batch"] = httpx.Response(200, json={"batch": 7})
        with pytest.raises(InputError, match="is not a batch"):
            trainer.lease()
        answers["/batch"] = httpx.Response(200, json={"batch": None})
        assert trainer.lease() is None
    quick = Retries(tries=2, first_pause_seconds=0.01)
    with pytest.raises(ServerUnreachable):
        AtroposTrainerClient("http://127.0.0.1:1", group_size=2, retries=quick).register()
