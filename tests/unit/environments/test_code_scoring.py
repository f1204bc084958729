"""The environment `code`: which program is found in an answer, and what the tests say of it."""

from __future__ import annotations

import functools
import math
import time
from collections import Counter, OrderedDict, deque
from typing import Any

import pytest
from envserver_environments.code.extraction import extract_code
from envserver_environments.code.fuzzing import agreement, changed_calls
from envserver_environments.code.hoisting import NotHoistable, hoisted, prelude
from envserver_environments.code.running import harness
from envserver_environments.code.values import BadValue, read_json, read_value
from hypothesis import given, settings
from hypothesis import strategies as st
from support.code_house import code
from support.cpu import cpu_limit
from support.extent import examples

from envserver import ExecResult, Result, SandboxError, Sandboxes

GOOD = "def twice(x):\n    return 2 * x\n"
FENCED_INSIDE = (
    'def twice(x):\n    """So:\n    ```\n    twice(1)\n    ```\n    """\n    return 2 * x  # ```\n'
)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (f"```python\n{GOOD}```", GOOD),
        (f"Here:\n```py\n{GOOD}```\nDone.", GOOD),
        (f"```\n{GOOD}```", GOOD),
        (f"~~~python\n{GOOD}~~~", GOOD),
        (f"````python\n{GOOD}````", GOOD),
        (f"```python\r\n{GOOD}```\r\n", GOOD),
        ("1. So:\n   ```python\n   def twice(x):\n       return 2 * x\n   ```\n", GOOD),
        (f"```python\n{GOOD.rstrip()}```", GOOD.rstrip()),
        ("```python\ndef twice(x): return 2 * x```", "def twice(x): return 2 * x"),
        (f"```python\ndef twice(x): pass```\nNo:\n```python\n{GOOD}```", GOOD),
        (f"```python\n{FENCED_INSIDE}```\nSo.", FENCED_INSIDE),
        # The last block that defines the function, whatever stands behind it.
        (f"```python\ndef twice(x): pass\n```\n```python\n{GOOD}```\n```bash\nls\n```", GOOD),
        (f"```python\n{GOOD}```\nUse:\n```python\ntwice(3)\n```", GOOD),
        (f"```python\n{GOOD}```\n```python\ndef twice(x:\n```", GOOD),
        ("```python\ntwice = lambda x: 2 * x\n```", "twice = lambda x: 2 * x\n"),
        ("```python\nfrom m import double as twice\n```", "from m import double as twice\n"),
        # Else the last block, which will fail by itself.
        ("```python\na = 1\n```\n```python\nb = 2\n```", "b = 2\n"),
        ("```python\nclass A:\n    def twice(self, x): pass\n```\n```\nno\n```", "no\n"),
        ("```python\ndef twice(x)\n```", "def twice(x)\n"),
        # Thoughts are not looked at.
        (f"<think>```python\nbad\n```</think>```python\n{GOOD}```", GOOD),
        (f"<think>hm</think>\n<think>\n```python\n{GOOD}```", None),
        (f"<think>\n```python\n{GOOD}```\n</think>\nDone.", None),
        # Text without a closed fence is not a program.
        (GOOD, None),
        (f"```python\n{GOOD}", None),
        ("`twice(x)`", None),
        ("", None),
    ],
)
def test_the_program_of_an_answer_is_found(text: str, found: str | None) -> None:
    assert extract_code(text, "twice") == found


@settings(max_examples=examples(300), deadline=None)
@given(st.text(alphabet="`~\npython defx():=<think>/ \t\\'\"", max_size=80))
def test_no_text_breaks_the_search_for_a_program(text: str) -> None:
    found = extract_code(text, "d")
    assert found is None or found in text.replace("\r\n", "\n") or "\n" in found


