"""Rollouts of tasks that a trainer names: in its order, whole, made once, durable."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from support.commands import Running, free_port, running, until

from clients.http import SyncEnvClient
from envserver import NotFoundError, Trajectory

MATH = (
    "serve", "--env", "math", "--model", "sim", "--workers.processes", 1,
    "--rollouts.max_queued_groups", 0, "--store", "groups.db",
)  # fmt: skip


@contextlib.contextmanager
def serving(folder: Path, *words: object) -> Iterator[tuple[Running, str]]:
    port = free_port()
    with running(*MATH, "--port", port, *words, folder=folder) as server:
        server.wait_for("Trainers: ")
        yield server, f"http://127.0.0.1:{port}"


def ids(groups: list[list[Trajectory | None]]) -> list[list[str]]:
    return [[one.rollout_id for one in group if one is not None] for group in groups]


def made_of(url: str) -> int:
    """Ordered groups that are finished: no run ever leases them."""
    return int(httpx.get(f"{url}/v1/status").json()["groups"]["dropped"])


def test_each_named_task_gets_its_rollouts_in_order_and_the_same_when_asked_again(
    tmp_path: Path,
) -> None:
    with serving(tmp_path) as (_, url), SyncEnvClient(url, run=None) as client:
        known = client.tasks("math", limit=5)
        assert len({task.task_id for task in known}) == 5
        assert all("answer" not in task.public for task in known)
        assert client.tasks("math", after=3, limit=2) == known[3:]
        named = [known[index].task_id for index in (3, 0, 3)]
        made = client.rollouts("math", named, group_size=2, key="step-1")
        assert [[one.task_id if one else "" for one in group] for group in made] == [
            [name, name] for name in named
        ]
        rows = [one.sequences[0] for group in made for one in group if one is not None]
        assert len(rows) == 6 and all(row.mask.any() for row in rows)
        assert ids(client.rollouts("math", named, group_size=2, key="step-1")) == ids(made)
        others = ids(client.rollouts("math", named, group_size=2))
        assert not {one for group in others for one in group} & {
            one for group in ids(made) for one in group
        }
        status = httpx.get(f"{url}/v1/status").json()
        assert status["groups"]["queued"] == 0  # nothing but what was ordered, and it is no run's
        with pytest.raises(NotFoundError, match="nowhere"):
            client.rollouts("nowhere", named)
        with pytest.raises(NotFoundError, match="no task missing"):
            client.rollouts("math", ["missing"])
        with SyncEnvClient(url, run="other", delivery="broadcast") as other:
            assert not {one.group_id for one in other.list_groups() if one.state == "queued"}
    with serving(tmp_path) as (_, url), SyncEnvClient(url, run=None) as client:
        assert ids(client.rollouts("math", named, group_size=2, key="step-1")) == ids(made)


def test_an_order_outlives_the_one_who_asked_and_the_server(tmp_path: Path) -> None:
    body = {"environment": "math", "group_size": 2, "wait_seconds": 0.3}
    key = {"idempotency-key": "slow"}
    words = ("--sim.seconds_per_token", 0.05, "--rollouts.max_concurrent", 2)
    with serving(tmp_path, *words) as (server, url), SyncEnvClient(url, run=None) as client:
        named = [task.task_id for task in client.tasks("math", limit=8)]
        answer = httpx.post(f"{url}/v1/rollouts", json={**body, "task_ids": named}, headers=key)
        assert answer.status_code == 202
        assert answer.json()["groups"] == 8
        until(lambda: made_of(url) >= 2, 150, server.output, alive=server.process)
        server.process.kill()
    with serving(tmp_path) as (_, url), SyncEnvClient(url, run=None) as client:
        before = {one.group_id for one in client.list_groups()}
        made = client.rollouts("math", named, group_size=2, key="slow")
        assert all(one is not None for group in made for one in group)
        assert before <= {one.group_id for one in client.list_groups()}
        assert len(client.list_groups()) == 8
