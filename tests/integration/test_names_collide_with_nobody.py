"""A folder with packages of common names hides none of ours, and none of ours hides them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_notebook
from support.commands import ENVSERVER, environment_variables, read_jsonl
from support.extent import first_of
from support.waiting import PATIENCE

BUILT_INS = [
    "code",
    "gaia",
    "kuhn",
    "math",
    "mhqa",
    "proposer_solver",
    "router",
    "scenarios",
    "swe",
    "tau",
    "twenty_questions",
    "video",
]
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

IMPORTS = """
import clients
import envserver
import envserver_clients
import envserver_environments
import envserver_tools
import environments
import tools
"""
RUN = """
settings = {"total_steps": 1, "ensure_scores_are_not_same": False}
made = [envserver.process(name, model="sim", env=settings) for name in ("math", "mine.py")]
[len(result.groups) for result in made], tools.TOOL
"""
USERS_TEST = f"""{IMPORTS}

def test_mine_and_theirs():
    {RUN.strip().replace(chr(10), chr(10) + "    ")}
    assert {{len(result.groups) for result in made}} == {{1}}
    assert tools.TOOL == "my tool, "
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
    for place in ("mine.py", "environments/mine.py"):
        (tmp_path / place).write_text(USERS_ENVIRONMENT)
    (tmp_path / "test_mine.py").write_text(USERS_TEST)
    return tmp_path


def run_in(folder: Path, *words: object, path: str = "") -> subprocess.CompletedProcess[str]:
    variables = environment_variables() | ({"PYTHONPATH": path} if path else {})
    return subprocess.run(
        [*map(str, words)],
        cwd=folder, env=variables, capture_output=True, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize("program", [(ENVSERVER,), (sys.executable, "-m", "envserver")])
@pytest.mark.parametrize("path", [".", ""])
def test_all_built_ins_are_listed(program: tuple[object, ...], path: str, folder: Path) -> None:
    done = run_in(folder, *program, "list", path=path)
    assert done.returncode == 0, done.stderr
    output = done.stdout + done.stderr
    assert all(name in output for name in BUILT_INS)
    assert "cannot be" not in output


@pytest.mark.thorough
@pytest.mark.parametrize("program", [(sys.executable, "-m", "envserver"), (ENVSERVER,)])
def test_a_built_in_runs(program: tuple[object, ...], folder: Path) -> None:
    done = run_in(
        folder, *program, "process", "--env", "math", "--model", "sim", "--env.total_steps", 1,
        "--env.ensure_scores_are_not_same", "false", "--env.data_path_to_save_groups", "out.jsonl",
        path=".",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert len(read_jsonl(folder / "out.jsonl")) == 1


@pytest.mark.parametrize(
    "place", first_of(("environments/mine.py", ""), ("mine.py", ""), ("mine.py", "."))
)
def test_an_environment_gets_the_users_packages(place: tuple[str, str], folder: Path) -> None:
    file, path = place
    done = run_in(
        folder, ENVSERVER, "process", "--env", file, "--model", "sim",
        "--env.ensure_scores_are_not_same", "false", "--env.data_path_to_save_groups", "out.jsonl",
        path=path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert set(read_jsonl(folder / "out.jsonl")[0]["scores"]) == {1.0}


@pytest.mark.thorough
def test_a_users_tests_import_both(folder: Path) -> None:
    done = run_in(folder, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider")
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout


@pytest.mark.thorough
def test_a_notebook_imports_both(folder: Path) -> None:
    notebook = new_notebook(cells=[new_code_cell(IMPORTS + RUN)])
    NotebookClient(
        notebook, timeout=PATIENCE, resources={"metadata": {"path": str(folder)}}
    ).execute()
    (shown,) = notebook.cells[0].outputs
    assert shown["data"]["text/plain"] == "([1, 1], 'my tool, ')"


@pytest.mark.parametrize(
    "module",
    first_of("environments.math", "environments.smolagents_integration.smolagents_env"),
)
def test_modules_run_in_a_checkout_under_their_short_names(module: str) -> None:
    """Help names the program as it was typed."""
    done = run_in(PROJECT, sys.executable, "-m", module, "--help")
    assert done.returncode == 0, done.stderr
    assert f"Usage: python -m {module} COMMAND" in done.stdout


def test_help_names_the_installed_module(folder: Path) -> None:
    done = run_in(folder, sys.executable, "-m", "envserver_environments.math", "--help")
    assert "Usage: python -m envserver_environments.math COMMAND" in done.stdout