class TestTakenApart:
    """Asserts are taken apart into calls and a claim about their values."""

    def test_what_a_test_wants_is_in_no_call(self) -> None:
        test = hoisted("assert abs(area(2, r=[1]) - 12.566) < 1e-3, 'near 12.566'", "area")
        assert test.calls == ("area(2, r=[1])",)
        assert test.holds({0: 12.5661}) and not test.holds({0: 12.6}) and not test.holds({})

    def test_each_call_is_one_and_an_outer_call_is_whole(self) -> None:
        test = hoisted("assert f(1) == f(1) and f(f(2)) in (3, 4)", "f")
        assert test.calls == ("f(1)", "f(1)", "f(f(2))")
        assert test.holds({0: 7, 1: 7, 2: 3}) and not test.holds({0: 7, 1: 8, 2: 3})

    def test_what_is_not_looked_at_may_have_failed(self) -> None:
        test = hoisted("assert f(1) or f(2)", "f")
        assert test.holds({0: True}) and not test.holds({0: False}) and not test.holds({1: True})

    def test_loops_over_calls_are_written_out(self) -> None:
        test = hoisted("assert all(f(a, [b]) == a * b for a, b in [(1, 2), (3, 4)])", "f")
        assert test.calls == ("f(1, [2])", "f(3, [4])")
        assert test.holds({0: 2, 1: 12}) and not test.holds({0: 2, 1: 13})
        assert hoisted("assert [f(n) for n in range(3)] == [0, 1, 2]", "f").calls[2] == "f(2)"
        assert len(hoisted("assert f([n * n for n in range(9)]) == 204", "f").calls) == 1

    @pytest.mark.parametrize(
        ("test", "value", "holds"),
        [
            ("assert f(1)", [], False),
            ("assert not f(1)", 0, True),
            ("assert f(1) == True", True, True),
            ("assert f(1) is True", 1, False),
            ("assert f(1) is None", None, True),
            ("assert f(1) != 3", 4, True),
            ("assert f(1) == {1, 2}", {2, 1}, True),
            ("assert f(1) == (1, [2])", (1, [2]), True),
            ("assert f(1) == [1, 2]", (1, 2), False),
            ("assert f(1) == {'a': [1]}", {"a": [1]}, True),
            ("assert f(1) == float('nan')", math.nan, False),
            ("assert f(1) == 0.0", -0.0, True),
            ("assert f(1) == deque([1, 2])", deque([1, 2]), True),
            ("assert f(1) == Counter('aab')", {"a": 2, "b": 1}, True),
            ("assert isinstance(f(1), list) and len(f(1)) == 2", [1, 2], True),
            ("assert isinstance(f(1), (set, dict, str))", "x", True),
            ("assert type(f(1)) == set", {1}, True),
            ("assert type(f(1)) is dict", {}, True),
            ("assert type(f(1)) == int", True, False),
            ("assert sorted(f(1), key=lambda p: p[1]) == [(2, 1), (1, 2)]", [(1, 2), (2, 1)], True),
            ("assert 1 <= f(1) < 3", 3, False),
            ("assert f(1)[0] == 1 and f(1)[-1:] == [2]", [1, 2], True),
            ("assert round(f(1), 2) == 0.33", 0.3333, True),
            ("assert math.isclose(f(1), 2.0, rel_tol=1e-9)", 2.0, True),
            ("assert f(1).lower().split(',') == ['a', 'b']", "A,B", True),
            ("assert ''.join(f(1)) == 'ab'", ["a", "b"], True),
            ("assert set(f(1)) == {1, 2}", [1, 2, 2, 1], True),
            ("assert sum(x > 1 for x in f(1)) == 2", [1, 2, 3], True),
            ("assert {k: v + 1 for k, v in f(1).items()} == {'a': 2}", {"a": 1}, True),
            ("assert f(1) == (2 if 1 > 0 else 3)", 2, True),
            ("assert f(1) == [[0] * 3] * 2", [[0, 0, 0], [0, 0, 0]], True),
            ("assert len(set(map(len, f(1)))) == 1", ["ab", "cd"], True),
            ("assert max(f(1), default=0) == 0", [], True),
            ("assert f(1) == 10 ** 20", 10**20, True),
            # What Python would raise makes a test fail.
            ("assert f(1)[5] == 1", [1], False),
            ("assert f(1) + 1 == 2", "1", False),
            ("assert f(1).keys() == {1}", [1], False),
            ("assert 1 / f(1) == 1", 0, False),
            ("assert {f(1)} == {1}", [1], False),
        ],
    )
    def test_claims_are_evaluated_as_python_does(self, test: str, value: Any, holds: bool) -> None:
        apart = hoisted(test, "f")
        assert apart.holds(dict.fromkeys(range(len(apart.calls)), value)) is holds

    @pytest.mark.parametrize(
        "test",
        [
            "assert f(Node(1)) == 2",
            "assert f(1) == Node(2)",
            "assert f(helper(1)) == 2",
            "assert g(1) == 2",
            "assert True",
            "f(1)",
            "assert f(1) == 1; assert f(2) == 2",
            "x = 1\nassert f(x) == 1",
            "try:\n    f(-1)\n    assert False\nexcept ValueError:\n    pass",
            "with raises(ValueError):\n    f(1)",
            "assert f is not None",
            "assert list(map(f, [1, 2])) == [1, 2]",
            "assert f(1).__class__ == int",
            "assert f(1).__eq__(1)",
            "assert '{}'.format(f(1)) == '1'",
            "assert f(open('x')) == 1",
            "assert eval('1') == f(1)",
            "assert (lambda: f(1))()  == 1",
            "assert f(().__class__) == 1",
            "assert all(f(x) for x in f(1))",
            "assert all(f(x) for x in range(10**9))",
            "assert (yield f(1))",
            "assert f(1) == ",
            "assert f(\0)",
            "assert " + "(" * 300 + "f(1)" + ")" * 300,
            "",
        ],
    )
    def test_what_cannot_be_taken_apart_is_refused(self, test: str) -> None:
        with pytest.raises(NotHoistable):
            hoisted(test, "f")

    def test_calls_get_the_modules_that_they_name(self) -> None:
        calls = ("f(math.pi, Counter([1]))", "f(deque([1]), datetime.date(2020, 1, 1))")
        names: dict[str, Any] = {"f": lambda *a: a}
        exec(prelude(calls), names)
        assert [len(eval(call, names)) for call in calls] == [2, 2]

    @pytest.mark.parametrize(
        ("test", "value"),
        [
            ("assert f(1) % 2 == 0", "%999999999d"),
            ("assert f(1) * 10**9 == 0", "x"),
            ("assert f(1) * f(2) == 0", 1 << 60_000),
            ("assert 7 ** f(1) == 0", 1 << 60_000),
            ("assert 1 << f(1) == 0", 1 << 40),
            ("assert sum(range(f(1))) == 0", 1 << 40),
            ("assert round(5, f(1)) == 0", -(1 << 40)),
            ("assert sum(f(1), []) == 0", [[1]] * 90_000),
            ("assert len(set(f(1))) == 0", [n * (2**61 - 1) for n in range(20_000)]),
            ("assert str(f(1)) == ''", 1 << 60_000),
            ("assert ','.join(f(1)).replace(',', f(2)) == ''", ["x" * 9] * 9000),
            ("assert sorted(f(1), key=lambda x: f(2).count(x)) == []", list(range(50_000))),
            ("assert [a for a in f(1) for b in f(1) for c in f(1)] == []", list(range(10_000))),
            ("assert bytes(f(1)) == b''", 1 << 40),
            ("assert pow(f(1), f(1), f(1)) == 0", (1 << 50_000) + 1),
            ("assert math.isclose(f(1), 1.0)", 10**400),
        ],
        ids=range(16),
    )
    def test_no_value_makes_a_claim_hang(self, test: str, value: Any) -> None:
        apart = hoisted(test, "f")
        started = time.process_time()
        assert not apart.holds(dict.fromkeys(range(len(apart.calls)), value))
        assert time.process_time() - started < cpu_limit(4)


