"""`swe` from rows of public data sets, with a mirror of their repositories."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from envserver_environments.swe.cheats import result_of
from envserver_environments.swe.env import Swe
from support.swe_scripts import SUBMIT, attempt, bash

from envserver import ConfigError, InputError, Sandboxes


@pytest.fixture
def mirror(tmp_path: Path) -> Path:
    """One repository with two commits: `double` is wrong in the first."""
    place = tmp_path / "mirror" / "acme__tool"
    place.mkdir(parents=True)

    def git(*arguments: str) -> str:
        names = ("-c", "user.name=a", "-c", "user.email=a@b.c")
        command = ["git", "-C", str(place), *names, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "-q")
    for number, body in enumerate(("x + 3", "x + x")):
        files = {
            "tool/__init__.py": "",
            "tool/core.py": f"def double(x):\n    return {body}\n\n\ndef one():\n    return 1\n",
            "tests/test_core.py": OLD_TESTS,
            "setup.py": "raise SystemExit('never run')\n",
        }
        for path, text in files.items():
            (place / path).parent.mkdir(exist_ok=True)
            (place / path).write_text(text)
        git("add", "-A")
        git("commit", "-qm", f"commit {number}")
    return tmp_path / "mirror"


FIX = (
    "diff --git a/tool/core.py b/tool/core.py\n--- a/tool/core.py\n+++ b/tool/core.py\n"
    "@@ -1,2 +1,2 @@\n def double(x):\n-    return x + 3\n+    return x + x\n"
)
BREAK = FIX.replace("-    return x + 3\n+    return x + x", "-    return x + x\n+    return x + 3")
TEST_PATCH = (
    "diff --git a/tests/test_core.py b/tests/test_core.py\n"
    "--- a/tests/test_core.py\n+++ b/tests/test_core.py\n@@ -1,4 +1,7 @@\n"
    "-from tool.core import one\n+from tool.core import double, one\n \n def test_one():\n"
    "     assert one() == 1\n+\n+def test_double():\n+    assert double(7) == 14\n"
)
OLD_TESTS = "from tool.core import one\n\ndef test_one():\n    assert one() == 1\n"
NEW_TESTS = """
from tool.core import double

class TestDouble:
    def test_seven(self):
        assert double(7) == 14
