"""`envserver evaluate`: estimates held against brute force, and reports of whole runs."""

from __future__ import annotations

import csv
import itertools
from pathlib import Path
from typing import Any

import orjson
import pytest
from envserver_environments.tau.evaluation import pass_hat_ks
from hypothesis import given, settings
from hypothesis import strategies as st
from support.commands import envserver, group_ids, read_jsonl
from support.extent import examples

from envserver import main, pass_at_k, pass_hat_k
from envserver.evaluation import AttemptResult, Rules, TaskResult, report_run
from envserver.evaluation.estimators import estimate
from envserver.evaluation.report import difference

outcomes = st.lists(st.booleans(), min_size=1, max_size=7)
shares = st.floats(0, 1, allow_nan=False)


@given(outcomes, st.data())
def test_estimates_of_k_attempts_are_the_shares_of_all_choices(
    passed: list[bool], data: st.DataObject
) -> None:
    k = data.draw(st.integers(1, len(passed)))
    choices = list(itertools.combinations(passed, k))
    some = sum(map(any, choices)) / len(choices)
    every = sum(map(all, choices)) / len(choices)
    assert pass_at_k(len(passed), sum(passed), k) == pytest.approx(some)
    assert pass_hat_k(len(passed), sum(passed), k) == pytest.approx(every)


@pytest.mark.parametrize("bad", [(3, 1, 0), (3, 1, 4), (3, 4, 1), (3, -1, 1), (1, 1, 2)])
@pytest.mark.parametrize("estimator", [pass_at_k, pass_hat_k])
def test_estimates_of_what_cannot_be_are_refused(estimator, bad: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match=r"less than k|cannot be"):
        estimator(*bad)


@settings(max_examples=examples(20))
@given(st.lists(st.lists(st.booleans(), min_size=2, max_size=4), min_size=1, max_size=5))
def test_tau_counts_as_the_server_does(attempts: list[list[bool]]) -> None:
    rewards = {str(number): [float(one) for one in task] for number, task in enumerate(attempts)}
    for k, value in pass_hat_ks(rewards).items():
        single = [pass_hat_k(len(task), sum(task), k) for task in attempts]
        assert value == pytest.approx(estimate(single).value)


@settings(max_examples=examples(30))
@given(st.lists(shares, min_size=2, max_size=40), st.integers(0, 3))
def test_an_interval_is_of_the_values_and_the_same_again(values: list[float], seed: int) -> None:
    found = estimate(values, seed=seed)
    assert found == estimate(values, seed=seed)
    assert found.low is not None and found.high is not None
    assert min(values) - 1e-9 <= found.low <= found.high <= max(values) + 1e-9
    assert found.value == pytest.approx(sum(values) / len(values))


def test_intervals_are_as_wide_as_the_normal_ones_of_many_tasks() -> None:
    found = estimate([0.0, 1.0] * 200)
    assert found.low == pytest.approx(0.5 - 1.96 * 0.025, abs=0.01)
    assert found.high == pytest.approx(0.5 + 1.96 * 0.025, abs=0.01)
    alone = estimate([1.0])
    assert (alone.value, alone.low, alone.high) == (1.0, None, None)


def result(task_id: str, *rewards: float, lost: int = 0, **facts: Any) -> TaskResult:
    attempts = [
        AttemptResult(reward=reward, metrics=facts.get("metrics", {})) for reward in rewards
    ]
    return TaskResult(task_id=task_id, attempts=attempts, lost=lost, labels=facts.get("labels", {}))