@functools.cache
def harness_names() -> dict[str, Any]:
    """What the harness defines, without running it."""
    names: dict[str, Any] = {"__name__": "harness"}
    exec(harness().removesuffix("main()\n"), names)
    return names


def written(value: Any) -> Any:
    """The shape that the harness writes for `value`, sent and read as JSON."""
    names = harness_names()
    return read_json(names["json"].dumps(names["Writer"](50, 100_000, 1 << 18).write(value)))


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**4000), 2**4000)
    | st.floats()
    | st.complex_numbers()
    | st.text()
    | st.text(st.characters(categories=["Cs", "Cc"]), max_size=3)
    | st.binary()
)
HASHABLE = st.recursive(
    SCALARS, lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=4), max_leaves=5
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.lists(inner, max_size=4).map(deque)
        | st.sets(HASHABLE, max_size=4)
        | st.dictionaries(HASHABLE, inner, max_size=4)
    ),
    max_leaves=15,
)


@settings(max_examples=examples(200), deadline=None)
@given(VALUES)
def test_values_of_exact_types_arrive_as_they_were(value: Any) -> None:
    arrived = read_value(written(value))
    # `repr` tells -0.0 from 0.0, True from 1, nan from nan, and a tuple from a list.
    assert type(arrived) is type(value) and sorted(repr(arrived)) == sorted(repr(value))


