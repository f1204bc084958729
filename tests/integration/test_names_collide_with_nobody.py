"""A folder with packages of common names hides none of ours, and none of ours hides them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.commands import ENVSERVER, environment_variables, read_jsonl

BUILT_INS = {"code", "gaia", "math", "mhqa", "router", "scenarios", "swe", "tau", "video"}
PROJECT = Path(__file__).parents[2]
USERS_ENVIRONMENT = """
from clients import CLIENT
from envserver import Environment, Score, Task
from environments import ENVIRONMENT
from tools import TOOL


class Mine(Environment):
    def tasks(self, split):
        yield Task("one", {"question": TOOL + ENVIRONMENT + CLIENT}, {})

    async def rollout(self, task, run):
        return task.public["question"]

    def score(self, task, result):
        return Score(reward=float(result.output == "my tool, my environment, my client"))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A user's folder, with packages that have the names of our folders."""
    for name, line in (
        ("tools", "TOOL = 'my tool, '"),
        ("environments", "ENVIRONMENT = 'my environment, '"),
        ("clients", "CLIENT = 'my client'"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(line + "\n")
    (tmp_path / "mine.py").write_text(USERS_ENVIRONMENT)
    return tmp_path


def run_in(folder: Path, *words: object, path: str = "") -> subprocess.CompletedProcess[str]:
    variables = environment_variables() | ({"PYTHONPATH": path} if path else {})
    return subprocess.run(
        [*map(str, words)],
        cwd=folder, env=variables, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("program", [(ENVSERVER,), (sys.executable, "-m", "envserver")])
@pytest.mark.parametrize("path", ["", "."])
def test_all_built_ins_are_listed(program: tuple[object, ...], path: str, folder: Path) -> None:
    done = run_in(folder, *program, "list", path=path)
    assert done.returncode == 0, done.stderr
    output = done.stdout + done.stderr
    assert all(name in output for name in BUILT_INS)
    assert "cannot be" not in output


@pytest.mark.parametrize("program", [(ENVSERVER,), (sys.executable, "-m", "envserver")])
def test_a_built_in_runs(program: tuple[object, ...], folder: Path) -> None:
    done = run_in(
        folder, *program, "process", "--env", "math", "--model", "sim", "--env.total_steps", 1,
        "--env.ensure_scores_are_not_same", "false", "--env.data_path_to_save_groups", "out.jsonl",
        path=".",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert len(read_jsonl(folder / "out.jsonl")) == 1


@pytest.mark.parametrize("path", ["", "."])
def test_an_environment_gets_the_users_packages(path: str, folder: Path) -> None:
    done = run_in(
        folder, ENVSERVER, "process", "--env", "mine.py", "--model", "sim",
        "--env.ensure_scores_are_not_same", "false", "--env.data_path_to_save_groups", "out.jsonl",
        path=path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert set(read_jsonl(folder / "out.jsonl")[0]["scores"]) == {1.0}


@pytest.mark.parametrize(
    "module", ["environments.math", "environments.smolagents_integration.smolagents_env"]
)
def test_modules_run_in_a_checkout_under_their_short_names(module: str) -> None:
    """Help names the program as it was typed."""
    done = run_in(PROJECT, sys.executable, "-m", module, "--help")
    assert done.returncode == 0, done.stderr
    assert f"Usage: python -m {module} COMMAND" in done.stdout


def test_help_names_the_installed_module(folder: Path) -> None:
    done = run_in(folder, sys.executable, "-m", "envserver_environments.math", "--help")
    assert "Usage: python -m envserver_environments.math COMMAND" in done.stdout
