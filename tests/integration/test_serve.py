"""`envserver serve`: what it accepted reaches a trainer once, whatever happens to it."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from envserver_clients.http import SyncEnvClient
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from support.commands import Running, envserver, free_port, running, until
from support.waiting import PATIENCE

MATH = (
    "serve", "--env", "math", "--model", "sim", "--sim.latency_seconds", 0,
    "--env.group_size", 2, "--env.ensure_scores_are_not_same", "false", "--store", "groups.db",
)  # fmt: skip

REGISTRATION = {
    "wandb_group": "g", "wandb_project": "p", "batch_size": 4, "max_token_len": 4096,
    "checkpoint_dir": "", "save_checkpoint_interval": 0, "starting_step": 0, "num_steps": 10,
}  # fmt: skip


@contextlib.contextmanager
def serving(folder: Path, *words: object) -> Iterator[tuple[Running, str]]:
    port = free_port()
    with running(*MATH, "--port", port, *words, folder=folder) as server:
        server.wait_for("Trainers: ")
        yield server, f"http://127.0.0.1:{port}"


def get(url: str) -> httpx.Response:
    return httpx.get(url, timeout=PATIENCE)


def next_batch(url: str, server: Running) -> list[dict[str, Any]]:
    """The next batch over the Atropos wire."""
    answer = until(lambda: get(f"{url}/batch").json()["batch"], server.output, alive=server.process)
    return list(answer)


@pytest.mark.parametrize("kills", [1, pytest.param(15, marks=pytest.mark.slow)])
def test_killed_and_started_again_every_group_comes_once_to_an_unregistered_trainer(
    tmp_path: Path, kills: int
) -> None:
    groups = 8 * (kills + 2)
    total = ("--env.total_steps", groups)
    got: list[dict[str, Any]] = []
    for time_around in range(kills):
        with serving(tmp_path, *total) as (server, url):
            if time_around == 0:
                assert (
                    "uuid"
                    in httpx.post(f"{url}/register", json=REGISTRATION, timeout=PATIENCE).json()
                )
            for _ in range(3):
                got += next_batch(url, server)
            server.kill()
    with serving(tmp_path, *total) as (server, url):
        assert get(f"{url}/info").json() == {"batch_size": 4, "max_token_len": 4096}
        while len(got) < groups:
            got += next_batch(url, server)
        assert server.end() == 0  # all groups are made and delivered
    assert len({orjson.dumps(group["tokens"]) for group in got}) == len(got) == groups


def test_a_lease_that_was_not_acknowledged_comes_again_after_a_crash(tmp_path: Path) -> None:
    words = ("--env.total_steps", 6)
    with serving(tmp_path, *words) as (server, url):
        with SyncEnvClient(url, run="trainer", batch_size=2) as client:
            done = next(client.batches(idle_seconds=PATIENCE))
            lost = next(client.batches(idle_seconds=PATIENCE))
            client.ack(done)
            client.extend(lost, seconds=0.5)
        server.kill()
    seen = []
    with serving(tmp_path, *words) as (server, url):
        with SyncEnvClient(url, run="trainer", batch_size=2) as client:
            for _ in range(2):
                batch = next(client.batches(idle_seconds=PATIENCE))
                seen += [group.group_id for group in batch.groups]
                client.ack(batch)
        assert server.end() == 0
    assert len(seen) == len(set(seen)) == 4
    assert {group.group_id for group in lost.groups} <= set(seen)
    assert not {group.group_id for group in done.groups} & set(seen)


def test_rows_carry_the_version_that_the_trainer_published(tmp_path: Path) -> None:
    with (
        serving(tmp_path, "--rollouts.max_queued_groups", 4) as (_, url),
        SyncEnvClient(url, run="trainer", batch_size=2) as client,
    ):
        client.publish_policy_version(7)
        versions: set[int] = set()
        end = time.monotonic() + PATIENCE
        while versions != {7}:
            assert time.monotonic() < end, versions
            batch = next(client.batches(idle_seconds=PATIENCE))
            versions = {int(v) for row in batch.rows for v in row.versions[row.mask == 1]}
            client.ack(batch)
        assert client.status()["policy_version"] == 7


def test_a_trainer_that_does_not_come_holds_the_rollouts_back(tmp_path: Path) -> None:
    with serving(tmp_path, "--rollouts.max_queued_groups", 5) as (server, url):

        def waiting() -> bool:
            status = get(f"{url}/v1/status").json()
            return status["server"]["open_groups"] == 0 and queued(status) >= 5

        until(waiting, server.output, alive=server.process)
        held = queued(get(f"{url}/v1/status").json())
        time.sleep(0.5)
        assert queued(get(f"{url}/v1/status").json()) == held


def queued(status: dict[str, Any]) -> int:
    return int(status["groups"]["queued"])


def test_sigterm_finishes_what_is_open_and_keeps_it(tmp_path: Path) -> None:
    slow = ("--sim.seconds_per_token", 0.005, "--sim.error_rate", 0.2)
    with serving(tmp_path, *slow) as (server, url):

        def seen() -> bool:
            return bool(
                queued(get(f"{url}/v1/status").json())
                and get(f"{url}/v1/failures?kind=engine_unavailable").json()["failures"]
                and playing(url)
            )

        until(seen, server.output, alive=server.process)
        (engine,) = get(f"{url}/v1/engines").json()["engines"]
        assert (engine["name"], engine["breaker"], engine["ready"]) == ("", "closed", True)
        assert engine["calls_total"] > 0 < engine["errors"]
        assert 0 < engine["seconds_p50"] <= engine["seconds_p95"]
        (failed, *_) = get(f"{url}/v1/failures?kind=engine_unavailable").json()["failures"]
        assert (failed["environment"], failed["fault"]) == ("math", "engine")
        server.send(signal.SIGTERM)
        assert server.end() == 0
    with serving(tmp_path) as (_, url):
        assert queued(get(f"{url}/v1/status").json()) > 0


def playing(url: str) -> bool:
    """Whether a rollout plays, as the server shows it."""
    found = get(f"{url}/v1/rollouts/running?environment=math&limit=1000").json()
    assert len(found["rollouts"]) == found["total"]
    assert get(f"{url}/v1/rollouts/running?environment=other").json()["total"] == 0
    one = next((one for one in found["rollouts"] if one["state"] == "playing"), None)
    if one is None:
        return False
    assert one["seconds"] >= 0 < one["attempt"]
    assert one["group_id"].startswith("math-train-")
    return isinstance(one["worker"], int)


def test_a_second_server_on_the_same_store_is_refused(tmp_path: Path) -> None:
    with serving(tmp_path) as _:
        ran = envserver(*MATH, "--port", free_port(), folder=tmp_path)
        assert ran.returncode == 2
        assert "groups.db" in ran.stderr


def test_what_is_counted_can_be_scraped(tmp_path: Path) -> None:
    with serving(tmp_path, "--sampling.max_tokens", 2) as (server, url):

        def metrics() -> dict[str, list[Sample]]:
            text = get(f"{url}/metrics").text
            return {family.name: family.samples for family in text_string_to_metric_families(text)}

        def delivered() -> bool:
            return metrics()["envserver_groups_delivered"][0].value >= 2

        until(delivered, server.output, alive=server.process)
        (flag, *_) = metrics()["envserver_flags"]
        assert flag.labels == {"flag": "truncated_length"}
        assert flag.value >= 4
        assert metrics()["envserver_paused"][0].value == 0
        status = get(f"{url}/v1/status").json()
        assert status["server"]["engine"] == {"mode": "chat", "continues": False}
        assert status["server"]["flags"]["truncated_length"] >= 4