CLAIMS = (
    "f(1) == f(2)", "f(1) < f(2)", "f(1) + f(2) == 3", "f(1) * f(2) == 3", "f(1) ** f(2) == 3",
    "f(1) % f(2) == 3", "f(1)[f(2)] == 3", "f(1) in f(2)", "set(f(1)) == {1}", "len(f(1)) == 3",
    "sorted(f(1)) == f(2)", "sum(f(1)) == 3", "abs(f(1) - f(2)) < 1e-6", "round(f(1), f(2)) == 3",
    "dict(f(1)) == {}", "f(1).get(f(2)) == 3", "f(1).count(f(2)) == 3", "''.join(f(1)) == f(2)",
    "f(1).split(f(2)) == []", "list(map(int, f(1))) == []", "max(f(1), key=len) == f(2)",
    "all(a == b for a, b in zip(f(1), f(2)))", "[a for a, b in f(1)] == []", "int(f(1)) == f(2)",
    "math.isclose(f(1), f(2))", "close(f(1), f(2))", "isinstance(f(1), int)", "-f(1) == ~f(2)",
    "range(f(1))[f(2)] == 3", "Counter(f(1)) == f(2)", "f(1).union(f(2)) == set()", "f(1) is f(2)",
    "bytes(f(1)) == f(2)", "f(1)[f(2):] == []", "chr(f(1)) == f(2)",
)  # fmt: skip


@settings(max_examples=examples(300), deadline=None)
@given(st.sampled_from(CLAIMS), VALUES, VALUES)
def test_no_values_break_a_claim(claim: str, first: Any, second: Any) -> None:
    assert hoisted(f"assert {claim}", "f").holds({0: first, 1: second}) in (True, False)


@settings(max_examples=examples(300), deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=4)
        | st.sampled_from(["i", "f", "c", "b", "l", "t", "s", "z", "q", "d", "nan", "ff", "0x1p"]),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=2),
    )
)  # fmt: skip
def test_no_shape_breaks_the_reader(shape: Any) -> None:
    try:
        value = read_value(shape)
    except BadValue:
        return
    assert type(value).__module__ in ("builtins", "collections")


@pytest.mark.parametrize(
    "line",
    [
        "", "{", "nan", "NaN", "1.5", "Infinity", "1" * 5000, "[" * 100_000, '"' + "x" * 300_000,
    ],
)  # fmt: skip
def test_lines_that_are_not_ours_are_refused(line: str) -> None:
    with pytest.raises(BadValue):
        read_json(line)


@pytest.mark.parametrize(
    "shape",
    [
        ["l"], ["l", 1], ["x", []], ["d", [1]], ["s", [["l", []]]], ["d", [["l", []], 1]],
        ["i", "0x1"], ["i", "f" * 30_000], ["f", "1.5"], ["f", 1], ["b", "0"], {"a": 1},
        ["l", [0] * 200_000], ["s", [["i", f"{n * (2**61 - 1):x}"] for n in range(100)]],
    ],
)  # fmt: skip
def test_shapes_that_are_not_ours_are_refused(shape: Any) -> None:
    with pytest.raises(BadValue):
        read_value(shape)


def test_nested_shapes_are_bounded() -> None:
    shape: Any = 1
    for _ in range(200):
        shape = ["l", [shape]]
    with pytest.raises(BadValue):
        read_value(shape)


def test_changed_calls_are_new_stay_near_and_are_the_same_for_a_seed() -> None:
    calls = ["f([1, 2, 9], 3)", "f(5)", "f('abc', {'k': 1.5})", "f(lambda: 1)", "f()"]
    changed = changed_calls(calls, 40, "seed")
    assert changed == changed_calls(calls, 40, "seed") != changed_calls(calls, 40, "other")
    assert len(changed) == len(set(changed)) == 40 and not set(changed) & set(calls)
    for call in changed:
        arguments = eval(call, {"f": lambda *a: a})
        if isinstance(arguments[0], list):
            assert arguments[0] == sorted(arguments[0])
            assert arguments[1] > 0
    assert changed_calls(["f()", "f(lambda: 1)"], 5, "s") == []
    assert agreement({0: 1.0000000001, 1: [1]}, {0: 1.0, 1: (1,), 2: 3}) == pytest.approx(1 / 3)
    assert agreement({}, {}) is None


