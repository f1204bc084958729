"""`swe`: tasks in folders, patches of unusual forms, tests that are not run, answers to score."""

from __future__ import annotations

import asyncio
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
from envserver_environments.swe.cheats import PROGRAMS, result_of
from envserver_environments.swe.env import Swe
from envserver_environments.swe.trees import make_patch, tree_of
from envserver_environments.swe.tripwires import FRAUD, added_suspicions
from support.commands import envserver, read_jsonl

from envserver import InputError, Sandboxes, Task

WRONG = "def double(x):\n    return x + 3\n\n\ndef one():\n    return 1\n"
RIGHT = WRONG.replace("x + 3", "x + x")
FILES = {"tool/__init__.py": "", "tool/core.py": WRONG, "tool/text.py": "A = 1\r\n", "notes": "n\n"}
HIDDEN = """
import asyncio
import unittest

import pytest
from tool.core import double, one


@pytest.mark.parametrize("x", [4, 7])
def test_double(x):
    assert double(x) == 2 * x


class TestDouble(unittest.TestCase):
    def test_seven(self):
        self.assertEqual(double(7), 14)


class TestLater(unittest.IsolatedAsyncioTestCase):
    async def test_later(self):
        await asyncio.sleep(0)
        self.assertEqual(double(8), 16)


class TestPlain:
    def test_seven(self, tmp_path):
        for x in (1, 7):
            assert double(x) == x + x


def test_one():
    assert one() == 1
"""
FAIL = [
    "test_double[4]", "test_double[7]", "TestDouble::test_seven", "TestLater::test_later",
    "TestPlain::test_seven",
]  # fmt: skip


def patch(new: dict[str, str], removed: tuple[str, ...] = ()) -> str:
    tree = {p: e for p, e in tree_of({**FILES, **new}).items() if p not in removed}
    return make_patch(tree_of(FILES), tree)


GOLD = patch({"tool/core.py": RIGHT})


def write_task(folder: Path, **changes: Any) -> Path:
    """A folder with a task as it is documented."""
    (folder / "hidden" / "tests").mkdir(parents=True)
    (folder / "hidden" / "tests" / "test_core.py").write_text(HIDDEN)
    with tarfile.open(folder / "repo.tar", "w") as tar:
        for path, text in FILES.items():
            info = tarfile.TarInfo(f"./{path}")
            info.size = len(text.encode())
            tar.addfile(info, io.BytesIO(text.encode()))
    row = {
        "instance_id": "acme__tool-1", "repo": "acme/tool", "base_commit": "0" * 40,
        "problem_statement": "double(7) is 10.", "patch": GOLD, "test_patch": "",
        "FAIL_TO_PASS": json.dumps([f"tests/test_core.py::{name}" for name in FAIL]),
        "PASS_TO_PASS": '["tests/test_core.py::test_one"]', "repo_archive": "repo.tar",
        "hidden_tests": "hidden", "test_cmd": ["false"], "wall": 20, "python": ">=3.10",
        "requires": ["pytest>=7"], "protected": ["notes", "docs/**"], **changes,
    }  # fmt: skip
    (folder / "task.json").write_text(json.dumps(row))
    return folder


def tasks_of(rooms: Sandboxes, path: Path) -> tuple[Swe, list[Task]]:
    swe = Swe(Swe.Config(data_set="swe_bench", data_path=path))
    swe.sandboxes = rooms
    return swe, list(swe.tasks("train"))


async def rewards(swe: Swe, task: Task, patches: dict[str, str]) -> dict[str, float | None]:
    scores = await asyncio.gather(*(swe.score(task, result_of(text)) for text in patches.values()))
    return {name: score.reward for name, score in zip(patches, scores, strict=True)}