def test_lost_attempts_are_left_out_or_count_as_nothing() -> None:
    results = [result("a", 1.0, 0.5), result("b", 1.0, lost=1), result("c", lost=2)]
    left_out = report_run(results, Rules(group_size=2)).overall
    counted = report_run(results, Rules(group_size=2, failures="zero")).overall
    assert left_out is not None and counted is not None
    assert (left_out.tasks, left_out.rollouts) == (2, 3)
    assert left_out.mean_reward.value == pytest.approx((0.75 + 1) / 2)
    assert left_out.pass_at[1].value == pytest.approx(0.75)
    assert (left_out.pass_at[2].tasks, left_out.pass_hat[2].value) == (1, 0.0)
    assert (counted.tasks, counted.rollouts) == (3, 6)
    assert counted.mean_reward.value == pytest.approx((0.75 + 0.5 + 0) / 3)
    assert counted.pass_at[2].value == pytest.approx(2 / 3)
    lenient = report_run(results, Rules(group_size=2, pass_at=0.5)).overall
    assert lenient is not None and lenient.pass_hat[2].value == 1.0
    counts = report_run(results, Rules(group_size=2)).counts
    assert (counts.tasks, counts.tasks_lost, counts.scored, counts.lost) == (3, 1, 3, 3)
    nothing = report_run([result("c", lost=2)], Rules(group_size=2, failures="drop"))
    assert nothing.overall is None and nothing.costs is None


def test_kinds_of_tasks_are_told_apart_by_labels_and_by_metrics() -> None:
    results = [
        result("a", 1.0, metrics={"correct_CW": 1.0}, labels={"level": "1", "type": "same"}),
        result("b", 0.0, metrics={"correct_CW": 0.5}, labels={"level": "2", "type": "same"}),
        result("c", 0.0, metrics={"correct_TN": 0.0}, labels={"level": "2", "type": "same"}),
    ]
    by = report_run(results, Rules(group_size=1)).by
    assert set(by) == {"level", "correct"}
    assert {value: one.mean_reward.value for value, one in by["level"].items()} == {"1": 1, "2": 0}
    assert by["correct"]["CW"].mean_reward.value == pytest.approx(0.75)
    assert by["correct"]["TN"].tasks == 1
    assert difference(results, [result("b", 1.0), result("x", 1.0)], Rules(group_size=1)) == (
        estimate([-1.0])
    )


SIM = ("--model", "sim", "--sim.latency_seconds", 0, "--workers.processes", 1)


@pytest.mark.thorough
def test_an_evaluation_is_resumed_with_the_same_settings(tmp_path: Path) -> None:
    words = ("evaluate", "--env", "math", *SIM, "--env.group_size", 3, "--out", "run")
    first = envserver(*words, "--env.total_steps", 2, folder=tmp_path)
    assert first.returncode == 0, first.stderr
    assert "pass^3" in first.stderr and "simulated" in first.stderr
    groups = tmp_path / "run" / "groups.jsonl"
    before = groups.read_bytes()
    again = envserver(*words, "--env.total_steps", 3, "--resume", folder=tmp_path)
    assert again.returncode == 0, again.stderr
    assert groups.read_bytes().startswith(before) and len(set(group_ids(groups))) == 3
    report = orjson.loads((tmp_path / "run" / "report.json").read_bytes())
    rewards = {
        line["envserver"]["task_id"]: [one["reward"] for one in line["envserver"]["rollouts"]]
        for line in read_jsonl(groups)
    }
    assert {task["task_id"]: task["rewards"] for task in report["run"]["tasks"]} == rewards
    overall = report["run"]["overall"]
    mean = sum(map(sum, rewards.values())) / 9
    assert overall["mean_reward"]["value"] == pytest.approx(mean)
    assert overall["pass_hat"]["3"]["value"] == sum(all(r) for r in rewards.values()) / 3
    assert (report["split"], report["complete"], report["baselines"]) == ("test", True, {})
    assert "| math | 3 | 9 |" in (tmp_path / "run" / "report.md").read_text()
    with (tmp_path / "run" / "attempts.csv").open(newline="") as file:
        attempts = list(csv.DictReader(file))
    listed = {
        task: [float(one["reward"]) for one in attempts if one["task_id"] == task]
        for task in rewards
    }
    assert listed == rewards


def test_results_stand_beside_the_baselines(tmp_path: Path) -> None:
    words = ("--env.total_steps", 2, "--sampling.temperature", 0, "--out", "run")
    ran = envserver("evaluate", "--env", "video", *SIM, *words, folder=tmp_path)
    assert ran.returncode == 0, ran.stderr
    report = orjson.loads((tmp_path / "run" / "report.json").read_bytes())
    assert report["rules"]["group_size"] == 1
    assert report["baselines"]["blind"]["counts"]["scored"] == 2
    assert report["differences"]["blind"]["tasks"] == 2
    assert any(name.startswith("correct") for name in report["run"]["by"])
    assert "baseline blind" in (tmp_path / "run" / "report.md").read_text()
    tasks = [
        {line["envserver"]["task_id"] for line in read_jsonl(tmp_path / "run" / name)}
        for name in ("groups.jsonl", "groups-blind.jsonl")
    ]
    assert tasks[0] == tasks[1]


