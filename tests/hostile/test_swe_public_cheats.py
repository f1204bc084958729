"""Patches that look for a public task's answers, or lie about equality, are not paid.

The tests of public data sets are ordinary pytest. The search for suspicious code is switched off
here: the answers themselves must be out of reach. Tests and cheats are in the TOML file beside,
patches of a third round in `programs`.
"""

import asyncio
import tomllib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from envserver_environments.swe.env import Swe
from envserver_environments.swe.known import result_of
from envserver_environments.swe.trees import make_patch, tree_of
from support.cases import cases_of
from support.sandboxes import sandboxes

from envserver import Task

CASES = cases_of(__file__)
THIRD_ROUND = Path(__file__).parent / "programs/third_round.toml"
PATCHES = tomllib.loads(THIRD_ROUND.read_text())["patches"]
FILES = {"shop/__init__.py": "", "shop/text.py": "def label(n):\n    return str(n)\n"}
GOLD = 'def label(n):\n    return f"{n} items" if n != 1 else "1 item"\n'


def patch(source: str) -> str:
    return make_patch(tree_of(FILES), tree_of({**FILES, "shop/text.py": source}))


def public_task(kind: str) -> Task:
    tests = CASES["tests"][kind]
    hidden = {
        "tests": {"tests/test_text.py": tests["source"]},
        "fail_to_pass": [f"tests/test_text.py::{name}" for name in tests["names"]],
        "pass_to_pass": [],
        "patch": patch(GOLD),
    }
    return Task(kind, {"problem": "Labels have no noun.", "files": FILES}, hidden)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def swe() -> AsyncIterator[Swe]:
    async with sandboxes() as opened:
        environment = Swe()
        environment.sandboxes = opened
        yield environment


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("kind", CASES["tests"])
async def test_no_cheat_of_a_public_task_is_paid(
    swe: Swe, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr("envserver_environments.swe.grading.FRAUD", frozenset())
    read, cheats = CASES["cheats"]["read"], CASES["cheats"]["programs"]
    programs = {name: f"{read}\n{text}" for name, text in cheats.items()}
    if kind in ("literals", "methods", "variables"):
        programs |= PATCHES
    programs["the gold patch"] = GOLD
    task = public_task(kind)
    scores = await asyncio.gather(
        *(swe.score(task, result_of(patch(text))) for text in programs.values())
    )
    paid = [name for name, score in zip(programs, scores, strict=True) if score.reward != 0.0]
    assert paid == ["the gold patch"]
