"""Several environments in one run: whose turn it is, what ends, what is written where."""

import asyncio
from collections import Counter
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest
from envserver_clients.http import SyncEnvClient
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cases import cases_of
from support.commands import Running, group_ids, read_jsonl, running, until
from support.extent import examples
from support.in_process import Run
from support.waiting import PATIENCE

from envserver import ConfigError, MixSettings
from envserver.cli.command_line import CommandSpec
from envserver.cli.mixing import read_mix
from envserver.rollouts.scheduler import Ending, Share, Shares, Turns, targets

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


@settings(max_examples=examples(100), deadline=None)
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


ENDINGS: list[Ending] = ["delivered", "filtered", "failed"]


@settings(max_examples=examples(40))
@given(
    mix=MIX,
    room=st.integers(1, 12),
    sizes_and_tasks=st.lists(
        st.tuples(st.integers(1, 5), st.integers(0, 30)), min_size=5, max_size=5
    ),
    wanted=st.sampled_from([None, 7, 40]),
    endings=st.lists(st.sampled_from(ENDINGS), min_size=1, max_size=9),
)
def test_no_order_of_events_blocks_or_overfills(**drawn: Any) -> None:
    asyncio.run(_run(**drawn))


async def _run(
    mix: list[Share],
    room: int,
    sizes_and_tasks: list[tuple[int, int]],
    wanted: int | None,
    endings: list[Ending],
) -> None:
    """Each environment asks as often as it has tasks; groups end in some order."""
    sizes, tasks = zip(*sizes_and_tasks, strict=True)
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


ECHO = cases_of(__file__)["echo"]
SIM = "--model sim --sim.latency_seconds 0 --workers.processes 1 --workers.heartbeat_seconds 60"


@pytest.fixture
def folder(run: Run, tmp_path: Path) -> Path:
    for name in ("Left", "Right"):
        Path(f"{name.lower()}.py").write_text(ECHO.format(name=name))
    return tmp_path


def mixed(left: str = "seed: 0", right: str = "seed: 0", all: str = "seed: 0") -> str:
    """The flag that names a mix with these settings."""
    Path("mix.yaml").write_text(
        f"""
environments:
  - name: left.py
    weight: 3
    env: {{word: own, {left}}}
  - name: right.py
    minimum_share: 0.25
    env: {{{right}}}
env: {{group_size: 2, word: other, {all}}}
model: sim
sim: {{latency_seconds: 0}}
workers: {{processes: 1, heartbeat_seconds: 60}}
rollouts: {{max_concurrent: 8, stop_after_failed_groups: 2, max_attempts: 1}}
"""
    )
    return "--config mix.yaml"


@pytest.mark.thorough
def test_a_file_makes_one_mix_with_the_shares_that_were_asked(folder: Path, run: Run) -> None:
    words = f"process {mixed(all='data_path_to_save_groups: out.jsonl')} --total_groups"
    assert "8 groups in out.jsonl" in run(f"{words} 8")
    run(f"{words} 24 --resume")
    groups = [group["envserver"] for group in read_jsonl(Path("out.jsonl"))]
    ids = group_ids(Path("out.jsonl"))
    assert len(ids) == len(set(ids)) == 24
    assert abs(sum(group["env"] == "left" for group in groups) - 18) <= 2
    for group in groups:
        own = {rollout["metrics"]["word"] for rollout in group["rollouts"]}
        assert own == {float(group["env"] == "left")}


def test_one_that_fails_and_one_that_ends_do_not_keep_the_others(folder: Path, run: Run) -> None:
    mix = mixed(left="broken: true", right="total_steps: 6")
    assert "left has ended" in run(f"process {mix}", status=1)
    assert len(group_ids(Path("data/right.jsonl"))) == 6
    assert group_ids(Path("data/left.jsonl")) == []
    assert Path("data/left.failures.jsonl").exists()


def serving(line: str, folder: Path) -> AbstractContextManager[Running]:
    return running(*f"serve --port 0 {line}".split(), folder=folder)


def url_of(server: Running) -> str:
    return server.wait_for(r"Trainers: (http://[\d.:]+)")[1]


