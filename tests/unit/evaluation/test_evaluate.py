"""`envserver evaluate`: estimates held against brute force, and reports of whole runs, of one
environment and of several."""

import csv
import itertools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
from envserver_environments.tau.evaluation import pass_hat_ks
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cases import cases_of
from support.commands import envserver, group_ids, read_jsonl
from support.extent import examples
from support.in_process import Run

from envserver import pass_at_k, pass_hat_k
from envserver.evaluation import AttemptResult, Rules, TaskResult, report_run
from envserver.evaluation.estimators import estimate
from envserver.evaluation.report import difference

outcomes = st.lists(st.booleans(), min_size=1, max_size=7)
shares = st.floats(0, 1, allow_nan=False)


@given(outcomes, st.data())
def test_estimates_of_k_are_the_shares_of_choices(passed: list[bool], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(passed)))
    choices = list(itertools.combinations(passed, k))
    some = sum(map(any, choices)) / len(choices)
    every = sum(map(all, choices)) / len(choices)
    assert pass_at_k(len(passed), sum(passed), k) == pytest.approx(some)
    assert pass_hat_k(len(passed), sum(passed), k) == pytest.approx(every)


@pytest.mark.parametrize("bad", [(3, 1, 0), (3, 1, 4), (3, 4, 1), (3, -1, 1), (1, 1, 2)])
@pytest.mark.parametrize("estimator", [pass_at_k, pass_hat_k])
def test_estimates_of_what_cannot_be_are_refused(estimator, bad: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match=r"less than k|impossible"):
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


RUN = Path("run")
REPORTS = ("report.json", "report.md", "report.html")


def report(folder: str = "run") -> Any:
    return orjson.loads(Path(folder, "report.json").read_bytes())


@pytest.mark.thorough
def test_an_evaluation_is_resumed_with_the_same_settings(evaluate: Run) -> None:
    words = "--env math --env.group_size 3 --out run"
    first = evaluate(f"{words} --env.total_steps 2")
    assert "pass^3" in first and "simulated" in first
    groups = RUN / "groups.jsonl"
    before = groups.read_bytes()
    evaluate(f"{words} --env.total_steps 3 --resume")
    assert groups.read_bytes().startswith(before) and len(set(group_ids(groups))) == 3
    found = report()
    rewards = {
        line["envserver"]["task_id"]: [one["reward"] for one in line["envserver"]["rollouts"]]
        for line in read_jsonl(groups)
    }
    assert {task["task_id"]: task["rewards"] for task in found["run"]["tasks"]} == rewards
    overall = found["run"]["overall"]
    assert overall["mean_reward"]["value"] == pytest.approx(sum(map(sum, rewards.values())) / 9)
    assert overall["pass_hat"]["3"]["value"] == sum(all(r) for r in rewards.values()) / 3
    assert (found["split"], found["complete"], found["baselines"]) == ("test", True, {})
    assert "| math | 3 | 9 |" in (RUN / "report.md").read_text()
    listed: dict[str, list[float]] = {}
    with (RUN / "attempts.csv").open(newline="") as file:
        for one in csv.DictReader(file):
            listed.setdefault(one["task_id"], []).append(float(one["reward"]))
    assert listed == rewards


@pytest.mark.thorough
def test_results_stand_beside_the_baselines(evaluate: Run) -> None:
    evaluate("--env video --env.total_steps 2 --sampling.temperature 0 --out run")
    found = report()
    assert found["rules"]["group_size"] == 1
    assert found["baselines"]["blind"]["counts"]["scored"] == 2
    assert found["differences"]["blind"]["tasks"] == 2
    assert any(name.startswith("correct") for name in found["run"]["by"])
    assert "baseline blind" in (RUN / "report.md").read_text()
    tasks = [
        {line["envserver"]["task_id"] for line in read_jsonl(RUN / name)}
        for name in ("groups.jsonl", "groups-blind.jsonl")
    ]
    assert tasks[0] == tasks[1]


FAILING = cases_of(__file__)["failing"]
FAIL = "--env failing.py --rollouts.max_attempts 1"


def test_what_is_lost_is_counted(evaluate: Run) -> None:
    Path("failing.py").write_text(FAILING)
    evaluate(f"{FAIL} --env.group_size 2 --failures zero --out run")
    found = report()["run"]
    counts = found["counts"]
    assert (counts["tasks"], counts["tasks_lost"], counts["scored"], counts["lost"]) == (3, 1, 2, 4)
    assert counts["failed"] == {"agent_error": 4}
    assert found["overall"]["mean_reward"]["value"] == pytest.approx(1 / 3)
    assert "Nothing could be evaluated" in evaluate(f"{FAIL} --env.all --out none", status=1)
    assert not Path("none/report.json").exists()


