"""Ordinary tests without their answers: what is taken out, and that honest repairs still pass."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from textwrap import dedent
from typing import Any

import pytest
import pytest_asyncio
from envserver_environments.swe.answers import VeiledAnswer
from envserver_environments.swe.cheats import result_of
from envserver_environments.swe.env import Swe
from envserver_environments.swe.judging import classes_now, comparisons, equality
from envserver_environments.swe.trees import make_patch, tree_of
from envserver_environments.swe.veiling import veil
from support.sandboxes import sandboxes

from envserver import Task

FILES = {
    "shop/__init__.py": "",
    "shop/things.py": """
from collections import OrderedDict, defaultdict, namedtuple
from decimal import Decimal
from functools import total_ordering

STEP = 2

Pair = namedtuple("Pair", "a b")

class Text(str):
    pass

@total_ordering
class Money:
    def __init__(self, amount):
        self.amount = amount
    def __eq__(self, other):
        return self.amount == getattr(other, "amount", other)
    def __lt__(self, other):
        return self.amount < getattr(other, "amount", other)
    __hash__ = None

class Names:
    def __init__(self, *names):
        self.names = names
    def __contains__(self, name):
        return name.lower() in self.names

class Whole:
    def __contains__(self, number):
        return isinstance(number, int)

def double(x):
    return x * STEP + 1
""",
    "tests/__init__.py": "",
    "tests/base.py": "FOUR = 0\n",
    "tests/words.txt": "old\n",
}
GOLD = FILES["shop/things.py"].replace("x * STEP + 1", "x * STEP")
HIDDEN = {
    "tests/base.py": "FOUR = 4\n\ndef check(value, wanted):\n    assert value == wanted\n",
    "tests/conftest.py": "import pytest\n\n@pytest.fixture(params=[3, 5])\ndef odd(request):\n"
    "    return request.param\n",
    "tests/words.txt": "new\n",
    "tests/test_things.py": """
import asyncio
import importlib.resources
import os
import unittest
from unittest import mock

import pytest

from shop.things import *
from shop.things import double
from .base import FOUR, check


HALF = "a"
WHOLE = (
    "a"
    "a"
)
BOTH = 2


class Near:
    def __eq__(self, other):
        return abs(other - 4) < 1


@pytest.mark.parametrize("x", [1, 2])
@pytest.mark.parametrize(("y", "wanted"), [(1, 2), (2, 4)])
def test_stacked(x, y, wanted):
    assert double(y) == wanted and x in (1, 2), f"{double(y)} is wrong"


@pytest.mark.parametrize("y,wanted", [(1, 2), ("a", "aa"), ([1], [1, 1]), (0.5, 1.0)])
def test_rows(y, wanted):
    assert double(y) == wanted


@pytest.mark.parametrize("y,wanted", [(len("a"), 2), ("b", "bb")], ids=["one", "two"])
def test_named(y, wanted):
    assert double(y) == wanted


def test_constants():
    assert double(HALF) == WHOLE, WHOLE
    self = unittest.TestCase()
    self.assertEqual(WHOLE, double(HALF))
    two = 2
    assert double(1) == BOTH and two == BOTH


def test_loops():
    cases = (
        ("a", "aa"),
        ("b", "bb"),
    )
    for x, wanted in cases:
        assert wanted == double(x), f"{x}: {wanted}"
    for x, right in [(1, 2), (len("a"), 2)]:
        if x:
            assert double(x) in (right,)
            assert double(x) == right
    for x, same in [("a", "aa")]:
        assert same is not None
        assert double(x) == same


def test_fixture(odd, tmp_path):
    assert double(odd) == 2 * odd
    with open(tmp_path / "a", "w") as file:
        assert file.write("abc") == 3


def test_package():
    check(double(2), FOUR)
    folder = os.path.dirname(__file__)
    assert open(os.path.join(folder, "words.txt")).read() == "new\\n"
    assert importlib.resources.files(__package__).joinpath("words.txt").is_file()


def test_classes():
    assert Money(double(2)) == 4
    assert Money(double(2)) == Money(4) != Money(5)
    assert Money(double(2)) == Money(4)
    assert Money(double(2)) < 5
    assert [Money(double(2)), 1] == [4, 1]
    assert "ANN" in Names("ann", "bob")
    assert 4 in Whole()
    assert Pair(1, double(1)) == (1, 2)
    assert Pair(1, double(1)) == Pair(1, 2)
    assert Text("a") * double(1) == "aa"
    assert OrderedDict(a=double(1)) == {"a": 2}
    assert defaultdict(int, a=double(1)) == {"a": 2}
    assert Decimal(double(1)) == 2
    assert double(1) == 2.0 == Decimal(2)
    assert double(True) == True + 1
    assert {double(1), 3} == {3, 2}
    assert (Money in (Money, Pair)) is True
    assert vars(Money(double(1))) == {"amount": mock.ANY}
    assert double(0.1) == pytest.approx(0.2)
    assert double(2) == Near()
    assert len(Names("a", "b").names) >= 2, "more"


