"""Ordinary tests without their answers: what is taken out, and that honest repairs still pass."""

from __future__ import annotations

import secrets
import tomllib
from pathlib import Path
from typing import Any

import pytest
from envserver_environments.swe.answers import VeiledAnswer
from envserver_environments.swe.cheats import result_of
from envserver_environments.swe.judging import classes_now, comparisons, equality
from envserver_environments.swe.trees import make_patch, tree_of
from envserver_environments.swe.veiling import veil
from support.swe_scripts import swe_of

from envserver import Sandboxes, Task

CASES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
FILES, HIDDEN = CASES["files"], CASES["hidden"]
GOLD = FILES["shop/things.py"].replace("x * STEP + 1", "x * STEP")
NAMES = [
    *(f"test_stacked[{y}-{2 * y}-{x}]" for y in (1, 2) for x in (1, 2)),
    *(f"test_rows[{name}]" for name in ("1-2", "a-aa", "y2-wanted2", "0.5-1.0")),
    "test_named[one]", "test_named[two]", "test_loops", "test_constants",
    "test_fixture[3]", "test_fixture[5]", "test_package", "test_classes", "test_errors",
    "TestAll::test_methods", "TestLater::test_later",
]  # fmt: skip
OWN_SOURCE = (
    "import inspect\nfrom shop.things import double\n\ndef test_source():\n"
    "    assert 'def test_source' in inspect.getsource(test_source)\n    assert double(1) == 2\n"
)


def patch(source: str) -> str:
    return make_patch(tree_of(FILES), tree_of({**FILES, "shop/things.py": source}))


def public_task(tests: dict[str, str], *names: str, **hidden: Any) -> Task:
    lists = {"fail_to_pass": [f"tests/test_things.py::{name}" for name in names]}
    rest = {"tests": tests, "pass_to_pass": [], "patch": patch(GOLD)}
    return Task("a", {"problem": "?", "files": FILES}, {**lists, **rest, **hidden})


@pytest.mark.asyncio(loop_scope="module")
async def test_what_ordinary_tests_use_still_works(rooms: Sandboxes) -> None:
    swe = swe_of(rooms)
    task = public_task(HIDDEN, *NAMES, plain=False)
    for source, paid in ((GOLD, 1.0), (GOLD.replace("STEP = 2", "STEP = 3"), 0.0)):
        score = await swe.score(task, result_of(patch(source)))
        assert (score.reward, score.metrics["fail_to_pass"]) == (paid, paid)
    # Tests that need their own source are run from files.
    task = public_task({"tests/test_things.py": OWN_SOURCE}, "test_source")
    for source, paid in ((GOLD, 1.0), (FILES["shop/things.py"] + "\n", 0.0)):
        score = await swe.score(task, result_of(patch(source)))
        assert (score.reward, score.metrics["tests_plain"]) == (paid, 1.0)


def test_answers_leave_the_source_line_by_line() -> None:
    found = veil(CASES["veiled"]["source"], "S", ["test_rows[1-one]"], 10)
    assert found.source == CASES["veiled"]["becomes"]
    assert found.renamed["test_rows[2-two]"] == "test_rows[row1]"
    assert found.certain["test_rows[row1]"] == {11}
    assert found.certain["TestNames::test_all"] == {12, 13, 14, 15, 17, 18, 19, 20}
    assert found.answers[11] == VeiledAnswer("==", "two")
    assert found.answers[17] is None


@pytest.mark.parametrize("literal", [3, 0, True, None, 1.5, "a b", "", b"x", [1, "a"], {"a": 1}])
def test_an_object_that_does_not_know_the_answer_is_found_by_its_decoys(literal: Any) -> None:
    class Anything:
        def __eq__(self, other: object) -> bool:
            return type(other) is type(literal)

    class Same:
        def __eq__(self, other: object) -> bool:
            return type(other) is type(literal) and other == literal

    answer = VeiledAnswer("==", literal)
    candidates = answer.candidates()
    for value, accepted in ((Anything(), literal is None), (Same(), True)):
        said = comparisons("==", value, candidates)
        assert answer.accepts_comparisons(candidates, said) is accepted
        equal = equality(trusted=classes_before, spaces=[], below=secrets.randbelow)
        assert equal([value], [literal]) is accepted
        assert equal(literal, value) is accepted


classes_before = classes_now()