@pytest.mark.thorough
def test_overwrite_keeps_the_old_evaluation_until_the_first_group(evaluate: Run) -> None:
    Path("failing.py").write_text(FAILING)
    evaluate(f"{FAIL} --out run")
    files = [path for path in sorted(RUN.rglob("*")) if path.is_file()]
    before = {path: path.read_bytes() for path in files if "failures" not in path.name}
    evaluate(f"{FAIL} --out run --overwrite --env.all", status=1)
    assert {path: path.read_bytes() for path in before} == before
    evaluate(f"{FAIL} --out run --env.total_steps 2 --overwrite")
    assert report()["run"]["counts"]["tasks"] == 2


EASY = """
environment: math
env: {total_steps: 3, group_size: 2, data_set: sample}
sampling: {temperature: 0.5}
openai: {base_url: http://localhost:1/v1}
"""


def test_a_folder_is_evaluated_and_its_report_follows_from_groups(evaluate: Run, run: Run) -> None:
    """Of one environment that cannot, one that can, and what is none."""
    Path("envs").mkdir()
    broken = FAILING.replace("Failing", "Broken").replace("bool = False", "bool = True")
    for name, text in (
        ("broken.py", broken), ("easy.yaml", EASY), ("_notes.py", "1 / 0"), ("README.md", "..."),
    ):  # fmt: skip
        Path("envs", name).write_text(text)
    words = "--rollouts.max_attempts 1 --prices.prompt 3 --prices.completion 6 --out run"
    evaluate(f"--env envs {words}", status=1)  # one environment failed: said, and the other is done
    found = report()
    broken, easy = found["parts"]
    assert (broken["name"], broken["run"]["overall"]) == ("broken", None)
    assert broken["run"]["counts"]["lost"] == 12
    assert (easy["name"], easy["env"], easy["rules"]["group_size"]) == ("easy", "math", 2)
    assert easy["settings"]["sampling"]["temperature"] == 0.5
    costs = easy["run"]["costs"]
    tokens = costs["total_prompt_tokens"] * 3 + costs["total_completion_tokens"] * 6
    assert found["totals"]["cost"] == pytest.approx(tokens / 1e6)
    assert found["average"]["value"] == easy["run"]["overall"]["mean_reward"]["value"]
    assert found["simulated"] and "## easy" in (RUN / "report.md").read_text()

    before = {name: (RUN / name).read_bytes() for name in REPORTS}
    for name in REPORTS:
        (RUN / name).unlink()
    run("evaluate report run")
    assert {name: (RUN / name).read_bytes() for name in REPORTS} == before
    run("evaluate report run --failures zero")
    assert report()["parts"][0]["run"]["overall"]["rollouts"] == 12

    told = run("evaluate compare run/easy run/easy/groups.jsonl --json").out
    same = orjson.loads(told)["parts"][0]["reward"]
    assert (same["tasks"], same["difference"]["value"], same["test"]["p_value"]) == (3, 0, 1)
    run("evaluate compare run run/easy --out cmp")
    assert "Only run has broken" in Path("cmp/comparison.md").read_text()
    assert Path("cmp/comparison.html").exists()


REFUSED = cases_of(__file__, "refused.toml")


@pytest.mark.parametrize("line", REFUSED)
def test_what_cannot_be_meant_is_refused(line: str, run: Run) -> None:
    settings = {"environment": "math", "env": {"seed": 0}, "sampling": {}}
    facts = {"split": "test", "group_size": 4, "seed": 0, "simulated": True}
    old = orjson.dumps({"name": "math", "evaluated": settings | facts}).decode()
    texts = {"old": old, "broken": "[]", "other": "{}", "several": '{"parts": ["math", "code"]}'}
    texts["outside"] = '{"parts": ["../old"]}'
    for name, text in texts.items():
        Path(name).mkdir()
        Path(name, "run.json").write_text(text)
    Path("empty").mkdir()
    Path("bad.jsonl").write_text('{"task_id": "a", "question": "b"}\n{"task_id": 1}\n')
    assert REFUSED[line] in run(f"evaluate {line}", status=2)
    assert not Path("run").exists()


# `evaluate --shard` and `evaluate merge`: shards become the report of one run over all tasks

MERGED_RUN = (
    "evaluate --env math --env.data_set sample --env.group_size 2 --env.total_steps 7 "
    "--model sim --sim.latency_seconds 0 --workers.processes 1 --workers.heartbeat_seconds 60"
)
MERGED_REPORTS = ("report.json", "report.md", "report.html", "attempts.csv")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    ran = envserver(*MERGED_RUN.split(), "--out", "whole", folder=folder)
    assert ran.returncode == 0, ran.stderr
    return folder / "whole"


