"""What a run counts, tells at `/metrics`, and gives to trackers (`--track`); one that fails stops
nothing."""

import threading
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
import structlog
from envserver_records.records import Score, Usage
from envserver_records.tracking import JsonLinesTracker
from support.api import native_group, put_native
from support.commands import read_jsonl
from support.waiting import PATIENCE, until

import envserver
from envserver import ConfigError
from envserver.rollouts.events import GroupDelivered, GroupDropped, RolloutScored
from envserver.running.metrics import Deliveries, Tally
from envserver.running.tracking import TrackedNumbers, without_secrets
from envserver.store import open_store
from envserver.telemetry.history import Name, numbers_of
from envserver.telemetry.measures import families

SIM: dict[str, Any] = {"model": "sim", "env": {"total_steps": 2, "group_size": 2}}
KEY = "sk-" + "a1b2c3d4" * 4


def delivered(numbers: TrackedNumbers, environment: str, **changes: Any) -> None:
    numbers.observe(environment, GroupDelivered(group=native_group("g1", 3, **changes)))


def dropped(group_id: str, reason: str) -> GroupDropped:
    facts: dict[str, Any] = {"index": 0, "task_id": "t", "failed": False, "message": "", "at": 0.0}
    return GroupDropped(group_id=group_id, reason=reason, **facts)


OF_MATH = (("environment", "math"),)


async def test_spread_and_equal_groups_are_counted_delivered_or_not() -> None:
    numbers = Tally()
    observe = numbers.observer("math")
    for number, rewards in enumerate([(0.0, 1.0), (0.5, 0.5)]):
        group = native_group(f"g{number}")
        for one, reward in zip(group.trajectories, rewards, strict=True):
            one.score.reward = reward
        observe(GroupDelivered(group=group))
    observe(dropped("g2", "zero_variance"))
    observe(dropped("g3", "stale"))
    now = numbers_of(families(await numbers.read()))
    assert now[Name("envserver_group_deviation_count", OF_MATH)] == 2
    assert now[Name("envserver_group_deviation_sum", OF_MATH)] == 0.5
    assert now[Name("envserver_groups_equal_total", OF_MATH)] == 2


async def test_groups_of_others_are_counted_when_they_are_stored_once(tmp_path: Path) -> None:
    async with open_store(tmp_path / "groups.db") as store:
        for group_id in ("g1", "g2", "g1"):  # the third was stored before
            await put_native(store, native_group(group_id, score=Score(reward=0.25)))
        now = numbers_of(families(await Deliveries(store, lambda: -1).read()))
    wanted = {"groups_total": 2, "equal_groups_total": 2, "reward_count": 4, "reward_sum": 1.0}
    assert {name: now[Name(f"envserver_stored_{name}", OF_MATH)] for name in wanted} == wanted


async def test_scalars_are_of_the_time_since_the_last_call() -> None:
    numbers, tally = TrackedNumbers(4), Tally()
    for tokens in (100, 300):
        event = RolloutScored(
            group_id="g", rollout_id="r", scorable=True, turns=2, completion_tokens=tokens,
            seconds=5, limit="tokens" if tokens == 300 else None,
        )  # fmt: skip
        numbers.observe("math", event)
        tally.observer("math")(event)
    assert (await tally.read())["rollouts"]["math", "limit_tokens"] == 1  # an alarm reads it
    delivered(numbers, "math")
    numbers.observe("math", dropped("g", "stale"))
    found = numbers.scalars(10.0)
    assert (found["reward"], found["completion_tokens"]) == (pytest.approx(1 / 3), 200)
    assert (found["limited_share"], found["tokens_per_second"]) == (0.5, 40)
    assert (found["policy_version"], found["groups/math"], found["dropped/stale"]) == (7, 1, 1)
    assert not any(name.endswith("reward/math") for name in found)  # there is only one
    delivered(numbers, "math")
    delivered(numbers, "code", score=Score(reward=1.0))
    found = numbers.scalars(10.0)
    assert (found["reward/math"], found["reward/code"]) == (pytest.approx(1 / 3), 1.0)
    assert "turns" not in found


