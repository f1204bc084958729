"""`serve`: a slow trainer is waited for, and what is too old is never delivered."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from envserver_clients.http import SyncEnvClient
from support.commands import Running, free_port, running, until
from support.waiting import PATIENCE

from envserver.store import open_store

MATH = (
    "serve", "--env", "math", "--model", "sim", "--env.group_size", 2, "--workers.processes", 1,
    "--env.ensure_scores_are_not_same", "false", "--store", "groups.db",
)  # fmt: skip


@contextlib.contextmanager
def serving(folder: Path, *words: object) -> Iterator[tuple[Running, str]]:
    port = free_port()
    with running(*MATH, "--port", port, *words, folder=folder, finish_seconds=1) as server:
        server.wait_for("Trainers: ")
        yield server, f"http://127.0.0.1:{port}"


def status(url: str) -> dict[str, Any]:
    answer = httpx.get(f"{url}/v1/status", timeout=PATIENCE).json()
    assert isinstance(answer, dict)
    return answer


async def known_before(place: Path) -> None:
    """A trainer that has registered and published, before any group is made."""
    async with open_store(place) as store:
        await store.create_run("trainer", batch_size=2)
        await store.set_value("policy_version", 0)


def at_rest(url: str) -> dict[str, Any] | None:
    """The status, once something waits and nothing is being made."""
    found = status(url)
    return found if found["groups"]["queued"] and not found["server"]["open_groups"] else None


@pytest.mark.parametrize("versions", [3, pytest.param(60, marks=pytest.mark.slow)])
def test_what_a_trainer_gets_is_never_older_than_it_may_be_and_what_is_is_counted(
    tmp_path: Path, versions: int
) -> None:
    words = ("--rollouts.max_staleness_at_delivery", 1, "--rollouts.max_staleness", 1)
    asyncio.run(known_before(tmp_path / "groups.db"))
    with (
        serving(tmp_path, *words, "--sim.latency_seconds", 0.02) as (server, url),
        SyncEnvClient(url, run="trainer", batch_size=2) as client,
    ):
        published, got = 0, 0
        for _ in range(versions):
            batch = next(client.batches(idle_seconds=PATIENCE))
            behind = [published - group.policy_version for group in batch.groups]
            assert all(0 <= one <= 1 for one in behind), behind
            got += len(behind)
            client.ack(batch)
            until(lambda: at_rest(url), server.output, alive=server.process)
            assert status(url)["groups"]["queued"] <= 4  # two batches, one for each version
            published += 3  # what waits is too old now
            client.publish_policy_version(published)
        found = status(url)["server"]
    assert got >= versions
    assert found["stale_groups"] >= versions
    assert found["policy_version"] == published


@pytest.mark.thorough
def test_rollouts_in_flight_that_became_too_old_end_and_are_counted(tmp_path: Path) -> None:
    words = ("--rollouts.max_staleness", 0, "--sim.seconds_per_token", 0.1)
    with (
        serving(tmp_path, *words) as (server, url),
        SyncEnvClient(url, run="trainer", batch_size=2) as client,
    ):
        client.publish_policy_version(0)
        until(
            lambda: status(url)["server"]["open_groups"] > 1,
            server.output,
            alive=server.process,
        )

        def publish_and_look() -> int:
            client.publish_policy_version(int(status(url)["policy_version"]) + 1)
            return int(status(url)["server"]["stale_rollouts"])

        assert until(publish_and_look, server.output, alive=server.process) > 0
        found = status(url)["server"]
        assert found["groups_dropped"].keys() <= {"stale"}
        assert found["rollouts_lost"] == found["stale_rollouts"]
