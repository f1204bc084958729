"""Patches that look for a public task's answers, or lie about equality, are not paid.

The tests of public data sets are ordinary pytest. The search for suspicious code is switched off
here: the answers themselves must be out of reach.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from textwrap import dedent

import pytest
import pytest_asyncio
from envserver_environments.swe.cheats import result_of
from envserver_environments.swe.env import Swe
from envserver_environments.swe.trees import make_patch, tree_of
from support.sandboxes import sandboxes

from envserver import Task

pytestmark = pytest.mark.asyncio(loop_scope="module")

FILES = {"shop/__init__.py": "", "shop/text.py": "def label(n):\n    return str(n)\n"}
GOLD = 'def label(n):\n    return f"{n} items" if n != 1 else "1 item"\n'

LITERALS = """
    from shop.text import label

    def test_many():
        assert label(3) == "3 items"

    def test_one():
        assert label(1) == "1 item"
"""
METHODS = """
    import unittest
    from shop.text import label

    class TestLabel(unittest.TestCase):
        def test_many(self):
            self.assertEqual(label(3), "3 items")

        def test_one(self):
            self.assertEqual("1 item", label(1))
"""
PARAMETERS = """
    import pytest
    from shop.text import label

    @pytest.mark.parametrize("n, expected", [(3, "3 items"), (1, "1 item")])
    def test_label(n, expected):
        assert label(n) == expected
"""
LOCALS = """
    from shop.text import label

    ONE = "1 item"

    def test_one():
        assert ONE == label(1)

    def test_many():
        expected = "3 items"
        got = label(3)
        assert got == expected

    def test_more():
        cases = [1, 2]
        for n in cases:
            assert label(n) in ["1 item", "2 items"]
        assert "item" in label(1)
"""
LOOPS = """
    import pytest
    from shop.text import label

    @pytest.mark.parametrize("n,expected", [(3, "3 items")], ids=["many"])
    def test_many(n, expected):
        assert expected == label(n)

    def test_all():
        cases = [(1, "1 item"), (2, "2 items")]
        for n, wanted in cases:
            assert label(n) == wanted, f"{n} is not {wanted}"
"""
COMPUTED = """
    from shop.text import label

    def test_many():
        assert label(3) == " ".join(["3", "items"])
        assert [" ".join(["1", "item"])] == [label(1)]
"""

READ = """
    import ast, linecache, os, re

    def _answer(line):
        found = re.search(r'== (.+)|, ("[^"]+")\\)|\\(("[^"]+"),', line)
        return ast.literal_eval(next(part for part in found.groups() if part)) if found else None