@pytest.mark.asyncio(loop_scope="module")
async def test_folders_with_tasks_are_read_and_graded(rooms: Sandboxes, tmp_path: Path) -> None:
    swe, (task,) = tasks_of(rooms, write_task(tmp_path / "a"))
    assert set(task.public) == {"archive", "problem"}
    assert (task.hidden["seconds"], task.hidden["protected"]) == (20.0, ["notes", "docs/**"])
    both = patch({"tool/core.py": RIGHT, "notes": "mine\n", "docs/a/b.md": "x\n"})
    score = await swe.score(task, result_of(both))
    assert (score.reward, score.metrics["changes_dropped"]) == (1.0, 2.0)
    assert (await swe.score(task, result_of(patch({"notes": "m\n"})))).reward == 0.0
    changes: list[dict[str, Any]] = [
        {}, {"python": ">=9.1"}, {"requires": ["no-such-package"]},
        {"repo_archive": "../a/repo.tar"}, {"hidden_tests": "nothing"},
        {"FAIL_TO_PASS": "[]"}, {"protected": "notes"},
    ]  # fmt: skip
    for number, change in enumerate(changes):
        write_task(tmp_path / "many" / f"t{number}", **change)
    (tmp_path / "many" / "broken").mkdir()
    (tmp_path / "many" / "broken" / "task.json").write_text("{")
    swe, tasks = tasks_of(rooms, tmp_path / "many")
    assert len(tasks) == 1
    assert swe.dropped.total() == len(changes)
    assert swe.dropped["A file of the task is outside of its folder."] == 1


PROSE = "I fixed it.\n\n"
FORMS: dict[str, str] = {
    "no newline at its end": GOLD.rstrip("\n"),
    "no prefixes": GOLD.replace(" a/", " ").replace(" b/", " "),
    "Windows line ends": GOLD.replace("\n", "\r\n"),
    "text around": f"{PROSE}{GOLD}\nAll tests pass.\n",
    "a fence": f"{PROSE}```diff\n{GOLD}```\nDone.",
    "format-patch": f"From 1\nSubject: x\n\n---\n tool/core.py | 2 +-\n\n{GOLD}-- \n2.39.5\n",
    "times": GOLD.replace("--- a/tool/core.py", "--- a/tool/core.py\t2024-01-01 00:00:00"),
    "visible tests": patch({"tool/core.py": RIGHT, "tests/test_core.py": "def test_x(): pass\n"}),
    "a file with Windows line ends": patch(
        {"tool/core.py": RIGHT, "tool/text.py": "A = 2\r\nB = 3\r\n"}),
    "no newline at a file's end": patch({"tool/core.py": RIGHT.rstrip("\n")}),
    "a new module": patch(
        {"tool/core.py": "from ._impl import double\n\n\ndef one():\n    return 1\n",
         "tool/_impl.py": "def double(x):\n    return x * 2\n"}),
    "a module that becomes a package": patch(
        {"tool/core/__init__.py": "from .sub.deep import double, one\n",
         "tool/core/sub/__init__.py": "",
         "tool/core/sub/deep.py": "from ...text import A\n" + RIGHT}, ("tool/core.py",)),
    "a rename": "diff --git a/tool/text.py b/tool/words.py\nsimilarity index 100%\n"
    f"rename from tool/text.py\nrename to tool/words.py\n{GOLD}",
    "a comparison of its own": patch({"tool/core.py": RIGHT + "\n\nclass P:\n"
    "    def __eq__(self, other):\n        return isinstance(other, P)\n"}),
    "prints, warnings, logs": patch({"tool/core.py": RIGHT + "\nimport logging, warnings\n"
    "print('hi')\nwarnings.warn('w')\nlogging.error('e')\n"
    "if __name__ == '__main__':\n    exit(1)\n"}),
}  # fmt: skip


@pytest.mark.asyncio(loop_scope="module")
async def test_honest_patches_are_rewarded_in_any_form(rooms: Sandboxes, tmp_path: Path) -> None:
    swe, (task,) = tasks_of(rooms, write_task(tmp_path))
    assert await rewards(swe, task, FORMS) == dict.fromkeys(FORMS, 1.0)
    thoughts = f"<think>\n{patch({'notes': 'x'})}</think>\n{FORMS['a fence']}"
    assert (await swe.score(task, swe.response_from_row(thoughts, []))).reward == 1.0
    unfinished = swe.response_from_row(f"<think>{GOLD}", [])
    assert (await swe.score(task, unfinished)).reward == 0.0


