"""The Atropos wire over real HTTP: the answers to Atropos trainers and environments."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.api import (
    ENVIRONMENT,
    KEYS,
    REGISTRATION,
    Api,
    mark_of,
    native_group,
    put_native,
    running_api,
    wire_group,
)
from support.clocks import Clock
from support.waiting import until

from envserver.store import GroupPut

JSON = {"content-type": "application/json"}


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Api]:
    async with running_api(tmp_path / "store.db") as running:
        yield running


async def test_before_anybody_registers(api: Api) -> None:
    assert await api.get("/") == {"message": "AtroposLib API"}
    assert await api.get("/info") == {"batch_size": -1, "max_token_len": -1}
    assert await api.get("/wandb_info") == {"group": None, "project": None}
    assert await api.get("/status") == {"current_step": 0, "queue_size": 0}
    assert await api.get("/batch") == {
        "status": "error",
        "message": "Trainer not registered. Call /register first.",
        "batch": [],
    }
    example = await api.get("/latest_example")
    assert set(example) == set(KEYS) - {
        "overrides",
        "group_overrides",
        "env_id",
        "distill_token_ids",
        "distill_logprobs",
    }
    assert all(value == [] for value in example.values())
    assert await api.post("/register-env", ENVIRONMENT) == {"status": "wait for trainer to start"}
    assert await api.post("/disconnect-env", {"env_id": 0}) == {
        "status": "failure",
        "error": "list index out of range",
    }


async def test_registering_a_trainer(api: Api) -> None:
    answer = await api.http.post("/register", json=REGISTRATION)
    assert answer.status_code == 200
    assert answer.json()["uuid"] > 2**53
    assert await api.get("/info") == {"batch_size": 4, "max_token_len": 512}
    assert await api.get("/wandb_info") == {"group": "group", "project": "project"}
    assert await api.get("/status") == {"current_step": 3, "queue_size": 0}


async def test_a_trainer_must_say_everything(api: Api) -> None:
    for field in REGISTRATION:
        without = {name: value for name, value in REGISTRATION.items() if name != field}
        for body in (without, REGISTRATION | {field: None}):
            answer = await api.http.post("/register", json=body)
            assert answer.status_code == 422
            (error,) = answer.json()["detail"]
            assert error["loc"] == ["body", field]
            assert {"type", "loc", "msg", "input"} <= set(error)


async def test_environments_wait_for_the_first_batch_call(api: Api) -> None:
    await api.register()
    assert await api.post("/register-env", ENVIRONMENT) == {"status": "wait for trainer to start"}
    assert await api.get("/batch") == {"batch": None}
    assert await api.post("/register-env", ENVIRONMENT) == {
        "status": "success",
        "env_id": 0,
        "wandb_name": "env_0",
        "checkpoint_dir": "/checkpoints",
        "starting_step": 3,
        "checkpoint_interval": 10,
        "num_steps": 100,
    }
    other = await api.post("/register-env", ENVIRONMENT | {"desired_name": "other"})
    again = await api.post("/register-env", ENVIRONMENT)
    assert (other["env_id"], other["wandb_name"]) == (1, "other_0")
    assert (again["env_id"], again["wandb_name"]) == (2, "env_1")
    assert await api.post("/disconnect-env", {"env_id": 2}) == {"status": "success"}
    failed = {"status": "failure", "error": "list index out of range"}
    assert await api.post("/disconnect-env", {"env_id": 3}) == failed
    assert await api.post("/disconnect-env", {"env_id": -1}) == failed


async def test_batches_are_oldest_first_and_the_step_counts_those_formed(api: Api) -> None:
    await api.register()
    for mark in range(9):
        await api.post("/scored_data", wire_group(mark=mark))
    assert await api.get("/status") == {"current_step": 3, "queue_size": 9}
    assert await api.batch_marks() == [0, 1]
    assert await api.get("/status") == {"current_step": 7, "queue_size": 1}
    assert [await api.batch_marks() for _ in range(4)] == [[2, 3], [4, 5], [6, 7], None]
    assert await api.get("/status") == {"current_step": 7, "queue_size": 1}


async def test_a_null_batch_says_why(api: Api) -> None:
    await api.register(batch_size=10)
    for _ in range(20):
        await api.post("/scored_data", wire_group(4))
    answer = await api.http.get("/batch")
    assert answer.json() == {"batch": None}
    assert "batch_size 10" in answer.headers["x-envserver-reason"]


async def test_parts_are_buffered_until_they_make_a_whole(api: Api) -> None:
    await api.start()
    env_id = await api.add_environment(group_size=4)

    async def post(rows: int, mark: int) -> Any:
        return await api.post("/scored_data", wire_group(rows, mark, env_id=env_id))

    assert await post(3, 1) == {"status": "buffered", "buffer_size": 3}
    assert await post(2, 2) == {"status": "buffered", "buffer_size": 5}
    assert await post(4, 3) == {"status": "received"}
    assert (await api.get("/status"))["queue_size"] == 1
    assert await post(2, 4) == {"status": "buffered", "buffer_size": 3}
    assert (await api.get("/status"))["queue_size"] == 3
    assert await post(9, 5) == {"status": "buffered", "buffer_size": 12}
    assert await api.batch_marks() == [3]
    assert await api.batch_marks() == [2, 4]
    assert await api.batch_marks() is None


async def test_lists_of_groups(api: Api) -> None:
    await api.start()
    env_id = await api.add_environment(group_size=4)
    received = {"status": "received", "groups_processed": 0}
    assert await api.post("/scored_data_list", []) == received
    groups = [wire_group(4), wire_group(4, env_id=env_id)]
    assert await api.post("/scored_data_list", groups) == received | {"groups_processed": 2}
    groups = [wire_group(rows, env_id=env_id) for rows in (4, 1, 3, 1)]
    assert await api.post("/scored_data_list", groups) == {
        "status": "received",
        "groups_processed": 4,
        "buffered": 3,
        "last_buffer_size": 1,
    }
    assert (await api.get("/status"))["queue_size"] == 5
    assert (await api.http.post("/scored_data_list", json=wire_group())).status_code == 422


async def test_groups_of_a_list_are_queued_in_its_order(api: Api) -> None:
    await api.start(batch_size=4)
    env_id = await api.add_environment(group_size=4)
    await api.post("/scored_data", wire_group(2, 1, env_id=env_id))
    mixed = [wire_group(2, 2, env_id=env_id), wire_group(4, 3, env_id=env_id)]
    await api.post("/scored_data_list", mixed)
    assert [await api.batch_marks() for _ in range(3)] == [[1, 2], [3], None]


async def test_unknown_environments_post_straight_to_the_queue(api: Api) -> None:
    await api.start()
    await api.add_environment(group_size=4)
    for env_id in (5, -1, 2**70, None):
        assert await api.post("/scored_data", wire_group(env_id=env_id)) == {"status": "received"}
    assert (await api.get("/status"))["queue_size"] == 4
    first = (await api.get("/batch"))["batch"]
    assert [group["env_id"] for group in first] == [5, -1]


async def test_status_of_environments(api: Api) -> None:
    await api.start(batch_size=8)
    one = await api.add_environment(weight=3.0, group_size=2)
    two = await api.add_environment(weight=1.0, group_size=4, min_batch_allocation=0.5)
    for _ in range(3):
        await api.post("/scored_data", wire_group(2, env_id=one))
        await api.post("/scored_data", wire_group(4, env_id=two))
    assert await api.get("/status-env", json={"env_id": one}) == {
        "current_step": 3,
        "queue_size": (6 + 12 - 4) // 2,
        "unallocated_fraction": 0.5,
        "self_queue_size": 3,
        "max_group_size": 4,
        "env_weight": 0.75,
    }
    assert (await api.get("/status-env", json={"env_id": two}))["queue_size"] == (12 + 8) // 4
    for body in ({"env_id": 7}, {"env_id": -1}):
        answer = await api.http.request("GET", "/status-env", json=body)
        assert answer.status_code == 404
    assert (await api.http.get("/status-env", params={"env_id": 0})).status_code == 422


async def test_our_own_groups_stop_no_environment_of_others(api: Api) -> None:
    """If both waited for room in the queue, an environment that comes second would never begin."""
    await api.start(batch_size=8)
    env_id = await api.add_environment(group_size=2)
    for number in range(5):
        await put_native(api.store, native_group(f"native-{number}"))
    await api.post("/scored_data", wire_group(2, env_id=env_id))
    status = await api.get("/status-env", json={"env_id": env_id})
    assert (status["queue_size"], status["self_queue_size"]) == (1, 1)
    assert (await api.get("/status"))["queue_size"] == 6


async def test_weights_that_sum_to_nothing_are_no_error(api: Api) -> None:
    await api.start()
    ignored = await api.add_environment(weight=-1.0)
    empty = await api.add_environment(weight=0.0, group_size=0, max_token_length=0)
    for env_id in (ignored, empty):
        assert (await api.get("/status-env", json={"env_id": env_id}))["env_weight"] == 0.01


async def test_minimum_shares(api: Api) -> None:
    await api.start(batch_size=8)
    scarce = await api.add_environment(min_batch_allocation=0.25)
    plenty = await api.add_environment()
    for mark in range(4):
        await api.post("/scored_data", wire_group(2, mark, env_id=plenty))
    answer = await api.http.get("/batch")
    assert answer.json() == {"batch": None}
    assert f"environment {scarce}" in answer.headers["x-envserver-reason"]
    await api.post("/scored_data", wire_group(2, 9, env_id=scarce))
    assert await api.batch_marks() == [9, 0, 1, 2]
    await api.post("/disconnect-env", {"env_id": scarce})
    for mark in range(10, 13):
        await api.post("/scored_data", wire_group(2, mark, env_id=plenty))
    assert await api.batch_marks() == [3, 10, 11, 12]


async def test_an_environment_that_went_silent_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr("envserver.api.heartbeats.time", clock)
    async with running_api(tmp_path / "s.db") as api:
        await api.start()
        await api.add_environment(min_batch_allocation=0.5)
        for mark in range(2):
            await api.post("/scored_data", wire_group(2, mark, env_id=4))
        assert await api.batch_marks() is None
        clock.ahead = 31
        assert await api.batch_marks() == [0, 1]


async def test_what_came_before_the_trainer_is_delivered(api: Api) -> None:
    await api.post("/scored_data", wire_group(2, 1))
    await api.register()
    await api.post("/scored_data", wire_group(2, 2))
    assert await api.batch_marks() == [1, 2]
    await api.http.get("/reset_data")
    await api.post("/scored_data", wire_group(2, 2))
    await api.post("/scored_data", wire_group(2, 3))
    await api.register()
    assert await api.get("/info") == {"batch_size": 4, "max_token_len": 512}
    assert await api.batch_marks() == [2, 3]


async def test_registering_again_starts_anew_and_keeps_the_data(api: Api) -> None:
    await api.start()
    await api.add_environment()
    for mark in range(5):
        await api.post("/scored_data", wire_group(2, mark))
    assert await api.batch_marks() == [0, 1]
    await api.register(batch_size=2, starting_step=50)
    assert await api.get("/info") == {"batch_size": 2, "max_token_len": 512}
    assert await api.get("/status") == {"current_step": 50, "queue_size": 3}
    assert await api.post("/register-env", ENVIRONMENT) == {"status": "wait for trainer to start"}
    assert (await api.get("/status-env", json={"env_id": 0}))["current_step"] == 50
    assert [await api.batch_marks() for _ in range(4)] == [[2], [3], [4], None]


async def test_reset(api: Api) -> None:
    await api.start()
    env_id = await api.add_environment(group_size=4)
    await api.post("/scored_data", wire_group(1, 1, env_id=env_id))
    for mark in range(2, 7):
        await api.post("/scored_data", wire_group(2, mark))
    await api.batch_marks()
    answer = await api.http.get("/reset_data")
    assert (answer.status_code, answer.text) == (200, "Reset successful")
    assert answer.headers["content-type"].startswith("text/plain")
    assert await api.get("/info") == {"batch_size": -1, "max_token_len": 512}
    assert await api.get("/wandb_info") == {"group": None, "project": None}
    assert await api.get("/status") == {"current_step": 0, "queue_size": 0}
    assert (await api.get("/batch"))["status"] == "error"
    assert mark_of(await api.get("/latest_example")) == 6
    assert await api.post("/register-env", ENVIRONMENT) == {"status": "wait for trainer to start"}
    await api.start()
    assert await api.batch_marks() is None
    assert await api.add_environment() == 0
    counts = await api.store.counts()
    assert (counts["queued"], counts["buffered"], counts["dropped"]) == (0, 0, 4)


async def test_a_reset_takes_nothing_from_native_runs(api: Api) -> None:
    await api.start()
    env_id = await api.add_environment(group_size=4)
    await api.store.create_run("all", batch_size=8, delivery="broadcast")
    await api.store.create_run("maths", batch_size=8, environments=["math"])
    await put_native(api.store, native_group("a"))
    await put_native(api.store, msgspec.structs.replace(native_group("b"), env="code"))
    await api.post("/scored_data", wire_group(2, 1))
    await api.post("/scored_data", wire_group(1, 2, env_id=env_id))
    await api.http.get("/reset_data")
    counts = await api.store.counts()
    assert (counts["queued"], counts["buffered"], counts["dropped"]) == (1, 0, 3)
    lease = await api.post("/v1/runs/maths/lease", {"max_groups": 9})
    assert [group["group_id"] for group in lease["groups"]] == ["a"]
    others = await api.post("/v1/runs/all/lease", {"max_groups": 9})
    assert len(others["groups"]) == 3
    # A run that takes everything keeps everything; when it is closed, it waits for nothing.
    await api.store.create_run("shared", batch_size=8)
    await api.post("/scored_data", wire_group(2, 3))
    await api.http.get("/reset_data")
    assert (await api.store.counts())["queued"] == 1
    await api.start()
    assert (await api.get("/status"))["queue_size"] == 1
    await api.store.close_run("shared")
    await api.http.get("/reset_data")
    assert (await api.store.counts())["queued"] == 0


async def test_a_trainer_that_acknowledges_gets_a_lost_batch_again(tmp_path: Path) -> None:
    lease = {"x-envserver-ack": "lease"}
    async with running_api(tmp_path / "s.db") as api:
        await api.register()
        for mark in range(6):
            await api.post("/scored_data", wire_group(2, mark))

        async def fetch() -> tuple[list[int] | None, str]:
            answer = await api.http.get("/batch", headers=lease)
            batch = answer.json()["batch"]
            marks = None if batch is None else [mark_of(group) for group in batch]
            return marks, answer.headers.get("x-envserver-lease", "")

        first, lost = await fetch()
        second, kept = await fetch()
        assert (first, second) == ([0, 1], [2, 3])
        assert await api.post("/ack", {"lease_id": kept}) == {"status": "success"}
        assert await api.post("/ack", {"lease_id": kept}) == {"status": "success"}
        await api.store.extend(lost, 0.01)
        await until(lambda: queued(api, 4))
        again, other = await fetch()
        assert again == first
        assert other != lost
        assert (await api.get("/status"))["current_step"] == 6
        answer = await api.http.post("/ack", json={"lease_id": lost})
        assert answer.status_code == 409
        assert (await api.http.post("/ack", json={"lease_id": "nothing"})).status_code == 404


@pytest.mark.parametrize("ask", [{}, {"x-envserver-ack": "lease"}])
async def test_a_request_for_a_batch_that_is_repeated_with_its_key_gets_the_same_batch(
    ask: dict[str, str], tmp_path: Path
) -> None:
    async def fetch(key: str) -> list[int]:
        answer = await api.http.get("/batch", headers=ask | {"idempotency-key": key})
        return [mark_of(group) for group in answer.json()["batch"]]

    async with running_api(tmp_path / "s.db") as api:
        await api.register()
        for mark in range(6):
            await api.post("/scored_data", wire_group(2, mark))
        assert [await fetch("one"), await fetch("two"), await fetch("one")] == [
            [0, 1],
            [2, 3],
            [0, 1],
        ]
    async with running_api(tmp_path / "s.db") as api:
        assert [await fetch("two"), await fetch("three")] == [[2, 3], [4, 5]]
        assert (await api.get("/status"))["current_step"] == 6
        assert (await api.store.counts())["acked"] == (0 if ask else 6)
        if ask:
            for lease in await api.store.open_leases("atropos"):
                await api.store.extend(lease.lease_id, 0.01)
            await until(lambda: queued(api, 6))
            assert await fetch("one") == [0, 1]  # its lease ended: another one


async def queued(api: Api, groups: int) -> bool:
    return (await api.store.counts())["queued"] == groups


async def test_fetching_is_acknowledging_for_others(api: Api) -> None:
    await api.register()
    for mark in range(2):
        await api.post("/scored_data", wire_group(2, mark))
    answer = await api.http.get("/batch")
    assert "x-envserver-lease" not in answer.headers
    assert (await api.store.counts())["acked"] == 2


async def test_groups_of_our_own_environments_are_delivered_too(api: Api) -> None:
    await api.register()
    await api.post("/scored_data", wire_group(2, 1))
    await put_native(api.store, native_group("native-1", truncated=True))
    assert (await api.get("/status"))["queue_size"] == 2
    _, native = (await api.get("/batch"))["batch"]
    assert list(native) == KEYS
    assert native["tokens"] == [[1, 2, 3, 4, 5]] * 2
    assert native["masks"] == [[-100, -100, 3, 4, 5]] * 2
    assert native["inference_logprobs"] == [[1.0, 1.0, -0.25, -0.5, -0.75]] * 2
    assert native["scores"] == [0.0, 1.0]
    assert native["overrides"] == [{"set_advantage_to_zero": True}] * 2
    assert native["generation_params"] == {"temperature": 0.7}
    assert [messages[-1]["content"] for messages in native["messages"]] == ["2", "2"]
    assert native["env_id"] is None


async def test_how_our_own_groups_are_written_can_be_chosen(tmp_path: Path) -> None:
    more = {"score_range": "pm1", "include_messages": False}
    async with running_api(tmp_path / "s.db", **more) as api:
        await api.register(batch_size=2)
        await put_native(api.store, native_group("native-1"))
        (native,) = (await api.get("/batch"))["batch"]
        assert native["scores"] == [-1.0, 1.0]
        assert native["messages"] is None
        assert native["overrides"] is None


async def test_a_group_that_cannot_be_read_holds_up_no_batch(api: Api) -> None:
    await api.register(batch_size=2)
    odd = {"env": "math", "format": "group", "size": 2, "tokens": 1, "max_length": 1}
    await api.store.put([GroupPut(group_id="broken", body=b"\xc1", **odd)])
    await put_native(api.store, native_group("empty", sequences=[]))
    await api.post("/scored_data", wire_group(2, 5))
    assert await api.batch_marks() == [5]
    assert (await api.store.counts())["dropped"] == 2


async def test_native_and_atropos_trainers_share_one_queue(api: Api) -> None:
    await api.register()
    for mark in range(10):
        await api.post("/scored_data", wire_group(2, mark))
    assert await api.batch_marks() == [0, 1]
    await api.http.post("/v1/runs", json={"name": "native", "batch_size": 3})
    lease = (await api.http.post("/v1/runs/native/lease", json={})).json()
    assert [mark_of(group["group"]) for group in lease["groups"]] == [2, 3, 4]
    assert [await api.batch_marks() for _ in range(3)] == [[6, 7], [8, 9], None]
    nack = await api.http.post("/v1/runs/native/nack", json={"lease_id": lease["lease_id"]})
    assert nack.status_code == 204
    assert [await api.batch_marks() for _ in range(3)] == [[2, 3], [4, 5], None]


async def test_many_posters_and_trainers_at_once(api: Api) -> None:
    await api.register()

    async def post(number: int) -> None:
        for mark in range(number * 20, number * 20 + 20):
            await api.post("/scored_data", wire_group(2, mark))

    got: list[int] = []

    async def fetch() -> None:
        while len(got) < 200:
            got.extend(await api.batch_marks() or [])
            await api.get("/status")

    async with asyncio.TaskGroup() as group:
        for number in range(10):
            group.create_task(post(number))
        for _ in range(3):
            group.create_task(fetch())
    assert sorted(got) == list(range(200))
