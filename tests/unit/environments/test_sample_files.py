"""`envserver sample`: what it writes is read by the environment whose inputs it shows."""

from __future__ import annotations

import itertools
import shlex
import shutil
from pathlib import Path

import pytest
from support.commands import envserver, read_jsonl

from envserver import EnvserverError, main
from envserver.registry import builtin_names, find

MADE = ("kuhn", "proposer_solver", "visual_counting")
"""Environments that make their tasks."""
READING = sorted(set(builtin_names()) - {*MADE})


@pytest.mark.parametrize("name", READING)
def test_every_sample_file_is_read_by_its_environment(name: str, tmp_path: Path) -> None:
    kind = find(name)
    more = {"check_gold": False} if name == "swe" else {}  # needs a sandbox: see below
    gone, folder = tmp_path / "gone", tmp_path / "here"
    for place in (gone, folder):
        place.mkdir()
        written = kind.write_sample(place)
        if place == gone:
            shutil.rmtree(gone)
            with pytest.raises((EnvserverError, OSError)):
                list(kind(kind.Config(**written, **more)).tasks("train"))
    environment = kind(kind.Config(**written, **more))
    assert list(itertools.islice(environment.tasks("train"), 50))
    assert not getattr(environment, "dropped", {})


def test_environments_that_make_their_tasks_say_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in MADE:
        assert main(["sample", name, "--out", str(tmp_path / name)]) == 2
        assert "come from no file" in capsys.readouterr().err
        assert not (tmp_path / name).exists()


@pytest.mark.parametrize("name", ["math", "swe", "tau"])
def test_the_printed_command_makes_groups(name: str, tmp_path: Path) -> None:
    wrote = envserver("sample", name, folder=tmp_path)
    assert wrote.returncode == 0, wrote.stderr
    *files, _, command = wrote.stdout.splitlines()
    assert files and all((tmp_path / file).is_file() for file in files)
    more = (
        "--env.total_steps",
        1,
        "--env.group_size",
        1,
        "--env.ensure_scores_are_not_same",
        "false",
    )
    words = shlex.split(command)[1:]
    ran = envserver(*words, *more, "--out", "groups.jsonl", folder=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert len(read_jsonl(tmp_path / "groups.jsonl")) == 1
    again = envserver("sample", name, folder=tmp_path)
    assert again.returncode == 2 and "exists" in again.stderr
