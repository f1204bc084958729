"""Several environments in one run: whose turn it is, what ends, what is written where."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest
from envserver_clients.http import SyncEnvClient
from hypothesis import given, settings
from hypothesis import strategies as st
from support.commands import envserver, free_port, group_ids, read_jsonl, running, until
from support.extent import examples
from support.waiting import PATIENCE

from envserver import ConfigError, MixSettings, main
from envserver.cli.command_line import CommandSpec
from envserver.cli.mixing import read_mix
from envserver.cli.settings import load_settings
from envserver.rollouts import CATCH_UP_GROUPS, Share, Shares, targets
from envserver.rollouts.mixing import Ending, Turns

NAMES = "abcde"
COMMAND = CommandSpec("serve", "", MixSettings)
MIX = st.lists(
    st.tuples(st.floats(0.1, 10), st.floats(0, 0.2)), min_size=1, max_size=len(NAMES)
).map(lambda said: [Share(name, *one) for name, one in zip(NAMES, said, strict=False)])


@settings(deadline=None)
@given(MIX)
def test_targets_are_whole_and_keep_minima_and_proportions(mix: list[Share]) -> None:
    parts = targets(mix)
    assert sum(parts.values()) == pytest.approx(1)
    assert all(parts[one.name] >= one.minimum - 1e-9 for one in mix)
    by_weight = [one for one in mix if parts[one.name] > one.minimum + 1e-9]
    rates = {round(parts[one.name] / one.weight, 9) for one in by_weight}
    assert max(rates, default=0) == pytest.approx(min(rates, default=0), rel=1e-6)


@settings(deadline=None)
@given(MIX, st.integers(1, 300))
def test_in_the_long_run_each_has_its_share(mix: list[Share], groups: int) -> None:
    parts = targets(mix)
    shares = Shares(parts)
    begun: Counter[str] = Counter()
    for _ in range(groups):
        name = shares.next(list(parts))
        shares.begin(name)
        begun[name] += 1
    for name, part in parts.items():
        assert abs(begun[name] - part * groups) <= len(mix)


@settings(deadline=None)
@given(MIX, st.data())
def test_who_was_away_catches_up_a_little_and_nobody_waits_long(
    mix: list[Share], data: st.DataObject
) -> None:
    parts = targets(mix)
    shares = Shares(parts)
    away = data.draw(st.sampled_from(sorted(parts)))
    others = [name for name in parts if name != away]
    for _ in range(200 if others else 0):
        shares.begin(shares.next(others))
    shares.asks(away)
    in_a_row = 0
    while shares.next(list(parts)) == away and in_a_row < 1000 and others:
        shares.begin(away)
        in_a_row += 1
    longest = max((1 / parts[name] for name in others), default=0) * parts[away]
    assert in_a_row <= CATCH_UP_GROUPS + 2 * longest + 2


@settings(max_examples=examples(40))
@given(
    MIX,
    st.integers(1, 12),
    st.lists(st.integers(1, 5), min_size=5, max_size=5),
    st.lists(st.integers(0, 30), min_size=5, max_size=5),
    st.sampled_from([None, 7, 40]),
    st.lists(st.sampled_from(["delivered", "filtered", "failed"]), min_size=1, max_size=9),
)
def test_no_order_of_events_blocks_or_overfills(
    mix: list[Share],
    room: int,
    sizes: list[int],
    tasks: list[int],
    wanted: int | None,
    endings: list[Ending],
) -> None:
    asyncio.run(_run(mix, room, sizes, tasks, wanted, endings))


async def _run(
    mix: list[Share],
    room: int,
    sizes: list[int],
    tasks: list[int],
    wanted: int | None,
    endings: list[Ending],
) -> None:
    """Each environment asks as often as it has tasks; groups end in some order."""
    turns = Turns(Shares(targets(mix)), room=room, wanted=wanted)
    running = done = most = delivered = 0

    async def environment(number: int, share: Share) -> None:
        nonlocal done
        lane, size = turns.lane(share.name), sizes[number]
        groups = []
        for task in range(tasks[number]):
            if not await lane.take(size):
                break
            groups.append(asyncio.create_task(group(lane, size, number + task)))
        lane.left()
        await asyncio.gather(*groups)
        done += 1

    async def group(lane: Any, size: int, number: int) -> None:
        nonlocal running, most, delivered
        running += size
        most = max(most, running)
        for _ in range(number % 4):
            await asyncio.sleep(0)
        running -= size
        how = endings[number % len(endings)]
        delivered += how == "delivered"
        lane.ended(size, how)

    async with asyncio.timeout(PATIENCE):
        await asyncio.gather(*(environment(number, one) for number, one in enumerate(mix)))
    assert done == len(mix)
    assert most <= max(room, *sizes)
    assert wanted is None or delivered <= wanted


async def test_a_turn_that_is_given_up_is_another_s() -> None:
    turns = Turns(Shares(targets([Share("a"), Share("b")])), room=2)
    a, b = turns.lane("a"), turns.lane("b")
    assert await a.take(2)
    waiting = [asyncio.create_task(lane.take(2)) for lane in (a, b)]
    await asyncio.sleep(0)
    waiting[1].cancel()
    a.ended(2, "delivered")
    assert await waiting[0]
    again = asyncio.create_task(b.take(2))
    await asyncio.sleep(0)
    a.ended(2, "delivered")
    again.cancel()  # its turn was given, but it has not heard of it
    await asyncio.gather(again, return_exceptions=True)
    assert await asyncio.wait_for(a.take(2), PATIENCE)


@pytest.mark.parametrize(
    ("mix", "words"),
    [
        ([Share("a", weight=0)], "a weight must be positive"),
        ([Share("a", minimum=1.5)], "a minimum share from 0 to 1"),
        ([Share("a", minimum=0.7), Share("b", minimum=0.7)], "more than 1 together"),
        ([Share("a"), Share("a")], "named twice"),
    ],
)
def test_a_mix_that_cannot_be_is_refused(mix: list[Share], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        targets(mix)


ECHO = """
from envserver import Environment, Score, Task

