"""`evaluate --shard` and `evaluate merge`: shards become the report of one run over all tasks."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
from support.commands import envserver, group_ids

from envserver import main

RUN = (
    *("evaluate", "--env", "math", "--env.data_set", "sample", "--env.group_size", 2, "--model"),
    *("sim", "--sim.latency_seconds", 0, "--workers.processes", 1, "--env.total_steps", 7),
)
REPORTS = ("report.json", "report.md", "report.html", "attempts.csv")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    ran = envserver(*RUN, "--out", "whole", folder=folder)
    assert ran.returncode == 0, ran.stderr
    return folder / "whole"


def cut(whole: Path, place: Path, count: int) -> list[str]:
    """Deals the files of a run to `count` shards, as `--shard` deals its tasks."""
    folders = [place / f"shard{number}" for number in range(1, count + 1)]
    for number, folder in enumerate(folders, 1):
        shutil.copytree(whole, folder, ignore=lambda *_: {*REPORTS})
        change_run(folder, lambda run, number=number: run.update(shard=f"{number}/{count}"))
        tasks = sorted((whole / "tasks.jsonl").read_bytes().splitlines(), key=group_of)
        (folder / "tasks.jsonl").write_bytes(b"\n".join(tasks[number - 1 :: count]) + b"\n")
        ours = {group_of(line) for line in tasks[number - 1 :: count]}
        lines = (whole / "groups.jsonl").read_bytes().splitlines(keepends=True)
        kept = [line for line in lines if orjson.loads(line)["envserver"]["group_id"] in ours]
        (folder / "groups.jsonl").write_bytes(b"".join(kept))
    return [str(folder) for folder in folders]


def group_of(line: bytes) -> str:
    return str(orjson.loads(line)["group_id"])


def change_run(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    run = orjson.loads((folder / "run.json").read_bytes())
    change(run["evaluated"])
    (folder / "run.json").write_bytes(orjson.dumps(run))


def test_shards_become_the_report_of_the_whole_byte_for_byte(whole: Path, tmp_path: Path) -> None:
    shards = cut(whole, tmp_path, 3)
    # The whole with its tasks in the order of the stream, however they came to their end.
    ordered = tmp_path / "ordered"
    shutil.copytree(whole, ordered)
    tasks = sorted((whole / "tasks.jsonl").read_bytes().splitlines(), key=group_of)
    (ordered / "tasks.jsonl").write_bytes(b"\n".join(tasks) + b"\n")
    assert main(["evaluate", "report", str(ordered)]) == 0
    # In any order, and a torn last line counts for nothing.
    with Path(shards[0], "groups.jsonl").open("ab") as file:
        file.write(b'{"envserver": {"gro')
    assert main(["evaluate", "merge", *reversed(shards), "--out", str(tmp_path / "all")]) == 0
    for name in REPORTS:
        assert (tmp_path / "all" / name).read_bytes() == (ordered / name).read_bytes()


def test_shards_of_a_stream_are_all_of_its_tasks(whole: Path, tmp_path: Path) -> None:
    for number in (1, 2):
        out = ("--shard", f"{number}/2", "--out", f"s{number}")
        ran = envserver(*RUN, *out, folder=tmp_path)
        assert ran.returncode == 0, ran.stderr
    folders = [str(tmp_path / "s1"), str(tmp_path / "s2")]
    ids = [set(group_ids(Path(folder, "groups.jsonl"))) for folder in folders]
    assert [len(one) for one in ids] == [4, 3]
    assert ids[0] | ids[1] == set(group_ids(whole / "groups.jsonl"))
    assert main(["evaluate", "merge", *folders, "--out", str(tmp_path / "all")]) == 0
    ran = envserver(*RUN, "--shard", "2/2", "--resume", "--out", "s1", folder=tmp_path)
    assert ran.returncode == 2 and "shard 1/2" in ran.stderr


def test_slices_that_are_files_may_differ_in_that_setting(whole: Path, tmp_path: Path) -> None:
    folders = cut(whole, tmp_path, 2)
    for number, folder in enumerate(folders):
        name = f"part{number}.jsonl"
        change_run(Path(folder), lambda run, name=name: run["env"].update(data_path=name))
        change_run(Path(folder), lambda run: run.pop("shard"))
    merge = ["evaluate", "merge", *folders, "--out", str(tmp_path / "all")]
    assert main(merge) == 2
    assert main([*merge, "--slices", "data_path"]) == 0
    report = orjson.loads((tmp_path / "all" / "report.json").read_bytes())
    assert report["settings"]["env"]["data_path"] == ["part0.jsonl", "part1.jsonl"]
    assert (report["run"]["counts"]["tasks"], report["complete"]) == (7, True)


def other_settings(shards: list[Path]) -> None:
    change_run(shards[1], lambda run: run["env"].update(data_set="gsm8k"))


def other_model(shards: list[Path]) -> None:
    path = shards[1] / "groups.jsonl"
    lines = [orjson.loads(line) for line in path.read_bytes().splitlines()]
    for line in lines:
        line["envserver"]["model"] = "another"
    path.write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))


def a_task_twice(shards: list[Path]) -> None:
    first = (shards[0] / "tasks.jsonl").read_bytes().splitlines(keepends=True)[0]
    with (shards[1] / "tasks.jsonl").open("ab") as file:
        file.write(first)


def a_shard_less(shards: list[Path]) -> None:
    change_run(shards[1], lambda run: run.update(shard="3/3"))
    change_run(shards[0], lambda run: run.update(shard="1/3"))


def unfinished(shards: list[Path]) -> None:
    change_run(shards[0], lambda run: run.update(complete=False))


def fewer_tasks(shards: list[Path]) -> None:
    path = shards[0] / "tasks.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:2]))


@pytest.mark.parametrize(
    ("spoil", "why", "can_be_partial"),
    [
        (other_settings, "shard2/run.json: env.data_set 'gsm8k', but in", False),
        (other_model, "shard2/run.json: model 'another', but in", False),
        (a_task_twice, "shard2/tasks.jsonl, line 4: task", False),
        (a_shard_less, "Shard 2/3 is missing", True),
        (unfinished, "shard1 is not finished", True),
        (fewer_tasks, "shard1/tasks.jsonl has 2 of 5 tasks; shard 1/2 has 3", True),
        (lambda shards: shutil.rmtree(shards[1]), "shard2 holds no shard", False),
    ],
)
def test_shards_that_do_not_belong_together_are_refused(
    spoil: Callable[[list[Path]], None],
    why: str,
    can_be_partial: bool,
    whole: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shards = cut(whole, tmp_path, 2)
    spoil([Path(shard) for shard in shards])
    merge = ["evaluate", "merge", *shards, "--out", str(tmp_path / "all")]
    assert main(merge) == 2
    assert why in " ".join(capsys.readouterr().err.split()).replace(f"{tmp_path}/", "")
    assert not (tmp_path / "all").exists()
    assert main([*merge, "--partial"]) == (0 if can_be_partial else 2)
    if can_be_partial:
        assert not orjson.loads((tmp_path / "all" / "report.json").read_bytes())["complete"]


@pytest.mark.parametrize("shard", ["0/2", "3/2", "1", "a/b", "1/0"])
def test_what_is_no_shard_is_refused(shard: str, tmp_path: Path) -> None:
    ran = envserver(*RUN, "--shard", shard, "--out", "run", folder=tmp_path)
    assert ran.returncode == 2 and "is not a shard" in ran.stderr
    assert not (tmp_path / "run").exists()
