"""Environments of several files, in every process that imports them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest
from envserver_clients.http import SyncEnvClient
from envserver_records.errors import ConfigError, NotFoundError
from support.commands import envserver, free_port, read_jsonl, running
from support.extent import first_of
from support.waiting import PATIENCE

from envserver.registry import absolute, find

FOLDERS = Path(__file__).parents[1] / "support" / "multi_file"
RIGHT = ("--model", "sim", "--sim.solve_probability", 1, "--sim.openers", "false")
QUICK = (
    *RIGHT, "--env.group_size", 2, "--env.ensure_scores_are_not_same", "false",
    "--workers.processes", 1, "--workers.dedicated", 2,
)  # fmt: skip
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


def write_environment(folder: Path, imports: str, name: str = "mine.py", **files: str) -> str:
    """Writes an environment that imports SHARED, and modules beside it; returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(ENVIRONMENT.format(imports=imports))
    for stem, text in files.items():
        path = folder / f"{stem.replace('__', '/')}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return str(folder / name)


def shared(reference: str) -> str:
    """SHARED as the environment sees it."""
    return next(iter(find(reference)().tasks("train"))).public["question"]


def rollouts_of(path: Path) -> list[dict[str, Any]]:
    return [rollout for group in read_jsonl(path) for rollout in group["envserver"]["rollouts"]]


ABSOLUTE, RELATIVE, RIDDLES = "absolute/my_env.py", "relative/my_env.py", "riddles"