class {name}(Environment):
    class Config(Environment.Config):
        tasks_in_all: int = 1000
        broken: bool = False
        word: str = "plain"

    def tasks(self, split):
        for n in range(self.config.tasks_in_all):
            yield Task(f"{{n}}", {{"question": f"Say {{n}}."}}, {{"answer": str(n)}})

    async def rollout(self, task, run):
        if self.config.broken:
            raise ValueError("no such tool")
        return (await run.chat([{{"role": "user", "content": "hi"}}])).content

    def score(self, task, result):
        return Score(reward=0.5, metrics={{"word": float(self.config.word == "own")}})
"""
SIM = ("--model", "sim", "--sim.latency_seconds", "0", "--workers.processes", "1")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("Left", "Right"):
        (tmp_path / f"{name.lower()}.py").write_text(ECHO.format(name=name))
    return tmp_path


def mixed(folder: Path, **changes: str) -> Path:
    path = folder / "mix.yaml"
    path.write_text(
        f"""
environments:
  - name: left.py
    weight: 3
    env: {{word: own, {changes.get("left", "seed: 0")}}}
  - name: right.py
    minimum_share: 0.25
    env: {{{changes.get("right", "seed: 0")}}}
env: {{group_size: 2, word: other, {changes.get("all", "seed: 0")}}}
model: sim
sim: {{latency_seconds: 0}}
workers: {{processes: 1}}
rollouts: {{max_concurrent: 8, stop_after_failed_groups: 2, max_attempts: 1}}
"""
    )
    return path


@pytest.mark.thorough
def test_a_file_makes_one_mix_with_the_shares_that_were_asked(folder: Path) -> None:
    path = mixed(folder, all="data_path_to_save_groups: out.jsonl")
    words = ("process", "--config", path, "--total_groups")
    ran = envserver(*words, 8, folder=folder)
    assert ran.returncode == 0, ran.stderr
    assert "8 groups in out.jsonl" in ran.stderr
    ran = envserver(*words, 24, "--resume", folder=folder)
    assert ran.returncode == 0, ran.stderr
    groups = read_jsonl(folder / "out.jsonl")
    ids = group_ids(folder / "out.jsonl")
    assert len(ids) == len(set(ids)) == 24
    by_name = Counter(group["envserver"]["env"] for group in groups)
    assert abs(by_name["left"] - 18) <= 2, by_name
    for group in groups:
        facts = group["envserver"]
        own = {rollout["metrics"]["word"] for rollout in facts["rollouts"]}
        assert own == {float(facts["env"] == "left")}


def test_one_that_fails_and_one_that_ends_do_not_keep_the_others(folder: Path) -> None:
    path = mixed(folder, left="broken: true", right="total_steps: 6")
    ran = envserver("process", "--config", path, folder=folder)
    assert ran.returncode == 1
    assert "left has ended" in ran.stderr
    assert len(group_ids(folder / "data" / "right.jsonl")) == 6
    assert group_ids(folder / "data" / "left.jsonl") == []
    assert (folder / "data" / "left.failures.jsonl").exists()


def test_a_server_offers_all_of_them_to_one_trainer(folder: Path) -> None:
    port = free_port()
    words = ("serve", "--env", "left.py,right.py=3", *SIM, "--env.group_size", "2", "--port", port)
    more = ("--env.ensure_scores_are_not_same", "false", "--total_groups", 12)
    with running(*words, *more, folder=folder) as server:
        server.wait_for("Trainers: ")
        url = f"http://127.0.0.1:{port}"

        def made() -> Any:
            found = httpx.get(f"{url}/v1/groups?after=0&limit=100", timeout=PATIENCE).json()[
                "groups"
            ]
            return found if len(found) >= 12 else None

        groups = until(made, server.output, alive=server.process)
        status = httpx.get(f"{url}/v1/status", timeout=PATIENCE).json()["server"]
    assert len(groups) == 12
    by_name = Counter(group["env"] for group in groups)
    assert abs(by_name["right"] - 9) <= 1, by_name
    assert status["environment"] == "left,right"
    assert status["environments"] == by_name


@pytest.mark.thorough
def test_one_whose_groups_are_all_filtered_keeps_no_trainer_waiting(folder: Path) -> None:
    """Though it has the larger weight, a full queue holds all back, and old groups are dropped."""
    name = "ensure_scores_are_not_same"
    path = mixed(folder, left=f"{name}: true", all=f"{name}: false")
    port = free_port()
    words = ("serve", "--config", path, "--port", port, "--rollouts.max_queued_groups", 3)
    with running(*words, "--rollouts.max_staleness_at_delivery", 1, folder=folder) as server:
        server.wait_for("Trainers: ")
        url = f"http://127.0.0.1:{port}"
        with SyncEnvClient(url, run="trainer", batch_size=2) as client:
            for version in range(4):
                batch = next(client.batches(idle_seconds=PATIENCE))
                assert {group.env for group in batch.groups} == {"right"}
                client.ack(batch)
                client.publish_policy_version(version)
        status = httpx.get(f"{url}/v1/status", timeout=PATIENCE).json()["server"]
    assert status["groups_dropped"]["zero_variance"] > 0
    assert status["environments"]["left"] == 0


def test_what_cannot_be_mixed_is_told_before_anything_starts(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    path = mixed(folder)
    told = {
        ("--env", "left.py=0,right.py"): "a weight must be a positive number",
        ("--env", "left.py,lefft"): "There is no environment 'lefft'",
        ("--env", "left.py,left.py"): "named twice",
        ("--config", str(path), "--env", "left.py"): "a single environment is given as well",
        ("--env", "left.py,right.py", "--env.wrod", "x"): "Did you mean --env.word?",
    }
    for words, wanted in told.items():
        assert main(["process", *words, *SIM]) == 2
        assert wanted in capsys.readouterr().err
    wrong = mixed(folder, left="wrod: x")
    assert main(["process", "--config", str(wrong)]) == 2
    assert "environments[0]: env.wrod: there is no such setting" in capsys.readouterr().err
    path.write_text("environments: [{name: left.py, wieght: 2}]\n")
    assert main(["process", "--config", str(path)]) == 2
    assert "mix.yaml:1: environments[0].wieght" in capsys.readouterr().err
    assert read_mix(COMMAND, ["--env", "left.py"]) is None


def test_total_steps_of_a_mix_is_the_total(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)

    def read(*flags: str) -> list[tuple[int | None, int | None]]:
        members = read_mix(COMMAND, list(flags))
        assert members is not None
        found = [(one.spec.settings.total_groups, one.environment.config) for one in members]
        return [(total, config.total_steps) for total, config in found]

    mix = ("--env", "left.py=2,right.py", "--env.total_steps")
    assert read(*mix, "3") == [(3, None), (3, None)]
    assert read(*mix, "3", "--total_groups", "2") == [(2, None), (2, None)]
    path = str(mixed(folder, left="total_steps: 6"))
    assert read("--config", path) == [(None, 6), (None, None)]
    assert read("--config", path, "--env.total_steps", "9") == [(9, None), (9, None)]
    path = str(mixed(folder, left="total_steps: 6", all="total_steps: 8"))
    assert read("--config", path) == [(8, 6), (8, None)]


RUNS = [
    path
    for path in sorted((Path(__file__).parents[3] / "configs").glob("*.yaml"))
    if path.stem not in ("models", "sft_templates", "trl_defaults")  # which are not runs
]


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_what_is_ready_made_can_be_read(path: Path) -> None:
    members = read_mix(COMMAND, ["--config", str(path)])
    if members is not None:
        parts = targets(member.share for member in members)
        assert parts["math"] == pytest.approx(2 * parts["code"])
        return
    read = load_settings(["--config", str(path)], settings_class=MixSettings, environ={})
    assert read.environment == path.stem
    assert read.env.group_size == 8