# ScoringRules of verdicts, with programs in a sandbox: name, tests, program, share of tests passed.
TESTS = ("assert f(2) == 4", "assert f(3) == 9", "assert f(-1) == 1")
PROGRAMS: list[tuple[str, tuple[str, ...], str, float]] = [
    ("right", TESTS, "def f(x): return x * x", 1.0),
    ("one wrong", TESTS, "def f(x): return x * abs(x)", 2 / 3),
    ("all wrong", TESTS, "def f(x): return None", 0.0),
    ("another name", TESTS, "def g(x): return x * x", 0.0),
    ("no Python", TESTS, "def f(x) return x * x", 0.0),
    ("fails when loaded", TESTS, "def f(x): return x * x\n1 / 0", 0.0),
    ("a guarded main", TESTS, "def f(x): return x * x\nif __name__ == '__main__': exit(1)", 1.0),
    ("prints", TESTS, "print('hi')\ndef f(x):\n    print(x)\n    return x * x", 1.0),
    ("reads", TESTS, "import sys\ndef f(x): return 0 if sys.stdin.read() else x * x", 1.0),
    ("raises once", TESTS, "def f(x):\n    assert x > 0\n    return x * x", 2 / 3),
    ("exits once", TESTS, "import os\ndef f(x): return x * x if x != 3 else os._exit(0)", 2 / 3),
    ("leaves once", TESTS, "def f(x):\n    x != 3 or exit()\n    return x * x", 2 / 3),
    ("hangs once", TESTS, "def f(x):\n    while x == 2: pass\n    return x * x", 2 / 3),
    (
        "crashes once",
        TESTS,
        "import ctypes\ndef f(x):\n    x != 2 or ctypes.string_at(0)\n    return x * x",
        2 / 3,
    ),
    ("a class", TESTS, "class f(int):\n    def __new__(c, x): return int(x * x)", 1.0),
    ("a lambda", TESTS, "f = lambda x: x * x", 1.0),
    ("a decorator", TESTS, "import functools\n@functools.cache\ndef f(x): return x * x", 1.0),
    ("a subclass of int", TESTS, "class I(int): pass\ndef f(x): return I(x * x)", 0.0),
    ("a float", TESTS, "def f(x): return float(x * x)", 1.0),
    ("True for 1", ("assert f(1) == 1",), "def f(x): return True", 1.0),
    ("1 for True", ("assert f(1) is True",), "def f(x): return 1", 0.0),
    ("a tuple for a list", ("assert f(1) == [1]",), "def f(x): return (1,)", 0.0),
    ("a generator", ("assert list(f(1)) == [1]",), "def f(x): yield 1", 0.0),
    (
        "subclasses of dict",
        ("assert f(0) == {'a': 1}", "assert f(1) == {'a': 1}", "assert f(2)['a'] == 1"),
        "from collections import *\ndef f(x):\n    return [Counter('a'), OrderedDict(a=1),"
        " defaultdict(int, a=1)][x]",
        1.0,
    ),
    (
        "a mutable argument",
        ("assert f([3, 1]) == [1, 3]", "assert f([3, 1]) == [1, 3]"),
        "def f(x):\n    x.sort()\n    return x",
        1.0,
    ),
    (
        "what it keeps between calls",
        ("assert f(1) == [1]", "assert f(2) == [2]"),
        "def f(x, kept=[]):\n    kept.append(x)\n    return kept",
        0.5,
    ),
    ("far from", ("assert abs(f(2) - 1.4142) < 1e-3",), "def f(x): return 1.5", 0.0),
    ("near to", ("assert abs(f(2) - 1.4142) < 1e-3",), "def f(x): return x ** 0.5", 1.0),
    (
        "special floats",
        ("assert f(0) == float('inf')", "assert f(1) != f(1)", "assert str(f(2)) == '-0.0'"),
        "def f(x): return [float('inf'), float('nan'), -0.0][x]",
        1.0,
    ),
    (
        "values of every type",
        ("assert f(1) == [None, True, 2 ** 70, 1j, b'x', ('a',), {1}, frozenset({2}), {3: []}]",),
        "def f(x): return [None, True, 2 ** 70, 1j, b'x', ('a',), {1}, frozenset({2}), {3: []}]",
        1.0,
    ),
    ("large but bounded", ("assert len(f(1)) == 20000",), "def f(x): return [x] * 20000", 1.0),
    ("too large", ("assert len(f(1)) == 10 ** 6",), "def f(x): return [x] * 10 ** 6", 0.0),
    ("a dataclass inside", TESTS, "from dataclasses import dataclass\n@dataclass\nclass P:\n"
     "    x: int\ndef f(x): return P(x).x ** 2", 1.0),
    ("deep recursion", ("assert f(900) == 900",), "def f(x): return x and 1 + f(x - 1)", 1.0),
    ("a module of the calls", ("assert f(math.pi) > 3",), "def f(x): return x", 1.0),
    ("two calls", ("assert f('ab') == f('ba')",), "def f(x): return sorted(x)", 1.0),
    ("a loop of calls", ("assert all(f(i) == i * i for i in range(9))",),
     "def f(x): return x ** 2", 1.0),
]  # fmt: skip