FAILING = '''
from envserver import Environment, Score, Task

class Failing(Environment):
    """The first task is lost, of the others one attempt each."""

    class Config(Environment.Config):
        all: bool = False

    def tasks(self, split):
        for n in range(3):
            yield Task(f"t-{n}", {"first": n == 0})

    async def rollout(self, task, run):
        if self.config.all or task.public["first"] or run.rollout_id.endswith("r0"):
            raise RuntimeError("no such tool")
        return "done"

    def score(self, task, result):
        return Score(reward=1.0)
'''


def test_what_is_lost_is_counted(tmp_path: Path) -> None:
    (tmp_path / "failing.py").write_text(FAILING)
    words = ("evaluate", "--env", "failing.py", *SIM, "--rollouts.max_attempts", 1)
    ran = envserver(
        *words, "--env.group_size", 2, "--failures", "zero", "--out", "run", folder=tmp_path
    )
    assert ran.returncode == 0, ran.stderr
    report = orjson.loads((tmp_path / "run" / "report.json").read_bytes())
    counts = report["run"]["counts"]
    assert (counts["tasks"], counts["tasks_lost"], counts["scored"], counts["lost"]) == (3, 1, 2, 4)
    assert counts["failed"] == {"agent_error": 4}
    assert report["run"]["overall"]["mean_reward"]["value"] == pytest.approx(1 / 3)
    ran = envserver(*words, "--env.all", "--out", "none", folder=tmp_path)
    assert ran.returncode == 1 and "Nothing could be evaluated" in ran.stderr
    assert not (tmp_path / "none" / "report.json").exists()


@pytest.mark.thorough
def test_overwrite_keeps_the_old_evaluation_until_the_first_group(tmp_path: Path) -> None:
    (tmp_path / "failing.py").write_text(FAILING)
    words = ("evaluate", "--env", "failing.py", *SIM, "--rollouts.max_attempts", 1, "--out", "run")
    assert envserver(*words, folder=tmp_path).returncode == 0
    files = [path for path in sorted((tmp_path / "run").rglob("*")) if path.is_file()]
    before = {path: path.read_bytes() for path in files if "failures" not in path.name}
    failed = envserver(*words, "--overwrite", "--env.all", folder=tmp_path)
    assert failed.returncode == 1, failed.stderr
    assert {path: path.read_bytes() for path in before} == before
    again = envserver(*words, "--env.total_steps", 2, "--overwrite", folder=tmp_path)
    assert again.returncode == 0, again.stderr
    report = orjson.loads((tmp_path / "run" / "report.json").read_bytes())
    assert report["run"]["counts"]["tasks"] == 2


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--failures", "forgive"], "--failures"),
        (["--pass-at", "2"], "--pass"),
        (["--resume"], "--out"),
        (["--resume", "--overwrite"], "exclude each other"),
        (["--out", "old"], "holds an evaluation"),
        (["--out", "old", "--resume", "--env.seed", "7"], "seed 0 (now 7)"),
        (["--out", "broken", "--resume"], "cannot be read"),
        (["--out", "other", "--resume"], "names no evaluation"),
        (["--prices.prompt", "1"], "go together"),
        (["--truncated", "forgive"], "--truncated"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    words: list[str],
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = {"environment": "math", "env": {"seed": 0}, "sampling": {}}
    facts = {"split": "test", "group_size": 4, "seed": 0, "simulated": True}
    old = orjson.dumps({"name": "math", "evaluated": settings | facts}).decode()
    for name, text in (("old", old), ("broken", "[]"), ("other", "{}")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text(text)
    assert main(["evaluate", "--env", "math", "--model", "sim", *words]) == 2
    assert told in capsys.readouterr().err
