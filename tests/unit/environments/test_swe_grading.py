"""The reward of a patch: right ones get it, nothing else does, and failures of ours are not 0."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from textwrap import dedent
from typing import Any

import pytest
from envserver_environments.swe import grading, patches
from envserver_environments.swe.env import Swe
from envserver_environments.swe.grading import HiddenTests, Verdict, grade
from envserver_environments.swe.known import PROGRAMS, result_of
from envserver_environments.swe.repositories import limits_of
from envserver_environments.swe.trees import Entry, Tree, make_patch, tree_of
from support.cases import cases_of
from support.swe_scripts import ROMAN, own, swe_of

from envserver import ExecResult, SandboxError, Sandboxes, SandboxSpec, Task

CASES = cases_of(__file__)

pytestmark = pytest.mark.asyncio(loop_scope="module")

LIMITS = limits_of(200.0)  # they need a second; a busy machine is slow


def edited(tree: Tree, **changes: str) -> str:
    """A patch that makes files (`__` for a slash, `_py` at the end) what they are given as."""
    files = {name.replace("__", "/").replace("_py", ".py"): text for name, text in changes.items()}
    return make_patch(tree, tree | {path: Entry(text.encode()) for path, text in files.items()})


async def wrong(swe: Swe, tasks: list[Task]) -> list[tuple[str, str]]:
    """Task and name of the known results whose reward is not where it is said to be."""
    limit = asyncio.Semaphore(4)

    async def one(task: Task, known: Any) -> tuple[str, str] | None:
        async with limit:
            reward = (await swe.score(task, known.result)).reward
        fits = reward is not None and known.least <= reward <= known.most
        return None if fits else (task.id, known.name)

    found = [one(task, known) for task in tasks for known in swe.known_results(task)]
    return [name for name in await asyncio.gather(*found) if name]


@pytest.mark.parametrize("hoisted", [True, False])
async def test_cheats_gain_nothing_where_no_tripwire_sees_them(
    rooms: Sandboxes, monkeypatch: pytest.MonkeyPatch, hoisted: bool
) -> None:
    """Reports are sealed and answers are not there: code need not be recognised."""
    monkeypatch.setattr(grading, "FRAUD", frozenset())
    monkeypatch.setattr(patches, "PROTECTED_NAMES", ())
    monkeypatch.setattr(patches, "PROTECTED_FOLDERS", frozenset({".git"}))
    task = own("lookup-slow").task()
    task.hidden["hoisted"] = hoisted
    known_to_need_protection = {
        "conftest that turns failures into passes", "conftest beside the tests",
        "gold, and a conftest", "gold, and tests that are changed",
    }  # fmt: skip
    assert {name for _, name in await wrong(swe_of(rooms), [task])} <= known_to_need_protection


@pytest.mark.slow
async def test_cheats_gain_nothing_in_any_task(rooms: Sandboxes) -> None:
    swe = swe_of(rooms)
    assert await wrong(swe, list(swe.tasks("train"))) == []


class Broken:
    """Sandboxes in which every program ends in the same way."""

    def __init__(self, result: ExecResult) -> None:
        self._result = result

    @asynccontextmanager
    async def open(self, spec: SandboxSpec) -> AsyncIterator[Any]:
        yield self

    async def run_python(self, code: str, **_: Any) -> ExecResult:
        return self._result


@pytest.mark.parametrize(
    "result",
    [
        ExecResult(exit=None, killed_by="lost"),
        ExecResult(exit=1, stderr=b"ModuleNotFoundError: No module named 'pytest'"),
        ExecResult(exit=None, killed_by="wall"),
        ExecResult(exit=1, stdout=b"0" * 64 + b" 1 -1 ready []\n"),
    ],
)
async def test_a_run_that_never_began_is_no_reward_of_0(result: ExecResult) -> None:
    swe = swe_of(Broken(result))  # type: ignore[arg-type]
    with pytest.raises(SandboxError):
        await swe.score(ROMAN.task(), result_of(ROMAN.gold_patch))


GOLD = "def double(x):\n    return x + x\n"
PYTEST_FILES = {
    "pkg/__init__.py": "",
    "pkg/core.py": "def double(x):\n    return x + x + 1\n",
    "tests/conftest.py": "import pytest\n\n@pytest.fixture\ndef three():\n    return 3\n",
    "tests/helper.py": "FOUR = 4\n",
    "pytest.ini": "[pytest]\naddopts = --no-such-option\n",
}
IDS = {name: f"tests/test_core.py::{name}" for name in (
    "test_double[1]", "test_double[2]", "test_fixture", "test_type", "TestAll::test_zero",
    "test_skipped",
)}  # fmt: skip


def plain_tests(*left_out: str) -> HiddenTests:
    ids = [id_ for name, id_ in IDS.items() if name not in (*left_out, "test_type")]
    gold = edited(tree_of(PYTEST_FILES), pkg__core_py=GOLD)
    return HiddenTests(CASES["pytest_tests"], tuple(ids), (IDS["test_type"],), gold, hoisted=False)


async def plain(rooms: Sandboxes, source: str, *left_out: str) -> Verdict:
    tree = tree_of(PYTEST_FILES)
    tests = plain_tests(*left_out)
    return await grade(tree, edited(tree, pkg__core_py=source), tests, rooms, LIMITS)


async def test_ordinary_tests_of_pytest(rooms: Sandboxes) -> None:
    """Fixtures of the repository's conftest, parameters, classes; not its configuration."""
    verdict = await plain(rooms, GOLD, "test_skipped")
    assert verdict.solved
    assert len(verdict.passed) == 5
    wrong = await plain(rooms, "def double(x):\n    return 2 if x == 1 else 7\n", "test_skipped")
    assert wrong.passed == {IDS["test_double[1]"], IDS["test_type"]}
    # A skipped test has not passed.
    verdict = await plain(rooms, GOLD)
    assert not verdict.solved
    assert IDS["test_skipped"] not in verdict.passed
    # Planted modules come after installed ones.
    tree = tree_of(PYTEST_FILES)
    planted = ("json.py", "src/typing.py", "numpy.py", "msgspec/__init__.py", "src/xml/__init__.py")
    files = dict.fromkeys(planted, "raise SystemExit(0)\n")
    files["pkg/core.py"] = f"import json, msgspec, numpy, typing, xml\n{GOLD}"
    patch = make_patch(tree, tree | tree_of(files))
    assert (await grade(tree, patch, plain_tests("test_skipped"), rooms, LIMITS)).solved


