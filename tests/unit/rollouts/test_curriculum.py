"""The choice of the next task, and the estimates in the store that it follows.

Shares hold, no task waits forever, unsolved tasks return, and more groups have a learning signal.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from envserver_clients.http import EnvClient, SyncEnvClient
from envserver_clients.protocol import TaskEstimate
from envserver_records.records import Task, pack
from hypothesis import given, settings
from hypothesis import strategies as st
from support.api import join, requested, running_api, wire_group
from support.cases import cases_of
from support.commands import envserver, free_port, read_jsonl, running, until
from support.stores import group
from support.waiting import PATIENCE

from envserver import CurriculumConfig
from envserver.rollouts.estimates import Estimate, Scored
from envserver.rollouts.events import GroupDropped
from envserver.rollouts.stream import GroupRequest, again_prefix, group_id
from envserver.rollouts.task_stream import Known, TaskStream
from envserver.store import GroupPut, Store, open_store

CASES = cases_of(__file__)

DIFFICULTY = CurriculumConfig(sampler="difficulty", explore=0.2)
REPLAY = CurriculumConfig(sampler="replay", replay_share=0.3)


def scored(task_id: str, rewards: float, attempts: int = 4, version: int = 0) -> Scored:
    return Scored(
        group_id="g", env="e", split="train", task_id=task_id, attempts=attempts, rewards=rewards,
        policy_version=version,
    )  # fmt: skip


def tried(attempts: int, solved: float, **more: int) -> Estimate:
    return Estimate(attempts=attempts, weight=attempts, solved=solved, **more)


CHANCES = (0.0, 0.5, 1.0)


def own_order(tasks: int | None) -> Iterator[GroupRequest]:
    """An environment's order: `tasks` again and again, or always new ones."""
    for index in itertools.count():
        number = index if tasks is None else index % tasks
        name = f"t-{number}"
        group = group_id("e-train-0-", index, name)
        yield requested(index, group_id=group, env="e", task=Task(name, {}))


def nothing(asked: list[GroupRequest]) -> Known:
    return Known(set(), {})


class Played:
    """A stream whose groups are played: task n is solved with the chance n says."""

    def __init__(self, rules: CurriculumConfig, tasks: int | None, seed: int = 0) -> None:
        self.stream = TaskStream(rules, look=nothing, seed=seed)
        self._requests = self.stream.requests(own_order(tasks))
        self._rng = random.Random(seed)
        self.group_ids: list[str] = []
        self.task_ids: list[str] = []
        self.mixed = 0
        self.held = 0

    def play(self, groups: int, chances: tuple[float, ...] = CHANCES) -> Played:
        for request in itertools.islice(self._requests, groups):
            chance = chances[int(request.task.id[2:]) % len(chances)]
            rewards = sum(self._rng.random() < chance for _ in range(4))
            self.mixed += 0 < rewards < 4
            self.group_ids.append(request.group_id)
            self.task_ids.append(request.task.id)
            self.held = max(self.held, self.stream.remembered)
            told = GroupDropped(
                group_id=request.group_id, index=request.index, task_id=request.task.id,
                reason="zero_variance", failed=False, message="", at=0.0,
                scored=scored(request.task.id, rewards),
            )  # fmt: skip
            self.stream.observe(told)
        return self

    @property
    def again(self) -> int:
        return sum("-again-" in one for one in self.group_ids)


def test_uniform_is_the_order_of_the_environment() -> None:
    played = Played(CurriculumConfig(), 5).play(40)
    assert played.group_ids == [one.group_id for one in itertools.islice(own_order(5), 40)]
    assert played.held == 0


@settings(max_examples=5)
@given(st.integers(0, 10**6), st.sampled_from([None, 7, 60]), st.sampled_from([8, 64]))
def test_streams_hold_shares_and_starve_nobody(seed: int, tasks: int | None, memory: int) -> None:
    for rules in (DIFFICULTY, REPLAY):
        rules = rules.model_copy(update={"memory": memory})
        played = Played(rules, tasks, seed).play(600)
        again = Played(rules, tasks, seed).play(600)
        assert played.group_ids == again.group_ids  # the same seed and results: the same stream
        assert len(set(played.group_ids)) == 600
        assert played.held <= memory
        own = [one for one in played.group_ids if "-again-" not in one]
        order = [one.group_id for one in itertools.islice(own_order(tasks), len(own))]
        assert own == order  # nothing of it is left out
        least = rules.explore if rules is not REPLAY and rules.sampler == "difficulty" else 0.7
        assert len(own) > 600 * least * 0.75
        if tasks is not None:
            assert len(Counter(played.task_ids)) == min(tasks, len(own))
        if tasks == 60 and memory == 64:  # much may come again, and does
            assert played.again > 100