async def test_programs_get_the_share_of_tests_that_they_pass(rooms: Sandboxes) -> None:
    env = code(rooms)
    got = {}
    for name, tests, program, _ in PROGRAMS:
        row = {"instruction": "Do it.", "entry_point": "f", "testcase": list(tests)}
        result = env.response_from_row(f"```python\n{program}\n```", [])
        score = await env.score(env.task_from_row(row), result)
        assert score.reward == float(score.components["fraction"] == 1.0)
        got[name] = score.components["fraction"]
    assert got == {name: pytest.approx(share) for name, _, _, share in PROGRAMS}


async def test_rewards_follow_the_rules(rooms: Sandboxes) -> None:
    row = {"instruction": "Square it.", "entry_point": "f", "testcase": list(TESTS)}
    right, half = "```python\ndef f(x): return x * x\n```", "```python\ndef f(x): return 4\n```"
    env = code(rooms, partial_credit=True)
    task = env.task_from_row(row)
    partial = await env.score(task, Result(output=half))
    assert partial.reward == pytest.approx(1 / 3)
    assert (partial.metrics["visible_passed"], partial.metrics["hidden_passed"]) == (1.0, 0.0)
    whole = await env.score(task, Result(output={"code": "def f(x): return x * x", "text": ""}))
    assert (whole.reward, whole.metrics["hidden_passed"]) == (1.0, 1.0)
    said = [{"role": "user", "content": half}, {"role": "assistant", "content": right}]
    assert (await env.score(task, Result(messages=said))).reward == 1.0
    for nothing in (None, "", 5, {"code": 5, "text": None}, {"code": None, "text": "none"}):
        score = await env.score(task, Result(output=nothing))
        assert score.reward == 0.0 and score.metrics["answered"] == 0.0
    cut_off = await env.score(task, Result(output=right, truncated=True))
    assert cut_off.reward == 0.0 and cut_off.metrics["truncated"] == 1.0


async def test_a_table_of_all_tests_is_told_from_a_solution_by_the_reference(
    rooms: Sandboxes,
) -> None:
    row = {
        "instruction": "Square it.", "entry_point": "f", "testcase": list(TESTS),
        "code": "def f(x): return x * x",
    }  # fmt: skip
    table = Result(output="```python\ndef f(x): return {2: 4, 3: 9, -1: 1}.get(x, 0)\n```")
    almost = Result(output="```python\ndef f(x): return x * x if x else None\n```")
    env = code(rooms)
    task = env.task_from_row(row)
    caught = await env.score(task, table)
    assert caught.reward == 0.0 and caught.metrics["tests_passed"] == 1.0
    assert caught.metrics["fuzz_agreement"] < 0.5
    assert (await env.score(task, almost)).reward == 1.0
    env.config.fuzz = 0
    assert (await env.score(task, table)).reward == 1.0


async def test_a_failure_of_the_sandbox_is_no_score() -> None:
    class Lost:
        async def __aenter__(self) -> Lost:
            return self

        async def __aexit__(self, *_: object) -> None:
            return None

        def open(self, spec: object) -> Lost:
            return self

        async def run_python(self, *_: object, **__: object) -> ExecResult:
            return ExecResult(exit=None, killed_by="lost")

    env = code(Lost())  # type: ignore[arg-type]
    row = {"instruction": "Do it.", "entry_point": "f", "testcase": list(TESTS)}
    with pytest.raises(SandboxError):
        await env.score(env.task_from_row(row), Result(output="```python\nf = abs\n```"))


def test_unusual_types_keep_their_equality() -> None:
    assert read_value(written(OrderedDict(a=1))) == {"a": 1} == read_value(written(Counter("a")))