def test_rows_are_the_best_and_the_worst_of_a_group_bounded_and_without_secrets() -> None:
    numbers = TrackedNumbers(1, "http://a/#/groups/")
    call = {"function": {"name": "look", "arguments": '{"at": 1}'}}
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": [{"type": "text", "text": f"Use {KEY}"}, {"type": "image"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "x" * 10_000},
    ]
    delivered(numbers, "math")
    delivered(numbers, "math", messages=messages, usage=Usage(ended_by="tokens"))
    best, worst = numbers.rows(5, numbers.take_groups())
    assert (best["reward"], worst["reward"]) == (1.0, 0.0)
    assert (best["step"], best["end"], best["link"]) == (5, "tokens", "http://a/#/groups/g1/1")
    assert best["prompt"] == "system: Be kind.\n\nuser: Use [redacted]"
    completion = str(best["completion"])
    assert completion.startswith('assistant: [look({"at": 1})]\n\ntool: xxx')
    assert len(completion) < 4100 and "characters ..." in completion
    assert numbers.take_groups() == []
    assert without_secrets({"a": [f"http://u:{KEY}@b/", 1]}) == {"a": ["http://[redacted]@b/", 1]}


async def test_a_tracker_that_fails_or_hangs_stops_nothing_and_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    never = threading.Event()
    no_room, closed = RuntimeError("no room"), RuntimeError("closed")
    failing = {"scalars": no_room, "rollouts": no_room, "close": closed}
    refuses = Mock(**{name: Mock(side_effect=error) for name, error in failing.items()})

    def opened(name: str, *, folder: Path, run: str, **_: Any) -> Any:
        if name == "mlflow":
            never.wait()
        if name in ("wandb", "mlflow"):
            raise OSError("no such host")
        return refuses if name == "trackio" else JsonLinesTracker(folder / f"{run}.jsonl")

    monkeypatch.setattr("envserver.running.tracking.open_tracker", opened)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    names = ["wandb", "trackio", "mlflow", "jsonl"]
    config = {"folder": tmp_path, "name": "run", "close_seconds": 0.5, "seconds": 0.01}
    with structlog.testing.capture_logs() as logged:
        result = await envserver.aio.process("math", **SIM, track=names, tracking=config)
    never.set()
    assert result.delivered == 2
    told = {one["tracker"]: one["reason"] for one in logged if one["event"] == "tracker_failed"}
    assert told.pop("mlflow").startswith("It did not end in time")
    assert told == {"wandb": "OSError: no such host", "trackio": "RuntimeError: no room"}
    assert sum(one["event"] == "tracker_failed" for one in logged) == 3
    lines = read_jsonl(tmp_path / "run.jsonl")
    assert lines[0]["config"]["env"]["group_size"] == 2
    assert [line["step"] for line in lines if "reward" in line][-1] == 2
    assert any(row["link"] == "" for line in lines for row in line.get("rollouts", ()))


def test_a_tracker_that_is_not_installed_is_refused_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--track mlflow needs the package mlflow"):
        envserver.process("math", out=tmp_path / "out.jsonl", **SIM, track=["mlflow"])
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.thorough
async def test_a_server_goes_on_where_it_was_and_an_evaluation_has_results(tmp_path: Path) -> None:
    settings = {
        "model": "sim", "env": {"group_size": 2}, "store": str(tmp_path / "s.db"),
        "server": {"port": 0, "drain_seconds": 0},
    }  # fmt: skip
    track = {"track": ["jsonl"], "tracking": {"folder": tmp_path, "name": "serve", "seconds": 0.1}}
    path, steps = tmp_path / "serve.jsonl", [0]
    for _ in range(2):
        before = len(read_jsonl(path)) if path.exists() else 0
        async with (
            envserver.aio.serve("math", **settings, **track) as server,
            httpx.AsyncClient(base_url=server.url, timeout=PATIENCE) as http,
        ):
            await until(lambda: path.exists() and len(read_jsonl(path)) > before + 3)  # noqa: B023
            assert (await http.get("/v1/groups")).is_success
        lines = read_jsonl(path)[before:]
        found = [line["step"] for line in lines if "time" in line]
        assert found[0] > steps[-1] and found == sorted(set(found))
        steps = found
        links = [row["link"] for line in lines for row in line.get("rollouts", ())]
        assert links and all(link.startswith(f"{server.url}/#/groups/math-") for link in links)
    track["tracking"] = {"folder": tmp_path, "name": "evaluate"}
    evaluation = await envserver.aio.evaluate("math", out=tmp_path / "e", **SIM, **track)
    last = [line for line in read_jsonl(tmp_path / "evaluate.jsonl") if "time" in line][-1]
    assert evaluation.report is not None
    mean = evaluation.report.run.overall.mean_reward.value  # type: ignore[union-attr]
    assert (last["step"], last["evaluate/math/mean_reward"]) == (2, mean)
