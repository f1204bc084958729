"""`envserver join` in real processes: killed, stopped, started again; nothing lost or doubled."""

import re
import signal
from collections import defaultdict
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import httpx
import pytest
from envserver_clients.http import SyncEnvClient
from envserver_records import Group, unpack
from support.api import api_process
from support.commands import Running, free_port, running, until
from support.relay import relay
from support.waiting import PATIENCE

pytestmark = pytest.mark.thorough

JOIN = (
    "--env", "math", "--model", "sim", "--sim.latency_seconds", 0.3, "--env.group_size", 2,
    "--env.ensure_scores_are_not_same", "false", "--workers.processes", 1,
    "--rollouts.max_concurrent", 2,
)  # fmt: skip
TURNS = 20
TALK = (
    "--env", Path(__file__).parents[1] / "benchmarks" / "compare_talk.py", "--env.turns", TURNS,
    "--env.max_turns", TURNS, "--env.total_steps", 4, "--env.group_size", 2,
    "--env.ensure_scores_are_not_same", "false", "--openai.model_name", "sim", "--openai.base_url",
)  # fmt: skip
GROUP_ID = re.compile(r"math-train-(\d+)-(\d{6})-")


class House:
    """A server without environments, joiners beside it, and a trainer's view of all."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.got: list[str] = []

    def joiner(self, *words: object) -> AbstractContextManager[Running]:
        return running("join", self.url, *JOIN, *words, folder=self.folder)

    def train(self, *seeds: int, groups: int = 4) -> None:
        """Takes batches until `groups` of each of these streams came."""
        wanted = dict.fromkeys(seeds, groups)
        with SyncEnvClient(self.url, run="trainer", batch_size=2) as client:
            while any(left > 0 for left in wanted.values()):
                batch = next(client.batches(whole=False, idle_seconds=PATIENCE))
                for group in batch.groups:
                    self.got.append(group.group_id)
                    seed = int(_parts(group.group_id)[0])
                    wanted[seed] = wanted.get(seed, 0) - 1
                client.ack(batch)

    def take_all(self) -> None:
        with SyncEnvClient(self.url, run="trainer", batch_size=64) as client:
            while batch := client.lease(whole=False):
                self.got += [group.group_id for group in batch.groups]
                client.ack(batch)

    def environments(self) -> dict[str, dict[str, object]]:
        shown = httpx.get(f"{self.url}/v1/environments", timeout=PATIENCE).json()["environments"]
        return {one["name"]: one for one in shown}


def _parts(group_id: str) -> tuple[str, ...]:
    found = GROUP_ID.match(group_id)
    assert found is not None, group_id
    return found.groups()


def check_whole(group_ids: list[str]) -> dict[int, int]:
    """Each stream came from its beginning without a gap, and nothing twice; how long each is."""
    assert len(group_ids) == len(set(group_ids))
    streams = defaultdict(set)
    for group_id in group_ids:
        seed, index = map(int, _parts(group_id))
        streams[seed].add(index)
    for indices in streams.values():
        assert indices == set(range(len(indices)))
    return {seed: len(indices) for seed, indices in streams.items()}


def end(joiner: Running) -> None:
    joiner.send(signal.SIGTERM)
    assert joiner.end() == 0, joiner.output()


def test_long_rollouts_go_on_while_their_server_is_away(tmp_path: Path) -> None:
    house, port = House(tmp_path), free_port()
    with (
        running("models", "sim", "--port", port, folder=tmp_path) as engine,
        relay(f"http://127.0.0.1:{port}") as (engine_url, answers),
        ExitStack() as stack,
    ):
        engine.wait_for("http://")
        with api_process(tmp_path / "groups.db", house.port) as server:
            join = ("join", house.url, *TALK, f"{engine_url}/v1")
            joiner = stack.enter_context(running(*join, folder=tmp_path))
            until(lambda: len(answers) > TURNS, joiner.output)
            server.kill()
            server.wait()
            joiner.wait_for("server_unreachable")
        with (
            api_process(tmp_path / "groups.db", house.port),
            SyncEnvClient(house.url, run="trainer", batch_size=4) as client,
        ):
            batch = next(client.batches(idle_seconds=PATIENCE))
            groups = [unpack(group.body, Group) for group in batch.groups]
    rollouts = [rollout for group in groups for rollout in group.trajectories]
    assert [(rollout.turns, rollout.attempts) for rollout in rollouts] == [(TURNS, [])] * 8
    assert len(answers) == 8 * TURNS  # none was asked for again


def test_killed_servers_and_joiners_lose_and_double_nothing(tmp_path: Path) -> None:
    house = House(tmp_path)
    place = tmp_path / "groups.db"
    with house.joiner() as one:
        with api_process(place, house.port) as server:
            one.wait_for(r"Joined .* as \S+: math, seed 0")
            house.train(0)
            server.kill()
            server.wait()
            one.wait_for("server_unreachable")
        with api_process(place, house.port):
            one.wait_for("server_reached_again")
            house.train(0)
            one.kill()
            with house.joiner() as again:
                again.wait_for(r"Joined .* as \S+: math, seed 0")
                house.train(0)
                end(again)
            (shown,) = house.environments().values()
            assert shown["gone"]
            house.take_all()
    assert set(check_whole(house.got)) == {0}
