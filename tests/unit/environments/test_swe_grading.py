"""The reward of a patch: right ones get it, nothing else does, and failures of ours are not 0."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from textwrap import dedent
from typing import Any

import pytest
import pytest_asyncio
from envserver_environments.swe import grading
from envserver_environments.swe.cheats import PROGRAMS, result_of
from envserver_environments.swe.env import Swe
from envserver_environments.swe.grading import HiddenTests, Verdict, grade
from envserver_environments.swe.repositories import limits_of
from envserver_environments.swe.sample import SampleTask, hidden_tests, sample_tasks
from envserver_environments.swe.trees import Entry, Tree, make_patch, tree_of
from support.sandboxes import sandboxes

from envserver import (
    ExecResult,
    KnownResult,
    SandboxError,
    Sandboxes,
    SandboxSpec,
    Score,
    Task,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

LIMITS = limits_of(20.0)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def rooms() -> AsyncIterator[Sandboxes]:
    async with sandboxes() as opened:
        yield opened


def environment(rooms: Sandboxes, **config: Any) -> Swe:
    swe = Swe(Swe.Config(**config))
    swe.sandboxes = rooms
    return swe


def own(name: str) -> SampleTask:
    return next(task for task in sample_tasks() if task.name == name)


def edited(tree: Tree, **changes: str) -> str:
    """A patch that makes files (`__` for a slash, `_py` at the end) what they are given as."""
    files = {name.replace("__", "/").replace("_py", ".py"): text for name, text in changes.items()}
    return make_patch(tree, tree | {path: Entry(text.encode()) for path, text in files.items()})


@pytest.mark.thorough
async def test_the_gold_patches_and_only_they_solve_our_tasks(rooms: Sandboxes) -> None:
    async def check(task: SampleTask) -> None:
        tests = hidden_tests(task.task().hidden)
        nothing = edited(task.tree, NOTES="nothing\n")
        before = await grade(task.tree, nothing, tests, rooms, LIMITS)
        after = await grade(task.tree, task.gold_patch, tests, rooms, LIMITS)
        assert before.passed == set(tests.pass_to_pass), task.name
        assert (before.solved, before.tampered) == (False, ""), task.name
        assert after.solved, task.name
        assert after.passed == set(tests.ids), task.name
        assert tests.fail_to_pass, task.name

    tasks = sample_tasks()
    assert len(tasks) == 20
    await asyncio.gather(*map(check, tasks))


async def all_scores(swe: Swe, tasks: list[Task]) -> list[tuple[Task, KnownResult, Score]]:
    limit = asyncio.Semaphore(4)

    async def one(task: Task, known: KnownResult) -> tuple[Task, KnownResult, Score]:
        async with limit:
            return task, known, await swe.score(task, known.result)

    return await asyncio.gather(
        *(one(task, known) for task in tasks for known in swe.known_results(task))
    )


def wrong(scored: list[tuple[Task, KnownResult, Score]]) -> list[tuple[str, str]]:
    return [
        (task.id, known.name)
        for task, known, score in scored
        if score.reward is None or not known.least <= score.reward <= known.most
    ]


@pytest.mark.thorough
async def test_cheats_gain_nothing(rooms: Sandboxes) -> None:
    swe = environment(rooms)
    scored = await all_scores(swe, list(swe.tasks("train"))[:1])
    assert len({known.name for _, known, _ in scored if known.most == 0.0}) >= 50
    assert wrong(scored) == []


@pytest.mark.parametrize("hoisted", [True, False])
async def test_cheats_gain_nothing_where_no_tripwire_sees_them(
    rooms: Sandboxes, monkeypatch: pytest.MonkeyPatch, hoisted: bool
) -> None:
    """Reports are sealed and answers are not there: code need not be recognised."""
    monkeypatch.setattr(grading, "FRAUD", frozenset())
    monkeypatch.setattr("envserver_environments.swe.patches.PROTECTED_NAMES", ())
    monkeypatch.setattr("envserver_environments.swe.patches.PROTECTED_FOLDERS", frozenset({".git"}))
    swe = environment(rooms)
    task = own("lookup-slow").task()
    task.hidden["hoisted"] = hoisted
    scored = await all_scores(swe, [task])
    known_to_need_protection = {
        "conftest that turns failures into passes", "conftest beside the tests",
        "gold, and a conftest", "gold, and tests that are changed",
    }  # fmt: skip
    assert {name for _, name in wrong(scored)} <= known_to_need_protection


@pytest.mark.slow
async def test_cheats_gain_nothing_in_any_task(rooms: Sandboxes) -> None:
    swe = environment(rooms)
    assert wrong(await all_scores(swe, list(swe.tasks("train")))) == []


async def test_what_tripwires_see_is_told(rooms: Sandboxes) -> None:
    task = own("roman-subtractive").task()
    source = own("roman-subtractive").tree["roman.py"].data.decode()
    patch = edited(
        own("roman-subtractive").tree,
        roman_py=f"{source}\nimport sys\nsys._getframe\nsys.modules\n",
    )
    score = await environment(rooms).score(task, result_of(patch))
    assert score.reward == 0.0
    assert score.metrics["refused_fraud"] == 1.0
    assert (score.metrics["suspicious_frames"], score.metrics["suspicious_modules"]) == (1.0, 1.0)


async def test_partial_work_is_a_metric_not_a_reward(rooms: Sandboxes) -> None:
    task = own("cart-rounding")
    fixed = task.gold["shop/cart.py"].replace("self.discount)", "min(self.discount, 20))")
    patch = edited(task.tree, shop__cart_py=fixed)
    score = await environment(rooms).score(task.task(), result_of(patch))
    assert score.reward == 0.0
    assert score.metrics["fail_to_pass"] == 0.5
    assert score.metrics["pass_to_pass"] == 1.0
    assert score.metrics["files_changed"] == 1.0


async def test_endless_code_is_ended(rooms: Sandboxes) -> None:
    task = own("roman-subtractive")
    patch = edited(task.tree, roman_py="while True:\n    pass\n")
    score = await environment(rooms, test_seconds=1.0).score(task.task(), result_of(patch))
    assert score.reward == 0.0
    assert score.metrics.keys() & {"killed_by_wall", "killed_by_cpu"}


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
    task = own("roman-subtractive")
    with pytest.raises(SandboxError):
        await environment(Broken(result)).score(task.task(), result_of(task.gold_patch))  # type: ignore[arg-type]


@pytest.mark.parametrize("output", [None, "patch", 5, [], {}, {"patch": None}, {"patch": b"x"}])
async def test_odd_outputs_get_nothing(rooms: Sandboxes, output: Any) -> None:
    result = result_of("")
    result.output = output
    score = await environment(rooms).score(own("roman-subtractive").task(), result)
    assert score.reward == 0.0


PYTEST_FILES = {
    "pkg/__init__.py": "",
    "pkg/core.py": "def double(x):\n    return x + x + 1\n",
    "tests/conftest.py": "import pytest\n\n@pytest.fixture\ndef three():\n    return 3\n",
    "tests/helper.py": "FOUR = 4\n",
    "pytest.ini": "[pytest]\naddopts = --no-such-option\n",
}
PYTEST_TESTS = {
    "tests/test_core.py": """
