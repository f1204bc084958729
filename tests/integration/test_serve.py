"""`envserver serve`: what it accepted reaches a trainer once, whatever happens to it; what is too
old, or is kept from training, is never delivered.
"""

import asyncio
import signal
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from envserver_clients.http import SyncEnvClient
from support.api import REGISTRATION
from support.cases import cases_of
from support.commands import Running, served
from support.waiting import PATIENCE

from envserver import NotFoundError, Trajectory
from envserver.store import open_store

MATH = "--env math --model sim --env.group_size 2 --store groups.db --workers.processes 1"
EVEN = "--env.ensure_scores_are_not_same false"
QUICK = f"{MATH} {EVEN} --sim.latency_seconds 0"


def get(url: str) -> Any:
    return httpx.get(url, timeout=PATIENCE).json()


def queued(url: str) -> int:
    return int(get(f"{url}/v1/status")["groups"]["queued"])


def next_batch(url: str, server: Running) -> list[dict[str, Any]]:
    """The next batch over the Atropos API."""
    return list(server.until(lambda: get(f"{url}/batch")["batch"]))


@pytest.mark.parametrize("kills", [1, pytest.param(15, marks=pytest.mark.slow)])
def test_killed_and_started_again_every_group_comes_once_to_an_unregistered_trainer(
    tmp_path: Path, kills: int
) -> None:
    groups = 8 * (kills + 2)
    line = f"{QUICK} --env.total_steps {groups}"
    got: list[dict[str, Any]] = []
    for time_around in range(kills):
        with served(line, tmp_path) as (server, url):
            if time_around == 0:
                made = httpx.post(
                    f"{url}/register", json=REGISTRATION | {"max_token_len": 4096}, timeout=PATIENCE
                )
                assert "uuid" in made.json()
            for _ in range(3):
                got += next_batch(url, server)
            server.kill()
    with served(line, tmp_path) as (server, url):
        assert get(f"{url}/info") == {"batch_size": 4, "max_token_len": 4096}
        while len(got) < groups:
            got += next_batch(url, server)
        assert server.end() == 0  # all groups are made and delivered
    assert len({orjson.dumps(group["tokens"]) for group in got}) == len(got) == groups


@pytest.mark.thorough
def test_a_lease_that_was_not_acknowledged_comes_again_after_a_crash(tmp_path: Path) -> None:
    line = f"{QUICK} --env.total_steps 6"
    with served(line, tmp_path) as (server, url):
        with SyncEnvClient(url, run="trainer", batch_size=2) as client:
            done = next(client.batches(idle_seconds=PATIENCE))
            lost = next(client.batches(idle_seconds=PATIENCE))
            client.ack(done)
            client.extend(lost, seconds=0.5)
        server.kill()
    seen = []
    with served(line, tmp_path) as (server, url):
        with SyncEnvClient(url, run="trainer", batch_size=2) as client:
            for _ in range(2):
                batch = next(client.batches(idle_seconds=PATIENCE))
                seen += [group.group_id for group in batch.groups]
                client.ack(batch)
        assert server.end() == 0
    assert len(seen) == len(set(seen)) == 4
    assert {group.group_id for group in lost.groups} <= set(seen)
    assert not {group.group_id for group in done.groups} & set(seen)


def test_sigterm_finishes_what_is_open_and_keeps_it(tmp_path: Path) -> None:
    with served(f"{QUICK} --sim.seconds_per_token 0.005", tmp_path) as (server, url):
        server.until(lambda: queued(url) and playing(url))
        server.send(signal.SIGTERM)
        assert server.end() == 0

    async def kept() -> int:
        async with open_store(tmp_path / "groups.db") as store:
            return (await store.counts())["queued"]

    assert asyncio.run(kept()) > 0


def playing(url: str) -> bool:
    """Whether a rollout plays, as the server shows it."""
    found = get(f"{url}/v1/rollouts/running?environment=math&limit=1000")
    assert len(found["rollouts"]) == found["total"]
    assert get(f"{url}/v1/rollouts/running?environment=other")["total"] == 0
    one = next((one for one in found["rollouts"] if one["state"] == "playing"), None)
    if one is None:
        return False
    assert one["seconds"] >= 0 < one["attempt"]
    assert one["group_id"].startswith("math-train-")
    return isinstance(one["worker"], int)


# What is too old