@pytest.mark.parametrize("name", sorted(PROGRAMS))
async def test_ordinary_tests_are_not_fooled(rooms: Sandboxes, name: str) -> None:
    source = PYTEST_FILES["pkg/core.py"] + dedent(PROGRAMS[name])
    assert not (await plain(rooms, source, "test_skipped")).solved


AREA = "import math\n\ndef area(r):\n    return {} * r * r\n"
REPLACING = CASES["replacing"]


@pytest.mark.parametrize("replacing", REPLACING.values(), ids=REPLACING)
async def test_who_replaces_what_tests_import_is_not_paid_unless_gold_does_it(
    rooms: Sandboxes, monkeypatch: pytest.MonkeyPatch, replacing: str
) -> None:
    monkeypatch.setattr(grading, "FRAUD", frozenset())  # whatever words are found in its source
    tree = tree_of({"pkg/__init__.py": "", "pkg/area.py": AREA.format("3")})
    right = AREA.format("math.pi")
    files = {"tests/test_area.py": CASES["area_tests"]["tests/test_area.py"] + "\nimport numpy\n"}

    async def graded(source: str, gold: str) -> Verdict:
        ids = tuple(f"tests/test_area.py::{name}" for name in ("test_area", "TestAll::test_near"))
        tests = HiddenTests(files, ids, (), edited(tree, pkg__area_py=gold), hoisted=False)
        return await grade(tree, edited(tree, pkg__area_py=source), tests, rooms, LIMITS)

    assert (await graded(right, right)).solved
    both = f"{right}\n{replacing}\n"
    verdict = await graded(both, right)
    assert not verdict.solved and verdict.refused == "fraud" and verdict.suspicions["replacing"]
    assert (await graded(both, both)).solved