@pytest.mark.parametrize(
    "given",
    [
        *first_of(("Pooled", ABSOLUTE), ("Pooled", RELATIVE), ("Pooled", RIDDLES)),
        *first_of(("Dedicated", RELATIVE), ("Dedicated", RIDDLES), ("Dedicated", ABSOLUTE)),
        *first_of(("Sandboxed", RIDDLES), ("Sandboxed", ABSOLUTE), ("Sandboxed", RELATIVE)),
    ],
    ids="-".join,
)
def test_it_runs_in_every_isolation_and_only_pooled_and_dedicated_agents_can_read_the_grader(
    given: tuple[str, str], tmp_path: Path
) -> None:
    isolation, reference = given
    done = envserver(
        *("process", "--env", f"{FOLDERS / reference}:{isolation}", *QUICK),
        *("--env.total_steps", 2, "--env.data_path_to_save_groups", "groups.jsonl"),
        folder=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    rollouts = rollouts_of(tmp_path / "groups.jsonl")
    assert len(rollouts) == 4
    assert {rollout["reward"] for rollout in rollouts} == {1.0}
    readable = float(isolation != "Sandboxed")
    assert {rollout["metrics"]["read"] for rollout in rollouts} == {readable}


@pytest.mark.thorough
def test_a_sandboxed_agent_imports_later_only_what_is_preloaded(tmp_path: Path) -> None:
    outputs = {}
    for name in ("Misplaced", "Preloaded"):
        done = envserver(
            *("process", "--env", f"{FOLDERS}/absolute/my_env.py:{name}", *QUICK),
            *("--env.total_steps", 1, "--env.data_path_to_save_groups", f"{name}.jsonl"),
            folder=tmp_path,
        )
        outputs[name] = done.returncode, done.stdout + done.stderr
    status, text = outputs["Misplaced"]
    assert status == 1
    assert "The module 'late' is in" in " ".join(text.split())
    assert outputs["Preloaded"][0] == 0, outputs["Preloaded"][1]


@pytest.mark.parametrize(
    ("reference", "task", "answer"),
    [("absolute/my_env.py", "add-1", "8"), ("riddles", "riddle-1", "a towel")],
)
def test_given_answers_are_scored(reference: str, task: str, answer: str, tmp_path: Path) -> None:
    rows = [{"task": task, "response": answer}, {"task": task, "response": "wrong"}]
    (tmp_path / "rows.jsonl").write_bytes(b"\n".join(map(orjson.dumps, rows)))
    done = envserver(
        *("score", "--env", f"{FOLDERS / reference}:Pooled", "--processes", 1),
        *("--input", "rows.jsonl", "--output", "scores.jsonl"),
        folder=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert [row["reward"] for row in read_jsonl(tmp_path / "scores.jsonl")] == [1.0, 0.0]


@pytest.mark.thorough
def test_another_machine_joins_with_it(tmp_path: Path) -> None:
    """The server does not have the files."""
    server_folder, joiner_folder = tmp_path / "server", tmp_path / "joiner"
    server_folder.mkdir()
    joiner_folder.mkdir()
    shutil.copytree(FOLDERS / "riddles", joiner_folder / "riddles")
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with running("run-api", "--port", port, "--store", "groups.db", folder=server_folder) as server:
        server.wait_for("Trainers and environments")
        joiner = running("join", url, "--env", "riddles:Sandboxed", *QUICK, folder=joiner_folder)
        with joiner, SyncEnvClient(url, run="trainer", batch_size=2) as client:
            batch = next(client.batches(whole=False, idle_seconds=PATIENCE))
            rewards = [row.reward for row in batch.rows]
            assert set(rewards) == {1.0}


def test_a_rubric_imports_the_modules_beside_it(tmp_path: Path) -> None:
    reference = f"{FOLDERS / 'riddles'}:Pooled"
    done = envserver(
        *("process", "--env", reference, *QUICK, "--env.total_steps", 1),
        *("--env.data_path_to_save_groups", "groups.jsonl"),
        folder=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    (tmp_path / "worth.py").write_text("HALF = 0.5\n")
    (tmp_path / "rubric.py").write_text(
        "from envserver import Score\nfrom worth import HALF\n"
        "class Half:\n    def score(self, task, result):\n        return Score(reward=HALF)\n"
    )
    done = envserver(
        *("rescore", "groups.jsonl", "--env", reference, "--rubric", "rubric.py"),
        *("--out", "half.jsonl"),
        folder=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert {rollout["reward"] for rollout in rollouts_of(tmp_path / "half.jsonl")} == {0.5}


def test_a_folder_of_environments_may_hold_their_helpers(tmp_path: Path) -> None:
    write_environment(tmp_path / "suite", "from common import SHARED", common="SHARED = 1")
    write_environment(tmp_path / "suite", "from .common import SHARED", name="other.py")
    done = envserver(
        *("evaluate", "--env", "suite", *RIGHT, "--env.group_size", 1, "--out", "report"),
        folder=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "mine-2" in done.stderr


# What an import means.


def test_files_of_one_name_in_different_folders_do_not_mix(tmp_path: Path) -> None:
    references = [
        write_environment(
            tmp_path / name, "from helpers import SHARED", helpers=f"SHARED = {name!r}"
        )
        for name in ("left", "right")
    ]
    assert [shared(reference) for reference in references] == ["left", "right"]
    assert find(references[0]) is not find(references[1])
    assert "helpers" not in sys.modules


def test_own_modules_come_before_the_standard_library_for_own_files_only(tmp_path: Path) -> None:
    reference = write_environment(
        tmp_path,
        "from colorsys import SHARED\nimport fractions",
        colorsys="SHARED = 'mine'\nimport colorsys as standard\nassert standard.rgb_to_hsv\n",
    )
    assert shared(reference) == "mine"
    import colorsys

    assert not hasattr(colorsys, "SHARED")


def test_in_a_package_the_standard_library_comes_before_its_modules(tmp_path: Path) -> None:
    """As in any Python package."""
    reference = write_environment(
        tmp_path / "package",
        "import json\nfrom .json import MINE\nfrom shared import VALUE\n"
        "import package.json\nSHARED = json.dumps([MINE, VALUE, package.json.MINE])",
        name="env.py",
        __init____="",
        json="MINE = 1\n",
        shared="VALUE = 2\n",
    )
    (tmp_path / "package" / "__init__.py").touch()
    assert shared(str(Path(reference).parent)) == "[1, 2, 1]"


def test_an_environment_named_like_a_module_imports_that_module(tmp_path: Path) -> None:
    reference = write_environment(
        tmp_path, "import colorsys\nSHARED = colorsys.ONE_THIRD", name="colorsys.py"
    )
    assert shared(reference).startswith("0.33")


def test_a_folder_of_data_does_not_hide_a_library(tmp_path: Path) -> None:
    (tmp_path / "numpy").mkdir()
    reference = write_environment(tmp_path, "import numpy\nSHARED = numpy.float64(1)")
    assert shared(reference) == "1.0"


@pytest.mark.parametrize(
    ("imports", "value"),
    [
        ("import parts\nimport parts.more\nSHARED = parts.more.SHARED", "more"),
        ("import parts.more as more\nSHARED = more.SHARED", "more"),
        ("from parts import more\nSHARED = more.SHARED", "more"),
        ("from parts.more import *", "more"),
        (
            "def value():\n    from parts.more import SHARED\n    return SHARED\nSHARED = value()",
            "more",
        ),
        ("import os, parts.more as more, sys\nSHARED = more.SHARED", "more"),
    ],
)
def test_every_form_of_import_finds_the_modules_beside_it(
    imports: str, value: str, tmp_path: Path
) -> None:
    reference = write_environment(tmp_path, imports, parts__more="SHARED = 'more'\n")
    assert shared(reference) == value


def test_an_environment_in_a_package_imports_from_the_folder_above(tmp_path: Path) -> None:
    reference = write_environment(
        tmp_path / "outer" / "inner", "from ..common import SHARED", name="env.py"
    )
    for folder in ("outer", "outer/inner"):
        (tmp_path / folder / "__init__.py").touch()
    (tmp_path / "outer" / "common.py").write_text("SHARED = 'above'\n")
    assert shared(reference) == "above"


def test_an_environment_in_a_package_imports_the_packages_beside_it(tmp_path: Path) -> None:
    imports = "import toolbox_.calc\nfrom rules_ import RULE\nSHARED = toolbox_.calc.TOOL + RULE"
    reference = write_environment(tmp_path / "mine_", imports)
    for package, text in (
        ("mine_", ""),
        ("toolbox_", ""),
        ("rules_", "from toolbox_.calc import TOOL as RULE\n"),
    ):
        (tmp_path / package).mkdir(exist_ok=True)
        (tmp_path / package / "__init__.py").write_text(text)
    (tmp_path / "toolbox_" / "calc.py").write_text("TOOL = 'tool '\n")
    assert shared(reference) == "tool tool "


def test_an_installed_package_comes_before_a_package_beside_it(tmp_path: Path) -> None:
    reference = write_environment(tmp_path / "mine_", "from orjson import loads as SHARED")
    for package in ("mine_", "orjson"):
        (tmp_path / package).mkdir(exist_ok=True)
        (tmp_path / package / "__init__.py").write_text("loads = 'mine'\n")
    assert shared(reference) == str(orjson.loads)


def test_a_file_and_a_folder_of_one_name_are_two_environments(tmp_path: Path) -> None:
    file = write_environment(tmp_path, "SHARED = 'file'", name="riddle.py")
    folder = write_environment(tmp_path / "riddle", "SHARED = 'folder'", name="env.py")
    for package in (tmp_path, tmp_path / "riddle"):
        (package / "__init__.py").touch()
    assert [shared(file), shared(folder)] == ["file", "folder"]


def test_links_to_one_folder_lead_to_the_same_modules(tmp_path: Path) -> None:
    reference = write_environment(tmp_path / "real", "SHARED = 1")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert find(reference).__module__ == find(str(tmp_path / "link" / "mine.py")).__module__


# What the user is told.


@pytest.mark.parametrize(
    ("helpers", "line", "words"),
    [
        ("SHARED = 1\nif True\n    pass\n", 2, "SyntaxError: expected ':'"),
        ("SHARED = 1\n\nSHARED.missing\n", 3, "AttributeError"),
        ("import no_such_module\n", 1, "No module named 'no_such_module'"),
        ("import sys\nsys.exit(3)\n", 2, "SystemExit: 3"),
    ],
)
def test_an_error_in_a_helper_names_its_file_and_line(
    helpers: str, line: int, words: str, tmp_path: Path
) -> None:
    reference = write_environment(tmp_path, "from helpers import SHARED", helpers=helpers)
    with pytest.raises(ConfigError) as caught:
        find(reference)
    assert f"{tmp_path / 'helpers.py'}, line {line}" in caught.value.message
    assert words in caught.value.message
    (tmp_path / "helpers.py").write_text("SHARED = 'repaired'\n")
    assert shared(reference) == "repaired"


def test_the_command_names_the_file_and_line_of_a_syntax_error(tmp_path: Path) -> None:
    write_environment(tmp_path, "from helpers import SHARED", helpers="def broken(:\n")
    done = envserver("process", "--env", "mine.py", "--model", "sim", folder=tmp_path)
    assert done.returncode == 2
    assert "helpers.py, line 1: SyntaxError" in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


def test_what_is_no_environment_is_told(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(NotFoundError, match="no environment in the folder"):
        find(f"{tmp_path}/empty/")
    write_environment(tmp_path / "mine", "SHARED = 1", name="env.py")
    with pytest.raises(ConfigError, match="no environment class 'Yours'"):
        find(f"{tmp_path}/mine:Yours")


def test_an_installed_name_wins_over_a_folder_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_environment(tmp_path / "math", "SHARED = 'folder'", name="env.py")
    monkeypatch.chdir(tmp_path)
    assert absolute("math") == "math"
    assert shared(absolute("math/")) == "folder"
    assert absolute("./math:Mine") == f"{tmp_path}/math/:Mine"


def test_no_compiled_file_is_left_beside_the_environment(tmp_path: Path) -> None:
    """Code whose imports were changed must not reach who imports the same file otherwise."""
    write_environment(tmp_path, "from helpers import SHARED", helpers="import sub\nSHARED = 1\n")
    (tmp_path / "sub.py").touch()
    assert shared(str(tmp_path / "mine.py")) == "1"
    assert not list(tmp_path.rglob("*.pyc"))
    done = subprocess.run([sys.executable, "-c", "import mine"], cwd=tmp_path, check=False)
    assert done.returncode == 0