def lines(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines(keepends=True)


def by_group(path: Path) -> list[bytes]:
    return sorted(lines(path), key=group_of)


def group_of(line: bytes) -> str:
    return str(orjson.loads(line)["group_id"])


def cut(whole: Path, count: int) -> list[Path]:
    """Deals the files of a run to `count` shards, as `--shard` deals its tasks."""
    folders = [Path(f"shard{number}") for number in range(1, count + 1)]
    for number, folder in enumerate(folders, 1):
        shutil.copytree(whole, folder, ignore=lambda *_: {*MERGED_REPORTS})
        change_run(folder, shard=f"{number}/{count}")
        tasks = by_group(whole / "tasks.jsonl")[number - 1 :: count]
        (folder / "tasks.jsonl").write_bytes(b"".join(tasks))
        ours = {group_of(line) for line in tasks}
        kept = [
            line
            for line in lines(whole / "groups.jsonl")
            if orjson.loads(line)["envserver"]["group_id"] in ours
        ]
        (folder / "groups.jsonl").write_bytes(b"".join(kept))
    return folders


def change_run(folder: Path, **changes: Any) -> None:
    """Changes facts of a run, of which `env` is merged and None removes one."""
    file = folder / "run.json"
    run = orjson.loads(file.read_bytes())
    facts = run["evaluated"] | changes
    facts["env"] = run["evaluated"]["env"] | changes.get("env", {})
    run["evaluated"] = {name: one for name, one in facts.items() if one is not None}
    file.write_bytes(orjson.dumps(run))


def test_shards_become_the_report_of_the_whole_byte_for_byte(whole: Path, run: Run) -> None:
    shards = cut(whole, 3)
    # The whole with its tasks in the order of the stream, however they came to their end.
    ordered = shutil.copytree(whole, Path("ordered"))
    (ordered / "tasks.jsonl").write_bytes(b"".join(by_group(whole / "tasks.jsonl")))
    run("evaluate report ordered")
    # In any order, and a torn last line counts for nothing.
    with (shards[0] / "groups.jsonl").open("ab") as file:
        file.write(b'{"envserver": {"gro')
    run("evaluate merge shard3 shard2 shard1 --out all")
    for name in MERGED_REPORTS:
        assert Path("all", name).read_bytes() == (ordered / name).read_bytes()


@pytest.mark.thorough
def test_shards_of_a_stream_are_all_of_its_tasks(whole: Path, run: Run) -> None:
    for number in (1, 2):
        run(f"{MERGED_RUN} --shard {number}/2 --out s{number}")
    ids = [set(group_ids(Path(folder, "groups.jsonl"))) for folder in ("s1", "s2")]
    assert [len(one) for one in ids] == [4, 3]
    assert ids[0] | ids[1] == set(group_ids(whole / "groups.jsonl"))
    run("evaluate merge s1 s2 --out all")
    assert "shard 1/2" in run(f"{MERGED_RUN} --shard 2/2 --resume --out s1", status=2)


def test_slices_that_are_files_may_differ_in_that_setting(whole: Path, run: Run) -> None:
    for number, folder in enumerate(cut(whole, 2)):
        change_run(folder, env={"data_path": f"part{number}.jsonl"}, shard=None)
    run("evaluate merge shard1 shard2 --out all", status=2)
    run("evaluate merge shard1 shard2 --out all --slices data_path")
    report = orjson.loads(Path("all/report.json").read_bytes())
    assert report["settings"]["env"]["data_path"] == ["part0.jsonl", "part1.jsonl"]
    assert (report["run"]["counts"]["tasks"], report["complete"]) == (7, True)


def other_model(first: Path, second: Path) -> None:
    path = second / "groups.jsonl"
    groups = [orjson.loads(line) for line in lines(path)]
    for group in groups:
        group["envserver"]["model"] = "another"
    path.write_bytes(b"".join(orjson.dumps(group) + b"\n" for group in groups))


def a_task_twice(first: Path, second: Path) -> None:
    with (second / "tasks.jsonl").open("ab") as file:
        file.write(lines(first / "tasks.jsonl")[0])


def a_shard_less(first: Path, second: Path) -> None:
    change_run(second, shard="3/3")
    change_run(first, shard="1/3")


def fewer_tasks(first: Path, second: Path) -> None:
    path = first / "tasks.jsonl"
    path.write_bytes(b"".join(lines(path)[:2]))


@pytest.mark.parametrize(
    ("spoil", "why", "can_be_partial"),
    [
        (
            lambda first, second: change_run(second, env={"data_set": "gsm8k"}),
            "shard2/run.json: env.data_set 'gsm8k', but in",
            False,
        ),
        (other_model, "shard2/run.json: model 'another', but in", False),
        (a_task_twice, "shard2/tasks.jsonl, line 4: task", False),
        (a_shard_less, "Shard 2/3 is missing", True),
        (lambda first, second: change_run(first, complete=False), "shard1 is not finished", True),
        (fewer_tasks, "shard1/tasks.jsonl has 2 of 5 tasks; shard 1/2 has 3", True),
        (lambda first, second: shutil.rmtree(second), "shard2 holds no shard", False),
    ],
)
def test_shards_that_do_not_belong_together_are_refused(
    spoil: Callable[[Path, Path], None], why: str, can_be_partial: bool, whole: Path, run: Run
) -> None:
    spoil(*cut(whole, 2))
    merge = "evaluate merge shard1 shard2 --out all"
    assert why in run(merge, status=2)
    assert not Path("all").exists()
    run(f"{merge} --partial", status=0 if can_be_partial else 2)
    if can_be_partial:
        assert not orjson.loads(Path("all/report.json").read_bytes())["complete"]