import unittest
import pytest
from pkg.core import double

@pytest.mark.parametrize("n", [1, 2])
def test_double(n):
    assert double(n) == 2 * n

def test_fixture(three):
    assert double(three) == 6

def test_type():
    assert isinstance(double(1), int)

class TestAll(unittest.TestCase):
    def test_zero(self):
        self.assertEqual(double(0), 0)

@pytest.mark.skip
def test_skipped():
    assert True
"""
}
IDS = {name: f"tests/test_core.py::{name}" for name in (
    "test_double[1]", "test_double[2]", "test_fixture", "test_type", "TestAll::test_zero",
    "test_skipped",
)}  # fmt: skip


def plain_tests(*left_out: str) -> HiddenTests:
    ids = [id_ for name, id_ in IDS.items() if name not in (*left_out, "test_type")]
    gold = edited(tree_of(PYTEST_FILES), pkg__core_py="def double(x):\n    return x + x\n")
    return HiddenTests(PYTEST_TESTS, tuple(ids), (IDS["test_type"],), gold, hoisted=False)


async def plain(rooms: Sandboxes, source: str, *left_out: str) -> Verdict:
    tree = tree_of(PYTEST_FILES)
    tests = plain_tests(*left_out)
    return await grade(tree, edited(tree, pkg__core_py=source), tests, rooms, LIMITS)


GOLD = "def double(x):\n    return x + x\n"


async def test_ordinary_tests_of_pytest(rooms: Sandboxes) -> None:
    """Fixtures of the repository's conftest, parameters, classes; not its configuration."""
    verdict = await plain(rooms, GOLD, "test_skipped")
    assert verdict.solved
    assert len(verdict.passed) == 5
    wrong = await plain(rooms, "def double(x):\n    return 2 if x == 1 else 7\n", "test_skipped")
    assert wrong.passed == {IDS["test_double[1]"], IDS["test_type"]}


async def test_a_skipped_test_has_not_passed(rooms: Sandboxes) -> None:
    verdict = await plain(rooms, GOLD)
    assert not verdict.solved
    assert IDS["test_skipped"] not in verdict.passed


@pytest.mark.parametrize("name", sorted(PROGRAMS))
async def test_ordinary_tests_are_not_fooled(rooms: Sandboxes, name: str) -> None:
    source = "def double(x):\n    return x + x + 1\n" + dedent(PROGRAMS[name])
    verdict = await plain(rooms, source, "test_skipped")
    assert not verdict.solved


async def test_planted_modules_come_after_installed_ones(rooms: Sandboxes) -> None:
    tree = tree_of(PYTEST_FILES)
    planted = ("json.py", "src/typing.py", "numpy.py", "msgspec/__init__.py", "src/xml/__init__.py")
    files = dict.fromkeys(planted, "raise SystemExit(0)\n")
    files["pkg/core.py"] = f"import json, msgspec, numpy, typing, xml\n{GOLD}"
    patch = make_patch(tree, tree | tree_of(files))
    verdict = await grade(tree, patch, plain_tests("test_skipped"), rooms, LIMITS)
    assert verdict.solved