@pytest.mark.thorough
def test_rollouts_in_flight_that_became_too_old_end_and_are_counted(tmp_path: Path) -> None:
    line = f"{MATH} {EVEN} --rollouts.max_staleness 0 --sim.seconds_per_token 0.1"
    with (
        served(line, tmp_path, finish_seconds=1) as (server, url),
        SyncEnvClient(url, run="trainer", batch_size=2) as client,
    ):
        client.publish_policy_version(0)

        def status() -> dict[str, Any]:
            return dict(get(f"{url}/v1/status")["server"])

        server.until(lambda: status()["open_groups"] > 1)

        def publish_and_look() -> int:
            client.publish_policy_version(int(client.status()["policy_version"]) + 1)
            return int(status()["stale_rollouts"])

        assert server.until(publish_and_look) > 0
        found = status()
        assert found["groups_dropped"].keys() <= {"stale"}
        assert found["rollouts_lost"] == found["stale_rollouts"]


# What flags keep from training: the run says so, and offers no further such groups.

FORMAL = cases_of(__file__)["formal"]
UNTRAINED = (
    "--env formal.py --model sim --sim.latency_seconds 0 --env.group_size 2 --workers.processes 1"
    " --rollouts.max_concurrent 2 --tokens.untrained_window_groups 2"
)


def test_groups_with_much_that_is_not_trained_are_no_longer_offered(tmp_path: Path) -> None:
    (tmp_path / "formal.py").write_text(FORMAL)
    with served(f"{UNTRAINED} {EVEN} --store groups.db", tmp_path) as (server, url):

        def both() -> dict[str, Any] | None:
            """Groups were delivered, before the window was full, and dropped."""
            now = get(f"{url}/v1/status")["server"]
            return now if now["groups_dropped"] and now["groups_delivered"] else None

        told = server.until(both)
        assert told["groups_dropped"].keys() == {"untrained"}
        assert told["workers"]["formal"]["processes"] == 1
        formal = told["untrained"]["formal"]
        assert (formal["over"], formal["ceiling"]) == (True, 0.1)
        assert formal["share"] > 0.1
        assert "--tokens.train structured_output_masked" in formal["message"]
        metrics = httpx.get(f"{url}/metrics", timeout=PATIENCE).text
        assert 'envserver_untrained_tokens_total{environment="formal",flag="structured' in metrics
        assert 'envserver_untrained_share{environment="formal"} 0.' in metrics
        assert "untrained_over_ceiling" in server.output()


# Tasks that a trainer names


def ids(groups: list[list[Trajectory | None]]) -> list[list[str]]:
    return [[one.rollout_id for one in group if one is not None] for group in groups]


def made_of(url: str) -> int:
    """Ordered groups that are finished: no run ever leases them."""
    return int(get(f"{url}/v1/status")["groups"]["dropped"])


@pytest.mark.thorough
def test_named_tasks_get_their_rollouts_in_order_once_also_over_a_kill(tmp_path: Path) -> None:
    line = f"{MATH} --rollouts.max_queued_groups 0"
    slow = "--sim.seconds_per_token 0.005 --rollouts.max_concurrent 4"
    with (
        served(f"{line} {slow}", tmp_path) as (server, url),
        SyncEnvClient(url, run=None) as client,
    ):
        known = client.tasks("math", limit=20)
        assert len({task.task_id for task in known}) == 20
        assert all("answer" not in task.public for task in known)
        assert client.tasks("math", after=3, limit=2) == known[3:5]
        named = [known[index].task_id for index in (3, 0, 3)]
        made = client.rollouts("math", named, group_size=2, key="step-1")
        told = [[one.task_id if one else "" for one in group] for group in made]
        assert told == [[name] * 2 for name in named]
        rows = [one.sequences[0] for group in made for one in group if one is not None]
        assert len(rows) == 6 and all(row.mask.any() for row in rows)
        assert ids(client.rollouts("math", named, group_size=2, key="step-1")) == ids(made)
        for name, task, words in (("nowhere", named[0], "nowhere"), ("math", "x", "no task 'x'")):
            with pytest.raises(NotFoundError, match=words):
                client.rollouts(name, [task])
        assert not [one for one in client.list_groups() if one.state != "dropped"]  # no run's
        # An order outlives whoever asked, and what it had made outlives the server.
        before = made_of(url)
        every = [task.task_id for task in known]
        body = {"environment": "math", "task_ids": every, "group_size": 2, "wait_seconds": 0.1}
        key = {"idempotency-key": "slow"}
        answer = httpx.post(f"{url}/v1/rollouts", json=body, headers=key, timeout=PATIENCE)
        assert answer.status_code == 202 and answer.json()["groups"] == 20
        server.until(lambda: made_of(url) >= before + 2)
        server.kill()
    with served(line, tmp_path) as (_, url), SyncEnvClient(url, run=None) as client:
        assert ids(client.rollouts("math", named, group_size=2, key="step-1")) == ids(made)
        kept = {one.group_id for one in client.list_groups()}
        assert len(kept) >= before + 2
        finished = client.rollouts("math", every, group_size=2, key="slow")
        assert all(one is not None for group in finished for one in group)
        after = {one.group_id for one in client.list_groups()}
        assert kept <= after and len(after) == before + 20
