"""`evaluate --shard` and `evaluate merge`: shards become the report of one run over all tasks."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
from support.commands import envserver, group_ids
from support.in_process import Run

RUN = (
    "evaluate --env math --env.data_set sample --env.group_size 2 --env.total_steps 7 "
    "--model sim --sim.latency_seconds 0 --workers.processes 1 --workers.heartbeat_seconds 60"
)
REPORTS = ("report.json", "report.md", "report.html", "attempts.csv")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    ran = envserver(*RUN.split(), "--out", "whole", folder=folder)
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
        shutil.copytree(whole, folder, ignore=lambda *_: {*REPORTS})
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
    for name in REPORTS:
        assert Path("all", name).read_bytes() == (ordered / name).read_bytes()


@pytest.mark.thorough
def test_shards_of_a_stream_are_all_of_its_tasks(whole: Path, run: Run) -> None:
    for number in (1, 2):
        run(f"{RUN} --shard {number}/2 --out s{number}")
    ids = [set(group_ids(Path(folder, "groups.jsonl"))) for folder in ("s1", "s2")]
    assert [len(one) for one in ids] == [4, 3]
    assert ids[0] | ids[1] == set(group_ids(whole / "groups.jsonl"))
    run("evaluate merge s1 s2 --out all")
    assert "shard 1/2" in run(f"{RUN} --shard 2/2 --resume --out s1", status=2)


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


@pytest.mark.parametrize("shard", ["0/2", "3/2", "1", "a/b", "1/0"])
def test_what_is_no_shard_is_refused(shard: str, run: Run) -> None:
    assert "is not a shard" in run(f"{RUN} --shard {shard} --out run", status=2)
    assert not Path("run").exists()
