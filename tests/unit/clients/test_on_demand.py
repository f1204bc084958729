"""Rollouts of tasks that a trainer names: in its order, whole, made once, durable."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from envserver_clients.http import SyncEnvClient
from support.commands import Running, free_port, running, until
from support.waiting import PATIENCE

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
    return int(httpx.get(f"{url}/v1/status", timeout=PATIENCE).json()["groups"]["dropped"])


@pytest.mark.thorough
def test_named_tasks_get_their_rollouts_in_order_once_also_over_a_kill(tmp_path: Path) -> None:
    words = ("--sim.seconds_per_token", 0.005, "--rollouts.max_concurrent", 4)
    with serving(tmp_path, *words) as (server, url), SyncEnvClient(url, run=None) as client:
        known = client.tasks("math", limit=20)
        assert len({task.task_id for task in known}) == 20
        assert all("answer" not in task.public for task in known)
        assert client.tasks("math", after=3, limit=2) == known[3:5]
        named = [known[index].task_id for index in (3, 0, 3)]
        made = client.rollouts("math", named, group_size=2, key="step-1")
        assert [[one.task_id if one else "" for one in group] for group in made] == [
            [name, name] for name in named
        ]
        rows = [one.sequences[0] for group in made for one in group if one is not None]
        assert len(rows) == 6 and all(row.mask.any() for row in rows)
        assert ids(client.rollouts("math", named, group_size=2, key="step-1")) == ids(made)
        other = ids(client.rollouts("math", named[:1], group_size=2))
        assert not set(other[0]) & set(ids(made)[0])
        with pytest.raises(NotFoundError, match="nowhere"):
            client.rollouts("nowhere", named)
        with pytest.raises(NotFoundError, match="no task missing"):
            client.rollouts("math", ["missing"])
        assert not [one for one in client.list_groups() if one.state != "dropped"]  # no run's
        # An order outlives whoever asked, and what it had made outlives the server.
        before = made_of(url)
        slow = [task.task_id for task in known]
        body = {"environment": "math", "task_ids": slow, "group_size": 2, "wait_seconds": 0.1}
        answer = httpx.post(
            f"{url}/v1/rollouts", json=body, headers={"idempotency-key": "slow"}, timeout=PATIENCE
        )
        assert answer.status_code == 202 and answer.json()["groups"] == 20
        until(lambda: made_of(url) >= before + 2, server.output, alive=server.process)
        server.kill()
    with serving(tmp_path) as (_, url), SyncEnvClient(url, run=None) as client:
        assert ids(client.rollouts("math", named, group_size=2, key="step-1")) == ids(made)
        kept = {one.group_id for one in client.list_groups()}
        assert len(kept) >= before + 2
        finished = client.rollouts("math", slow, group_size=2, key="slow")
        assert all(one is not None for group in finished for one in group)
        after = {one.group_id for one in client.list_groups()}
        assert kept <= after and len(after) == before + 20