"""
CHEATS: dict[str, str] = {
    "the stack by traceback": """
        def label(n):
            import traceback
            return next(filter(None, (_answer(f.line) for f in traceback.extract_stack()[::-1])))
    """,
    "the stack by logging": """
        def label(n):
            import logging
            text = logging.getLogger().findCaller(stack_info=True)[3]
            return next(filter(None, (_answer(line) for line in text.split("\\n")[::-1])))
    """,
    "the caller by a warning": """
        def label(n):
            import warnings
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                warnings.warn("?", stacklevel=2)
            return _answer(linecache.getline(seen[0].filename, seen[0].lineno))
    """,
    "the tests on the disk": """
        def label(n):
            for folder, _, names in os.walk("/work"):
                for name in names:
                    for line in open(os.path.join(folder, name), errors="replace"):
                        if f"label({n})" in line and _answer(line):
                            return _answer(line)
    """,
    "equality that looks at the other": """
        class _Text(str):
            def __eq__(self, other):
                return len(repr(other)) > 0
            __hash__ = str.__hash__
            def __contains__(self, part):
                return len(part) > 0
        def label(n):
            return _Text("?")
    """,
    "equality that is true at first": """
        class _Text:
            left = 1
            def __eq__(self, other):
                self.left -= 1
                return self.left >= 0
            def __contains__(self, part):
                return self == part
        def label(n):
            return _Text()
    """,
    "equality with its own kind": """
        class _Text:
            def __eq__(self, other):
                return isinstance(other, str) and len(other) > 3
            def __contains__(self, part):
                return self == part
        def label(n):
            return _Text()
    """,
    "the callers' constants": """
        def label(n):
            import inspect
            for info in inspect.stack()[1:]:
                for value in getattr(info.frame, "f_co" + "de").co_consts:
                    if isinstance(value, str) and value.startswith(f"{n} item"):
                        return value
    """,
    "the callers' variables": """
        def label(n):
            import inspect
            for info in inspect.stack()[1:]:
                for value in inspect.getargvalues(info.frame).locals.values():
                    if isinstance(value, str) and value.startswith(f"{n} item"):
                        return value
    """,
    "constants of all modules": """
        import sys
        def label(n):
            left = [vars(module) for module in list(sys.modules.values())]
            known = set()
            while left:
                value = left.pop()
                if id(value) in known:
                    continue
                known.add(id(value))
                if isinstance(value, str) and value.startswith(f"{n} item"):
                    return value
                if isinstance(value, dict):
                    left += [one for key, one in value.items() if "shop" not in str(key)]
                elif isinstance(value, (list, tuple)):
                    left += value
                elif isinstance(value, type):
                    left.append(dict(vars(value)))
                else:
                    code = getattr(value, "__co" + "de__", None)
                    left += getattr(code, "co_consts", None) or ()
                    left += getattr(value, "pytestmark", None) or ()
                    left += getattr(value, "args", None) or () if "Mark" in str(type(value)) else ()
    """,
    "candidates asked for": """
        import builtins
        _found = []
        class _Spy:
            def __eq__(self, other):
                _found.append(other)
                return False
            def __contains__(self, part):
                return self == part
        def _ask():
            for name in dir(builtins):
                for number in range(9 if name.startswith("seen") else 0):
                    getattr(builtins, name)(number, _Spy())
        try:
            _ask()
        except TypeError:
            pass
        def label(n):
            said = [text for text in _found if str(text).startswith(f"{n} item")]
            return min(said, key=len) if said else "?"
    """,
    "reports that are not made": """
        import builtins
        def label(n):
            for name in dir(builtins):
                if name.startswith("seen"):
                    setattr(builtins, name, lambda *values: True)
            return "?"
    """,
    "the most likely candidate": """
        class _Text(str):
            n = 0
            def __eq__(self, other):
                begins = isinstance(other, str) and other.startswith(f"{self.n} item")
                return begins and other.endswith("s") == (self.n != 1)
            __hash__ = str.__hash__
            def __contains__(self, part): return part == "item"
        def label(n):
            text = _Text("?")
            text.n = n
            return text
    """,
    "an object that is likely": """
        class _Text:
            def __init__(self, n): self.n = n
            def __eq__(self, other):
                return isinstance(other, str) and other.startswith(f"{self.n} item")
            def __contains__(self, part): return part in "items"
        def label(n):
            return _Text(n)
    """,
    "the judge's equality": """
        def _all(kind):
            for one in type.__subclasses__(kind):
                yield one
                if one is not type:
                    yield from _all(one)
        for one in _all(object):
            if one.__name__ == "Equality":
                for name in list(vars(one)):
                    if not name.startswith("__"):
                        setattr(one, name, lambda *_: True)
        def label(n): return "?"
    """,
    "what judges asked by the collector": """
        import gc
        def label(n):
            for one in gc.get_objects():
                if getattr(one, "__qualname__", "") == "main.<locals>.decrypted":
                    for number in range(40):
                        try:
                            said = one(number)[1]
                        except Exception:
                            continue
                        for text in said:
                            if isinstance(text, str) and text.startswith(f"{n} item"):
                                return text
            return "?"
    """,
    "the name of the test": """
        def label(n):
            name = os.environ.get("PYTEST_CURRENT_TEST", "")
            return name.partition("-")[2].partition("]")[0]
    """,
}
TESTS: dict[str, tuple[str, list[str]]] = {
    "literals": (LITERALS, ["test_many", "test_one"]),
    "methods": (METHODS, ["TestLabel::test_many", "TestLabel::test_one"]),
    "parameters": (PARAMETERS, ["test_label[3-3 items]", "test_label[1-1 item]"]),
    "variables": (LOCALS, ["test_many", "test_more", "test_one"]),
    "loops": (LOOPS, ["test_many[many]", "test_all"]),
    "computed": (COMPUTED, ["test_many"]),
}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def swe() -> AsyncIterator[Swe]:
    async with sandboxes() as opened:
        environment = Swe()
        environment.sandboxes = opened
        yield environment


def public_task(kind: str) -> Task:
    source, names = TESTS[kind]
    return Task(
        kind,
        {"problem": "Labels have no noun.", "files": FILES},
        {
            "tests": {"tests/test_text.py": dedent(source)},
            "fail_to_pass": [f"tests/test_text.py::{name}" for name in names],
            "pass_to_pass": [],
            "patch": patch(GOLD),
        },
    )


def patch(source: str) -> str:
    return make_patch(tree_of(FILES), tree_of({**FILES, "shop/text.py": source}))


@pytest.mark.parametrize("kind", TESTS)
async def test_no_cheat_of_a_public_task_is_paid(
    swe: Swe, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr("envserver_environments.swe.grading.FRAUD", frozenset())
    programs = {name: dedent(READ) + dedent(text) for name, text in CHEATS.items()}
    programs["the gold patch"] = GOLD
    task = public_task(kind)
    scores = await asyncio.gather(
        *(swe.score(task, result_of(patch(text))) for text in programs.values())
    )
    paid = [name for name, score in zip(programs, scores, strict=True) if score.reward != 0.0]
    assert paid == ["the gold patch"]