def status_at(url: str) -> Any:
    return httpx.get(f"{url}/v1/status", timeout=PATIENCE).json()["server"]


@pytest.mark.thorough
def test_a_server_offers_all_of_them_to_one_trainer(folder: Path) -> None:
    more = "--env.group_size 2 --env.ensure_scores_are_not_same false --total_groups 12"
    with serving(f"--env left.py,right.py=3 {SIM} {more}", folder) as server:
        url = url_of(server)

        def made() -> Any:
            listed = httpx.get(f"{url}/v1/groups?after=0&limit=100", timeout=PATIENCE).json()
            return listed["groups"] if len(listed["groups"]) >= 12 else None

        groups = until(made, server.output, alive=server.process)
        status = status_at(url)
    assert len(groups) == 12
    by_name = Counter(group["env"] for group in groups)
    assert abs(by_name["right"] - 9) <= 1, by_name
    assert status["environment"] == "left,right"
    assert status["environments"] == by_name


@pytest.mark.thorough
def test_one_whose_groups_are_all_filtered_keeps_no_trainer_waiting(folder: Path) -> None:
    """Though it has the larger weight, a full queue holds all back, and old groups are dropped."""
    name = "ensure_scores_are_not_same"
    mix = mixed(left=f"{name}: true", all=f"{name}: false")
    more = "--rollouts.max_queued_groups 3 --rollouts.max_staleness_at_delivery 1"
    with serving(f"{mix} {more}", folder) as server:
        url = url_of(server)
        with SyncEnvClient(url, run="trainer", batch_size=2) as client:
            for version in range(4):
                batch = next(client.batches(idle_seconds=PATIENCE))
                assert {group.env for group in batch.groups} == {"right"}
                client.ack(batch)
                client.publish_policy_version(version)
        status = status_at(url)
    assert status["groups_dropped"]["zero_variance"] > 0
    assert status["environments"]["left"] == 0


def test_what_cannot_be_mixed_is_told_before_anything_starts(folder: Path, run: Run) -> None:
    mix = mixed()
    for words, wanted in {
        "--env left.py=0,right.py": "a weight must be a positive number",
        "--env left.py,lefft": "There is no environment 'lefft'",
        "--env left.py,left.py": "named twice",
        f"{mix} --env left.py": "a single environment is given as well",
        "--env left.py,right.py --env.wrod x": "Did you mean --env.word?",
    }.items():
        assert wanted in run(f"process {words} {SIM}", status=2)
    wrong = mixed(left="wrod: x")
    told = run(f"process {wrong}", status=2)
    assert "environments[0]: env.wrod: there is no such setting" in told
    Path("mix.yaml").write_text("environments: [{name: left.py, wieght: 2}]\n")
    assert "mix.yaml:1: environments[0].wieght" in run(f"process {mix}", status=2)
    with pytest.raises(ConfigError, match="more than 1 together"):
        targets([Share("a", minimum=0.7), Share("b", minimum=0.7)])


def test_total_steps_of_a_mix_is_the_total(folder: Path) -> None:
    def read(line: str) -> list[tuple[int | None, int | None]]:
        members = read_mix(COMMAND, line.split())
        found = [(one.spec.settings.total_groups, one.environment.config) for one in members]
        return [(total, config.total_steps) for total, config in found]

    mix = "--env left.py=2,right.py --env.total_steps"
    assert read(f"{mix} 3") == [(3, None), (3, None)]
    path = mixed(left="total_steps: 6")
    assert read(path) == [(None, 6), (None, None)]
    assert read(f"{path} --env.total_steps 9") == [(9, None), (9, None)]


RUNS = [
    path
    for path in sorted((Path(__file__).parents[3] / "configs").glob("*.yaml"))
    if path.stem not in ("models", "sft_templates", "trl_defaults")  # which are not runs
]


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_what_is_ready_made_can_be_read(path: Path) -> None:
    members = read_mix(COMMAND, ["--config", str(path)])
    if len(members) > 1:
        parts = targets(member.share for member in members)
        assert parts["math"] == pytest.approx(2 * parts["code"])
        return
    spec = members[0].spec
    assert spec.reference == path.stem
    assert spec.settings.env.group_size == 8