@pytest.mark.parametrize("order", ["oldest", "weighted"])
def test_unsolved_tasks_come_back_with_their_share_and_all_of_them(order: Any) -> None:
    played = Played(REPLAY.model_copy(update={"replay_order": order}), 60).play(1200)
    names = zip(played.task_ids, played.group_ids, strict=True)
    back = [one for one, name in names if "-again-" in name]
    assert 0.24 < len(back) / 1200 < 0.33
    counts = Counter(back)
    assert {int(one[2:]) % 3 for one in back} <= {0, 1}  # 1 in 16 groups of a half solved one
    assert all(counts[f"t-{number}"] for number in range(0, 60, 3))
    assert counts.most_common(1)[0][1] < 60  # no one of them takes all


def knowing(known: dict[str, Estimate], rules: CurriculumConfig, **more: Any) -> TaskStream:
    return TaskStream(
        rules,
        look=lambda asked: Known(set(), {one.task.id: known[one.task.id] for one in asked}),
        **more,
    )


def test_solved_tasks_are_passed_over_mostly_and_never_for_ever() -> None:
    rules = CurriculumConfig(solved_above=0.8, solved_share=0.1)
    known = {f"t-{n}": tried(40, 40.0 * (n % 2)) for n in range(10)}
    stream = knowing(known, rules)
    drawn = Counter(one.task.id for one in itertools.islice(stream.requests(own_order(10)), 2000))
    solved = sum(drawn[f"t-{n}"] for n in range(1, 10, 2))
    assert 0.06 < solved / 2000 < 0.13  # 1 of 11
    assert len(drawn) == 10
    assert stream.passed_over > 1500
    known = dict.fromkeys(known, tried(400, 400.0))
    rules = rules.model_copy(update={"solved_share": 1e-9})
    stream = knowing(known, rules)
    assert len(list(itertools.islice(stream.requests(own_order(10)), 3))) == 3


def test_tasks_lately_never_solved_are_passed_over_until_that_is_long_ago() -> None:
    rules = CurriculumConfig(unsolved_share=0.1, discount=0.5)
    known = {f"t-{n}": tried(16, 8.0 * (n % 2), policy_version=0) for n in range(10)}
    for version, least, most in ((0, 0.05, 0.14), (3, 0.49, 0.51)):  # weight 16, and 2
        stream = knowing(known, rules, version=lambda: version)  # noqa: B023 (used within this turn)
        drawn = [*itertools.islice(stream.requests(own_order(10)), 1000)]
        assert least < len([one for one in drawn if int(one.task.id[2:]) % 2 == 0]) / 1000 < most
    assert drawn[1].chosen == {"by": "order", "success": 0.5, "attempts": 16}
    assert drawn[0].chosen == {"by": "order", "success": 0.25, "attempts": 16}


def test_a_stream_goes_on_where_it_was_and_remembers_what_was_scored() -> None:
    made = {one.group_id for one in itertools.islice(own_order(60), 50)}
    estimates = {f"t-{n}": tried(4, 4 * CHANCES[n % 3]) for n in range(50)}
    asked_at_once = []

    def look(asked: list[GroupRequest]) -> Known:
        asked_at_once.append(len(asked))
        return Known(
            {one.group_id for one in asked} & made,
            {one.task.id: estimates[one.task.id] for one in asked if one.task.id in estimates},
        )

    rules = REPLAY.model_copy(update={"replay_share": 0.9})
    stream = TaskStream(rules, look=look, counts=lambda: (50, 7))
    drawn = list(itertools.islice(stream.requests(own_order(60)), 30))
    assert not {one.group_id for one in drawn} & made
    own = [one.index for one in drawn if "-again-" not in one.group_id]
    assert own == list(range(50, 50 + len(own)))
    again = [one for one in drawn if "-again-" in one.group_id]
    assert [one.index for one in again] == list(range(7, 7 + len(again)))
    assert {int(one.task.id[2:]) % 3 for one in again} == {0}
    assert asked_at_once[:2] == [50, 1]


# Commands

