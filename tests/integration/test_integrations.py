"""Environments of another framework are found by scheme and run in their backend."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from support.commands import envserver, read_jsonl
from support.env_packages import home, refused, run, wheel

__all__ = ["home"]

FRAMEWORK = """
VERSION = {version}

def load(name):
    return {{"question": "Which version of " + name + "?", "answer": str(VERSION)}}
"""
BRIDGE = '''
from envserver import Backend, Environment, Integration, NotFoundError, Score, Task


def environment(name):
    import little_gym

    if name == "missing":
        raise NotFoundError("There is no such game.")

    class Played(Environment):
        """A game of the little gym."""

        def tasks(self, split):
            loaded = little_gym.load(name)
            yield Task("t", {"question": loaded["question"]}, {"answer": loaded["answer"]})

        async def rollout(self, task, run):
            import little_gym
            await run.chat([{"role": "user", "content": task.public["question"]}])
            return str(little_gym.VERSION)

        def score(self, task, result):
            return Score(reward=float(result.output == task.hidden["answer"]))

    Played.name = "gym_" + name
    return Played


def backend(name, packages):
    return Backend(
        name="little-gym",
        requirements=["little-gym==2.0"],
        prepare="import little_gym as g; open(g.__path__[0] + '/ready', 'w').close()",
    )


INTEGRATION = Integration(
    what="games of a gym", environment=environment, module="little_gym", backend=backend
)
'''


@pytest.fixture(autouse=True)
def bridge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package that offers the scheme `gym`."""
    place = tmp_path / "site"
    info = place / "gym_bridge-1.0.dist-info"
    info.mkdir(parents=True)
    (place / "gym_bridge.py").write_text(BRIDGE)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: gym-bridge\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[envserver.integrations]\ngym = gym_bridge:INTEGRATION\n"
    )
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(place), os.environ.get("PYTHONPATH", "")])
    )


@pytest.mark.thorough
def test_without_its_framework_a_scheme_says_how_to_install_it(tmp_path: Path) -> None:
    said = refused("process", "--env", "gym:hanoi", "--model", "sim", folder=tmp_path)
    assert "gym:hanoi needs the package 'little_gym'" in said
    assert "envserver env install gym:hanoi" in said
    assert "Did you mean 'gym:go'?" in refused("process", "--env", "gim:go", folder=tmp_path)
    assert "gym:NAME" in (listed := run("list", folder=tmp_path)) and "games of a gym" in listed


@pytest.mark.thorough
def test_environments_of_a_framework_share_a_backend(tmp_path: Path, home: Path) -> None:
    for version in (1, 2):
        code = {"little_gym/__init__.py": FRAMEWORK.format(version=version)}
        wheel(tmp_path, "little-gym", code, version=f"{version}.0")
    extra = wheel(tmp_path, "hanoi", {"hanoi.py": ""})
    assert run("env", "install", "gym:hanoi", "--with", extra, folder=tmp_path) == "gym:hanoi\n"
    said = refused("process", "--env", "gym:go", "--model", "sim", folder=tmp_path)
    assert "gym:go is not installed; others of gym are" in said
    assert "gym:go" in run("env", "install", "gym:go", folder=tmp_path)
    said = refused("env", "install", "gym:missing", folder=tmp_path)
    assert "no such game" in said and "Error" not in said and "File" not in said
    assert "installed already" in refused("env", "install", "gym:go", folder=tmp_path)
    assert "little-gym  2.0" in run("env", "list", folder=tmp_path)
    site = next((home / "little-gym" / "venv").glob("lib/python*/site-packages"))
    assert (site / "hanoi.py").exists() and (site / "little_gym" / "ready").exists()

    words = ("--model", "sim", "--env.group_size", "2", "--limit", "1", "--out", "rows.jsonl")
    same = ("--env.ensure_scores_are_not_same", "false")
    done = envserver("process", "--env", "gym:hanoi", *words, *same, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    (group,) = read_jsonl(tmp_path / "rows.jsonl")
    assert group["scores"] == [1.0, 1.0]
    record = home / "little-gym" / "installed.json"
    record.write_text(re.sub(r'"envserver": "[^"]+"', '"envserver": "0.0.1"', record.read_text()))
    mixed = ("--env", "math=1,gym:go=1", "--model", "sim", "--limit", "2", "--out", "mix.jsonl")
    done = envserver("process", *mixed, *same, folder=tmp_path)
    assert done.returncode == 0
    assert "little-gym was installed by envserver 0.0.1" in done.stderr

    run("env", "remove", "gym:go", folder=tmp_path)
    assert "gym:go" not in run("env", "list", folder=tmp_path)
    run("env", "remove", "gym:hanoi", folder=tmp_path)
    assert not list(home.iterdir())