"""


def commits(mirror: Path) -> list[str]:
    command = ["git", "-C", str(mirror / "acme__tool"), "log", "--reverse", "--format=%H"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()


def bench_row(mirror: Path, **changes: Any) -> dict[str, Any]:
    return {
        "instance_id": "acme__tool-1", "repo": "acme/tool", "base_commit": commits(mirror)[0],
        "patch": FIX, "test_patch": TEST_PATCH, "problem_statement": "double(7) is 10.",
        "FAIL_TO_PASS": json.dumps(["tests/test_core.py::test_double"]),
        "PASS_TO_PASS": ["tests/test_core.py::test_one"], **changes,
    }  # fmt: skip


def smith_row(mirror: Path, **changes: Any) -> dict[str, Any]:
    return {
        "repo": f"swesmith/acme__tool.{commits(mirror)[0][:8]}", "image_name": "i",
        "patch": FIX, "problem_statement": "one() is 2",
        "FAIL_TO_PASS": ["tests/test_core.py::test_one"], "PASS_TO_PASS": [], **changes,
    }  # fmt: skip


def r2e_row(mirror: Path, **changes: Any) -> dict[str, Any]:
    content = {"test_file_names": ["test_1.py"], "test_file_codes": [NEW_TESTS]}
    return {
        "repo_name": "tool", "docker_image": "i", "commit_hash": commits(mirror)[1],
        "problem_statement": "[ISSUE] double(7) is 10 [/ISSUE]",
        "execution_result_content": json.dumps(content), "parsed_commit_content": "{}",
        "expected_output_json": json.dumps({"TestDouble.test_seven": "PASSED"}), **changes,
    }  # fmt: skip


def swe_of(rooms: Sandboxes, mirror: Path, **config: Any) -> Swe:
    swe = Swe(Swe.Config(mirror=mirror, **config))
    swe.sandboxes = rooms
    return swe


@pytest.mark.asyncio(loop_scope="module")
async def test_rows_of_swe_bench(rooms: Sandboxes, mirror: Path) -> None:
    swe = swe_of(rooms, mirror)
    task = swe.task_from_row(bench_row(mirror))
    scores = [await swe.score(task, result_of(patch)) for patch in (FIX, "", TEST_PATCH)]
    assert [score.reward for score in scores] == [1.0, 0.0, 0.0]
    assert set(task.public) == {"mirror", "commit", "problem"}
    look = bash("git log --oneline --all; cat tests/test_core.py")
    _, run = await attempt(rooms, "bash", look, SUBMIT, **task.public)
    assert "test_double" not in run.answers[0]
    assert run.answers[0].count("The repository") == 1


@pytest.mark.asyncio(loop_scope="module")
async def test_rows_of_swe_smith(rooms: Sandboxes, mirror: Path) -> None:
    """The patch is the bug; the tests that show it are taken away from the agent."""
    bug = "diff --git a/tool/core.py b/tool/core.py\n--- a/tool/core.py\n+++ b/tool/core.py\n" + (
        "@@ -5,2 +5,2 @@\n def one():\n-    return 1\n+    return 2\n"
    )
    swe = swe_of(rooms, mirror)
    task = swe.task_from_row(smith_row(mirror, patch=bug))
    gold = task.hidden["patch"]
    assert "+    return 1" in gold
    scores = [await swe.score(task, result_of(patch)) for patch in (gold, "", bug)]
    assert [score.reward for score in scores] == [1.0, 0.0, 0.0]
    assert task.public["removed"] == ["tests/test_core.py"]


@pytest.mark.asyncio(loop_scope="module")
async def test_rows_of_r2e(rooms: Sandboxes, mirror: Path) -> None:
    swe = swe_of(rooms, mirror)
    task = swe.task_from_row(r2e_row(mirror))
    assert task.public["commit"] == commits(mirror)[0]
    scores = [await swe.score(task, result_of(patch)) for patch in (task.hidden["patch"], FIX, "")]
    assert [score.reward for score in scores] == [1.0, 1.0, 0.0]


@pytest.mark.asyncio(loop_scope="module")
async def test_rows_of_ones_own(rooms: Sandboxes, mirror: Path) -> None:
    tar = mirror / "repo.tar"
    source, commit = str(mirror / "acme__tool"), commits(mirror)[0]
    subprocess.run(["git", "-C", source, "archive", "-o", str(tar), commit], check=True)
    (mirror / "hidden" / "tests").mkdir(parents=True)
    (mirror / "hidden" / "tests" / "test_new.py").write_text(NEW_TESTS)
    row = bench_row(mirror, repo_archive="repo.tar", hidden_tests="hidden")
    row |= {"FAIL_TO_PASS": ["tests/test_new.py::TestDouble::test_seven"], "base_commit": ""}
    swe = swe_of(rooms, mirror)
    task = swe.task_from_row(row)
    scores = [await swe.score(task, result_of(patch)) for patch in (FIX, "", TEST_PATCH)]
    assert [score.reward for score in scores] == [1.0, 0.0, 0.0]
    with pytest.raises(InputError, match="archive"):
        swe.task_from_row(row | {"repo_archive": "gone.tar"})


@pytest.mark.asyncio(loop_scope="module")
async def test_rows_that_cannot_be_run_are_counted(
    rooms: Sandboxes, mirror: Path, tmp_path: Path
) -> None:
    rows = [
        bench_row(mirror),
        bench_row(mirror, repo="acme/other"),
        bench_row(mirror, base_commit="0" * 40),
        bench_row(mirror, base_commit="--upload-pack=x"),
        bench_row(mirror, patch=BREAK),
        bench_row(mirror, patch="diff --git a/x b/x\nBinary files a/x and b/x differ\n"),
        bench_row(mirror, FAIL_TO_PASS='["test_double (tests.TestCore)"]'),
        bench_row(mirror, FAIL_TO_PASS="[]"),
        bench_row(mirror, problem_statement=""),
        bench_row(mirror, FAIL_TO_PASS=["tests/test_core.py::test_x"]),
        r2e_row(mirror, expected_output_json="{}"),
        {"question": "2 + 2?", "problem_statement": "x"},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + "no json\n")
    swe = swe_of(rooms, mirror, data_set="swe_bench", data_path=path)
    tasks = list(swe.tasks("train"))
    assert [task.id for task in tasks] == ["swe_bench-0"]
    assert dict(swe.dropped) == {
        "Its repository is not in the mirror.": 1,
        "Its commit is not in the mirror.": 1,
        "Its commit is not named by an id.": 1,
        "Its gold patch cannot be applied (conflict).": 1,
        "Its gold patch cannot be applied (binary).": 1,
        "Its tests have no ids of pytest.": 1,
        "FAIL_TO_PASS is empty.": 1,
        "There is no problem statement.": 1,
        "the gold patch does not pass its tests": 1,
        "No test is expected to pass.": 1,
        "The row has an unknown format.": 1,
        "no JSON object": 1,
    }


@pytest.mark.asyncio(loop_scope="module")
async def test_without_a_mirror_it_says_so(tmp_path: Path, mirror: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(bench_row(mirror)) + "\n")
    with pytest.raises(ConfigError, match="mirror"):
        list(Swe(Swe.Config(data_set="swe_bench", data_path=path)).tasks("train"))
    with pytest.raises(InputError, match="mirror"):
        Swe().task_from_row(bench_row(mirror))


# As a whole.