FAST = (
    "--model", "sim", "--sim.latency_seconds", 0, "--workers.processes", 1, "--env.group_size", 4,
    "--rollouts.max_concurrent", 16, "--sampling.max_tokens", 16,
)  # fmt: skip


@pytest.fixture
def thirds(tmp_path: Path) -> str:
    (tmp_path / "thirds.py").write_text(CASES["half_solved"])
    return "thirds.py"


def mixed_groups(path: Path) -> int:
    rewards = [
        {rollout["reward"] for rollout in line["envserver"]["rollouts"]}
        for line in read_jsonl(path)
    ]
    return sum(len(one) > 1 for one in rewards)


@pytest.mark.thorough
def test_process_makes_more_groups_to_learn_from_and_goes_on_with_what_it_knew(
    thirds: str, tmp_path: Path
) -> None:
    def process(name: str, steps: int, *words: object) -> Path:
        done = envserver(
            "process", "--env", thirds, *FAST, "--env.total_steps", steps,
            "--env.data_path_to_save_groups", f"{name}.jsonl", *words, folder=tmp_path,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return tmp_path / f"{name}.jsonl"

    near = ("--curriculum.sampler", "difficulty", "--curriculum.sharpness", 4)
    uniform = mixed_groups(process("uniform", 60))
    path = process("difficulty", 45, *near)
    process("difficulty", 60, *near, "--resume")
    lines = read_jsonl(path)
    assert len({line["envserver"]["group_id"] for line in lines}) == len(lines) == 60
    assert 10 < uniform < 21
    assert mixed_groups(path) > uniform
    # What it knew is known again: tasks come again at once, and mostly the right ones.
    again = [
        int(line["envserver"]["task_id"].partition("-")[2]) % 3
        for line in lines[45:]
        if "-again-" in line["envserver"]["group_id"]
    ]
    assert len(again) >= 4
    assert again.count(1) > len(again) / 2


def serving(thirds: str, folder: Path, port: int, *words: object) -> Any:
    return running(
        "serve", "--env", thirds, *FAST, "--env.tasks", 9, "--store", "groups.db", "--port", port,
        "--rollouts.max_queued_groups", 12, *words, folder=folder,
    )  # fmt: skip


@pytest.mark.thorough
def test_serve_counts_what_it_drops_and_brings_unsolved_tasks_back_also_after_a_kill(
    thirds: str, tmp_path: Path
) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    words = ("--curriculum.sampler", "replay", "--curriculum.replay_share", 0.5)
    with serving(thirds, tmp_path, port, *words) as server:
        server.wait_for("Trainers: ")

        def unsolved() -> list[TaskEstimate]:
            with SyncEnvClient(url, run="trainer", batch_size=4) as client:
                while (batch := client.lease()) is not None:
                    client.ack(batch)
                found = list(client.task_estimates(environment="thirds"))
            return [one for one in found if one.attempts > 8 and one.mean_reward == 0]

        tried = until(lambda: len(unsolved()) > 2 and unsolved(), server.output)
        assert {int(one.task_id.partition("-")[2]) % 3 for one in tried} == {0}
        metrics = httpx.get(f"{url}/metrics", timeout=PATIENCE).text
        assert 'envserver_groups_again_total{environment="thirds"}' in metrics
        assert "envserver_tasks_solved_share" in metrics
        server.kill()
    with serving(thirds, tmp_path, port, *words) as server:
        server.wait_for("Trainers: ")
        before = {one.task_id: one.attempts for one in tried}

        def went_on() -> bool:
            now = {one.task_id: one.attempts for one in unsolved()}
            return all(now[task_id] >= tries for task_id, tries in before.items()) and any(
                now[task_id] > tries for task_id, tries in before.items()
            )

        assert until(went_on, server.output)


@pytest.fixture
async def store(where: str) -> AsyncIterator[Store]:
    async with open_store(where) as opened:
        yield opened


def of_group(group_id: str, task_id: str, rewards: float, **fields: object) -> Scored:
    facts = {"env": "math", "split": "train", "attempts": 4, "policy_version": 0}
    return Scored(group_id=group_id, task_id=task_id, rewards=rewards, **(facts | fields))  # type: ignore[arg-type]


def put(group_id: str, task_id: str, rewards: float, **fields: object) -> GroupPut:
    return group(group_id, scored=of_group(group_id, task_id, rewards, **fields))


async def test_what_is_scored_counts_once_and_is_there_after_a_restart(where: str) -> None:
    async with open_store(where) as store:
        assert await store.put([put("g-1", "a", 1), put("g-2", "b", 0), put("g-1", "a", 4)])
        assert await store.put([put("g-1", "a", 1)]) == [False]
        # Dropped as of zero variance, told twice: a joiner that got no answer tells it again.
        assert await store.count_dropped([of_group("g-3", "b", 4), of_group("g-3", "b", 4)]) == 1
        assert await store.count_dropped([of_group("g-3", "b", 4), of_group("g-4", "c", 4)]) == 1
        assert await store.put([group("of no task")]) == [True]
    async with open_store(where) as store:
        found = await store.estimates_of("math", "train", ["a", "b", "c", "d"])
        assert {name: (one.attempts, one.mean_reward) for name, one in found.items()} == {
            "a": (4, 0.25),
            "b": (8, 0.5),
            "c": (4, 1.0),
        }
        assert await store.made(["g-1", "g-3", "g-9"]) == {"g-1", "g-3"}
        assert await store.count_made("g-") == 4
        assert await store.existing(["g-3"]) == set()  # it may still be made and delivered


async def test_an_estimate_follows_the_policy(store: Store) -> None:
    store.discount = 0.5
    await store.put([put("g-1", "a", 0, policy_version=3)])
    await store.put([put("g-2", "a", 4, policy_version=5)])
    (estimate,) = (await store.estimates_of("math", "train", ["a"])).values()
    assert (estimate.attempts, estimate.policy_version) == (8, 5)
    assert (estimate.weight, estimate.solved) == (4 + 4 * 0.25, 4)
    await store.put([put("g-3", "a", 0, policy_version=3)])  # late: it counts as much as g-1
    (estimate,) = (await store.estimates_of("math", "train", ["a"])).values()
    assert (estimate.weight, estimate.solved) == (4 + 8 * 0.25, 4)


async def test_nothing_of_a_transaction_that_fails_counts(store: Store) -> None:
    await store.put([put("g-1", "a", 4)])
    too_large = put("g-3", "a", 4, attempts=2**63)
    with pytest.raises(Exception):  # noqa: B017 - each database has its own
        await store.put([put("g-2", "a", 4), too_large])
    assert await store.existing(["g-2", "g-3"]) == set()
    (estimate,) = (await store.estimates_of("math", "train", ["a"])).values()
    assert estimate.attempts == 4
    assert await store.put([put("g-2", "a", 4)]) == [True]


async def test_groups_of_other_machines_count_where_they_name_a_task(tmp_path: Path) -> None:
    async with running_api(tmp_path / "store.db") as api:
        one = await join(api)
        for _ in range(2):
            assert (await one.post(pack(one.group(0)))).status_code == 200
        again = one.group(3)
        again.group_id = group_id(again_prefix("math-train-0-"), 3, "task-1")
        assert (await one.post(pack(again))).status_code == 200
        dropped = {"task_id": "t", "attempts": 4, "rewards": 4.0, "policy_version": 9}
        for _ in range(2):
            told = {"groups": [dropped | {"group_id": "math-train-0-000009-0"}]}
            assert (await one.send("POST", "/scored", json=told)).status_code == 204
        foreign = {"groups": [dropped | {"group_id": "code-train-0-000009-0"}]}
        assert (await one.send("POST", "/scored", json=foreign)).status_code == 422
        await api.start()
        wire = wire_group(2, scores=[1.0, -1.0], group_overrides={"task_id": "w"})
        for posted in (wire, wire_group(), wire | {"group_overrides": {"task_id": "w\x00"}}):
            assert (await api.http.post("/scored_data", json=posted)).status_code == 200
        assert (await join(api)).stored == 2
        async with EnvClient(api.url, run="trainer") as client:
            found = await client.task_estimates(limit=10)
            assert found == await client.task_estimates()
            assert [one.task_id for one in await client.task_estimates(environment="math")] == [
                "task-1",
                "t",
            ]
            assert await client.task_estimates(split="test") == []
        assert [
            (one.environment, one.task_id, one.attempts, one.mean_reward, one.policy_version)
            for one in found
        ] == [
            ("math", "task-1", 4, pytest.approx(0.5), 7),
            ("math", "t", 4, 1.0, 9),
            ("atropos", "w", 2, 0.5, -1),
        ]