def test_errors():
    with pytest.raises(AssertionError):
        assert double(1) == 3
    try:
        assert double(1) == 5
    except AssertionError:
        pass
    else:
        raise ValueError
    for x in (1, 2):
        expected = 2
        if x == 2:
            expected = 4
        assert double(x) == expected


class TestAll(unittest.TestCase):
    def setUp(self):
        self.assertEqual(double(1), 2)

    def test_methods(self):
        text = \"\"\"a
a\"\"\"
        for x in (1, 2):
            with self.subTest(x=x):
                self.assertEqual(2 * x, double(x), msg="no")
        self.assertListEqual(
            [double(1),  # one
             double(2)],
            [2, 4],
        )
        self.assertIn("a", double("ba")); self.assertIsNone(None)
        self.assertGreater(double(2), 3)
        self.assertEqual(double("a").replace("aa", "a\\na"), text)


class TestLater(unittest.IsolatedAsyncioTestCase):
    async def test_later(self):
        assert await asyncio.sleep(0, double(1)) == 2
""",
}
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


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def swe() -> AsyncIterator[Swe]:
    async with sandboxes() as opened:
        environment = Swe()
        environment.sandboxes = opened
        yield environment


def patch(source: str) -> str:
    return make_patch(tree_of(FILES), tree_of({**FILES, "shop/things.py": source}))


def public_task(tests: dict[str, str], *names: str, **hidden: Any) -> Task:
    lists = {"fail_to_pass": [f"tests/test_things.py::{name}" for name in names]}
    rest = {"tests": tests, "pass_to_pass": [], "patch": patch(GOLD)}
    return Task("a", {"problem": "?", "files": FILES}, {**lists, **rest, **hidden})


@pytest.mark.asyncio(loop_scope="module")
async def test_what_ordinary_tests_use_still_works(swe: Swe) -> None:
    task = public_task(HIDDEN, *NAMES, plain=False)
    score = await swe.score(task, result_of(patch(GOLD)))
    assert (score.reward, score.metrics["fail_to_pass"]) == (1.0, 1.0)
    wrong = GOLD.replace("STEP = 2", "STEP = 3")
    score = await swe.score(task, result_of(patch(wrong)))
    assert (score.reward, score.metrics["fail_to_pass"]) == (0.0, 0.0)


@pytest.mark.asyncio(loop_scope="module")
async def test_tests_that_need_their_own_source_are_run_from_files(swe: Swe) -> None:
    task = public_task({"tests/test_things.py": OWN_SOURCE}, "test_source")
    score = await swe.score(task, result_of(patch(GOLD)))
    assert (score.reward, score.metrics["tests_plain"]) == (1.0, 1.0)
    score = await swe.score(task, result_of(patch(FILES["shop/things.py"] + "\n")))
    assert (score.reward, score.metrics["tests_plain"]) == (0.0, 1.0)


def test_answers_leave_the_source_line_by_line() -> None:
    source = dedent("""
        import pytest
        ONE = "one"

        @pytest.mark.parametrize("n, wanted", [(1, "one"), (2, "two")])
        def test_rows(n, wanted):
            assert name(n) == wanted, f"{n} is not {wanted}"

        class TestNames:
            def test_all(self):
                wanted = [
                    "one", "two",
                ]
                got = names()
                assert got == wanted
                assert got[0] in ("one", "ein") and got is not None
                self.assertEqual("three", name(3), "why")
                if got:
                    assert len(got) > 1
                with pytest.raises(AssertionError):
                    assert name(1) == "two"
                assert name(4) == name(5)
                assert ONE == name(1)
                for n, right in [(1, "one"), (2, "two")]:
                    assert name(n) == right
    """)
    found = veil(source, "S", ["test_rows[1-one]"], 10)
    assert found.source.split("\n") == [
        "", "import pytest", "ONE = (None)", "",
        '@pytest.mark.parametrize("n, wanted", [(1, (0)), (2, (1))], ids=["row0", "row1"])',
        "def test_rows(n, wanted):", "    S(10 + (wanted), (name(n)))", "",
        "class TestNames:", "    def test_all(self):",
        "        wanted = (None", "", ")", "        got = names()", "        S(12, (got))",
        "        S(13, (got[0])); S(14, (got))", "        S(15, (name(3)))",
        "        if got:", "            S(16, (len(got)))",
        "        with pytest.raises(AssertionError):", '            assert name(1) == "two"',
        "        assert S(17, (name(4)), (name(5)))",
        "        S(18, (name(1)))", "        for n, right in [(1, (0)), (2, (1))]:",
        "            S(19 + (right), (name(n)))", "",
    ]  # fmt: skip
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
