"""Environments of several files, in every process that imports them."""

import colorsys
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from envserver_records.errors import ConfigError, NotFoundError
from support.cases import cases_of
from support.commands import read_jsonl, rollouts_of, typed
from support.extent import first_of

from envserver.registry import absolute, find

FOLDERS = Path(__file__).parents[1] / "support" / "multi_file"
CASES = cases_of(__file__, "environments_of_several_files.toml")
RIGHT = "--model sim --sim.solve_probability 1 --sim.openers false"
QUICK = (
    f"{RIGHT} --env.group_size 2 --env.ensure_scores_are_not_same false --workers.processes 1"
    " --workers.dedicated 2"
)
ENVIRONMENT = """
from envserver import Environment, Score, Task
{imports}

class Mine(Environment):
    def tasks(self, split):
        yield Task("one", {{"question": str(SHARED)}}, {{}})

    async def rollout(self, task, run):
        return "done"

    def score(self, task, result):
        return Score(reward=1.0)
"""


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def write_environment(path: Path, imports: str) -> str:
    """Writes an environment that imports SHARED; returns its path."""
    return str(write(path, ENVIRONMENT.format(imports=imports)))


def shared(reference: str | Path) -> str:
    """SHARED as the environment sees it."""
    return next(iter(find(str(reference))().tasks("train"))).public["question"]


ABSOLUTE, RELATIVE, RIDDLES = "absolute/my_env.py", "relative/my_env.py", "riddles"


@pytest.mark.parametrize(
    "given",
    [
        *first_of(("Pooled", RIDDLES), ("Pooled", RELATIVE), ("Pooled", ABSOLUTE)),
        *first_of(("Dedicated", RELATIVE), ("Dedicated", RIDDLES), ("Dedicated", ABSOLUTE)),
        *first_of(("Sandboxed", ABSOLUTE), ("Sandboxed", RIDDLES), ("Sandboxed", RELATIVE)),
    ],
    ids="-".join,
)
def test_it_runs_in_every_isolation_and_only_pooled_and_dedicated_agents_can_read_the_grader(
    given: tuple[str, str], tmp_path: Path
) -> None:
    isolation, reference = given
    environment = f"--env {FOLDERS / reference}:{isolation}"
    typed(f"process {environment} {QUICK} --env.total_steps 2 --out groups.jsonl", tmp_path)
    rollouts = rollouts_of(read_jsonl(tmp_path / "groups.jsonl"))
    readable = float(isolation != "Sandboxed")
    assert [(one["reward"], one["metrics"]["read"]) for one in rollouts] == [(1.0, readable)] * 4
    if isolation == "Pooled":  # a rubric, too, imports the modules beside it
        write(tmp_path / "worth.py", "HALF = 0.5\n")
        score = "    def score(self, task, result):\n        return Score(reward=HALF)\n"
        imports = "from envserver import Score\nfrom worth import HALF\n"
        write(tmp_path / "rubric.py", f"{imports}class Half:\n{score}")
        typed(f"rescore groups.jsonl {environment} --rubric rubric.py --out half.jsonl", tmp_path)
        assert {one["reward"] for one in rollouts_of(read_jsonl(tmp_path / "half.jsonl"))} == {0.5}


@pytest.mark.thorough
def test_a_sandboxed_agent_imports_later_only_what_is_preloaded(tmp_path: Path) -> None:
    line = f"process --env {FOLDERS}/absolute/my_env.py:{{}} {QUICK} --env.total_steps 1"
    refused = typed(line.format("Misplaced"), tmp_path, status=1)
    assert "The module 'late' is in" in " ".join((refused.stdout + refused.stderr).split())
    typed(f"{line.format('Preloaded')} --out preloaded.jsonl", tmp_path)


def test_a_folder_of_environments_may_hold_their_helpers(tmp_path: Path) -> None:
    write(tmp_path / "suite" / "common.py", "SHARED = 1")
    write_environment(tmp_path / "suite" / "mine.py", "from common import SHARED")
    write_environment(tmp_path / "suite" / "other.py", "from .common import SHARED")
    done = typed(f"evaluate --env suite {RIGHT} --env.group_size 1 --out report", tmp_path)
    assert "mine-2" in done.stderr


@pytest.mark.parametrize("case", CASES["case"], ids=lambda case: case["what"])
def test_what_an_import_means(case: dict[str, Any], tmp_path: Path) -> None:
    for name, imports in case["environments"].items():
        write_environment(tmp_path / name, imports)
    for name, text in case.get("files", {}).items():
        (tmp_path / name).mkdir() if name[-1] == "/" else write(tmp_path / name, text)
    assert {name: shared(tmp_path / name) for name in case["shows"]} == case["shows"]
    assert len({find(str(tmp_path / name)) for name in case["shows"]}) == len(case["shows"])
    assert "helpers" not in sys.modules
    assert not hasattr(colorsys, "SHARED")


# What the user is told.


@pytest.mark.parametrize(("helpers", "line", "words"), CASES["wrong_helpers"])
def test_helpers_errors_name_a_line(helpers: str, line: int, words: str, tmp_path: Path) -> None:
    write(tmp_path / "helpers.py", helpers)
    reference = write_environment(tmp_path / "mine.py", "from helpers import SHARED")
    with pytest.raises(ConfigError) as caught:
        find(reference)
    assert f"{tmp_path / 'helpers.py'}, line {line}" in caught.value.message
    assert words in caught.value.message
    write(tmp_path / "helpers.py", "SHARED = 'repaired'\n")
    assert shared(reference) == "repaired"


def test_what_is_no_environment_is_told_and_an_installed_name_wins_over_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(NotFoundError, match="no environment in the folder"):
        find(f"{tmp_path}/empty/")
    write_environment(tmp_path / "math" / "env.py", "SHARED = 'folder'")
    with pytest.raises(ConfigError, match="no environment class 'Yours'"):
        find(f"{tmp_path}/math:Yours")
    monkeypatch.chdir(tmp_path)
    assert absolute("math") == "math"
    assert shared(absolute("math/")) == "folder"
    assert absolute("./math:Mine") == f"{tmp_path}/math/:Mine"


def test_no_compiled_file_is_left_beside_the_environment(tmp_path: Path) -> None:
    """Code whose imports were changed must not reach who imports the same file otherwise."""
    write(tmp_path / "helpers.py", "import sub\nSHARED = 1\n")
    write(tmp_path / "sub.py", "")
    assert shared(write_environment(tmp_path / "mine.py", "from helpers import SHARED")) == "1"
    assert not list(tmp_path.rglob("*.pyc"))
    done = subprocess.run([sys.executable, "-c", "import mine"], cwd=tmp_path, check=False)
    assert done.returncode == 0