@pytest.mark.asyncio(loop_scope="module")
async def test_no_cheat_is_rewarded_where_tests_are_ordinary(
    rooms: Sandboxes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also without the search for suspicious code."""
    swe, (task,) = tasks_of(rooms, write_task(tmp_path))
    monkeypatch.setattr("envserver_environments.swe.grading.FRAUD", frozenset())
    names = (
        "tests that are not run", "tests found among all classes", "a patched report, disguised",
        "assertions of unittest that hold", "numbers beyond what is written", "a patched call",
        "exit status at the end", "a skip in each call", "a child that goes on",
    )  # fmt: skip
    programs = {n: patch({"tool/core.py": f"{WRONG}\n{_dedented(n)}"}) for n in names}
    assert await rewards(swe, task, programs) == dict.fromkeys(names, 0.0)


def _dedented(name: str) -> str:
    lines = PROGRAMS[name].strip("\n").split("\n")
    return "\n".join(line.removeprefix(" " * 8) for line in lines) + "\n"


@pytest.mark.parametrize(
    ("added", "fraud"),
    [
        ("class A:\n    def __eq__(self, other): return self is self", True),
        ("class A:\n    def __eq__(self, other): return other == other", True),
        ("A = type('A', (), {'__eq__': lambda s, o: bool(s)})", True),
        ("class A:\n    __eq__ = lambda s, o: bool(s)", True),
        ("x = getattr(y, '__co' + 'de__')", True),
        ("x = getattr(y, f\"{'f_'}{'back'}\")", True),
        ("m = __import__('unit' + 'test')", True),
        ("import traceback\nx = traceback.extract_stack()", True),
        ("import warnings\nwarnings.warn('old', DeprecationWarning, stacklevel=2)", False),
        ("class A:\n    def __eq__(self, other): return self.x == other.x", False),
        ("class A:\n    def __lt__(self, other): return NotImplemented if other else False", False),
        ("text = 'a' + 'b' + f'{1}'", False),
    ],
)
def test_what_suspicious_code_is(added: str, fraud: bool) -> None:
    found = added_suspicions(tree_of({}), tree_of({"a.py": added}))
    assert bool(found.keys() & FRAUD) is fraud


def test_answers_to_rows_are_scored_by_the_command(tmp_path: Path) -> None:
    write_task(tmp_path / "mirror")
    row = json.loads((tmp_path / "mirror" / "task.json").read_text())
    roman = next(task for task in Swe().tasks("train") if task.id == "swe-roman-subtractive")
    rows = [
        {"task": roman.id, "response": f"So:\n```diff\n{roman.hidden['patch']}```"},
        {"task": roman.id, "response": "I would change roman.py."},
        {"task": row, "response": GOLD},
        {"task": row, "messages": [{"role": "user", "content": "?"},
                                   {"role": "assistant", "content": GOLD}]},
    ]  # fmt: skip
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = "score --env swe --env.mirror mirror --input rows.jsonl --out scores.jsonl"
    ran = envserver(*words.split(), folder=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert [row["reward"] for row in read_jsonl(tmp_path / "scores.jsonl")] == [1.0, 0.0, 1.0, 1.0]


def test_a_row_cannot_name_files_outside_of_its_folder(tmp_path: Path) -> None:
    write_task(tmp_path / "a")
    row = json.loads((tmp_path / "a" / "task.json").read_text())
    swe = Swe(Swe.Config(mirror=tmp_path / "a"))
    assert swe.task_from_row(row).hidden["fail_to_pass"]
    for name in ("../b/repo.tar", "/etc/passwd"):
        with pytest.raises(InputError, match="outside"):
            swe.task_from_row({**row, "repo_archive": name})
