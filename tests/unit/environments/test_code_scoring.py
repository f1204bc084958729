"""The environment `code`: which program is found in an answer, and what the tests say of it.

Cases are in test_code_scoring.toml.
"""

from __future__ import annotations

import functools
import time
from collections import deque
from fractions import Fraction
from typing import Any

import pytest
from envserver_environments.code.extraction import extract_code
from envserver_environments.code.hoisting import NotHoistable, hoisted
from envserver_environments.code.running import harness
from envserver_environments.code.values import BadValue, read_json, read_value
from envserver_records.tasks import Json
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cases import cases_of
from support.code_house import code
from support.cpu import cpu_limit
from support.extent import examples

from envserver import ExecResult, Result, SandboxError, Sandboxes

CASES = cases_of(__file__)
CLAIMS = CASES["claims"]
GOOD = "def twice(x):\n    return 2 * x\n"
FENCED_INSIDE = (
    'def twice(x):\n    """So:\n    ```\n    twice(1)\n    ```\n    """\n    return 2 * x  # ```\n'
)


FOUND = {
    GOOD: [
        f"```python\n{GOOD}```", f"Here:\n```py\n{GOOD}```\nDone.", f"```\n{GOOD}```",
        f"~~~python\n{GOOD}~~~", f"````python\n{GOOD}````", f"```python\r\n{GOOD}```\r\n",
        "1. So:\n   ```python\n   def twice(x):\n       return 2 * x\n   ```\n",
        f"```python\ndef twice(x): pass```\nNo:\n```python\n{GOOD}```",
        # The last block that defines the function, whatever stands behind it.
        f"```python\ndef twice(x): pass\n```\n```python\n{GOOD}```\n```bash\nls\n```",
        f"```python\n{GOOD}```\nUse:\n```python\ntwice(3)\n```",
        f"```python\n{GOOD}```\n```python\ndef twice(x:\n```",
        f"<think>```python\nbad\n```</think>```python\n{GOOD}```",
    ],
    GOOD.rstrip(): [f"```python\n{GOOD.rstrip()}```"],
    "def twice(x): return 2 * x": ["```python\ndef twice(x): return 2 * x```"],
    FENCED_INSIDE: [f"```python\n{FENCED_INSIDE}```\nSo."],
    "twice = lambda x: 2 * x\n": ["```python\ntwice = lambda x: 2 * x\n```"],
    "from m import double as twice\n": ["```python\nfrom m import double as twice\n```"],
    # Else the last block, which will fail by itself.
    "b = 2\n": ["```python\na = 1\n```\n```python\nb = 2\n```"],
    "no\n": ["```python\nclass A:\n    def twice(self, x): pass\n```\n```\nno\n```"],
    "def twice(x)\n": ["```python\ndef twice(x)\n```"],
    # Thoughts are not looked at, and text without a closed fence is not a program.
    None: [
        f"<think>hm</think>\n<think>\n```python\n{GOOD}```",
        f"<think>\n```python\n{GOOD}```\n</think>\nDone.",
        GOOD, f"```python\n{GOOD}", "`twice(x)`", "",
    ],
}  # fmt: skip


def test_the_program_of_an_answer_is_found() -> None:
    for found, texts in FOUND.items():
        for text in texts:
            assert extract_code(text, "twice") == found, text


@settings(max_examples=examples(200), deadline=None)
@given(st.text(alphabet="`~\npython defx():=<think>/ \t\\'\"", max_size=80))
def test_no_text_breaks_the_search_for_a_program(text: str) -> None:
    found = extract_code(text, "d")
    assert found is None or found in text.replace("\r\n", "\n") or "\n" in found


# Asserts are taken apart into calls and a claim about their values.


def test_what_a_test_wants_is_in_no_call() -> None:
    test = hoisted("assert abs(area(2, r=[1]) - 12.566) < 1e-3, 'near 12.566'", "area")
    assert test.calls == ("area(2, r=[1])",)
    assert test.holds({0: 12.5661}) and not test.holds({0: 12.6}) and not test.holds({})


def test_what_is_not_looked_at_may_have_failed() -> None:
    test = hoisted("assert f(1) or f(2)", "f")
    assert test.holds({0: True}) and not test.holds({0: False}) and not test.holds({1: True})


def test_loops_over_calls_are_written_out() -> None:
    test = hoisted("assert all(f(a, [b]) == a * b for a, b in [(1, 2), (3, 4)])", "f")
    assert test.calls == ("f(1, [2])", "f(3, [4])")
    assert test.holds({0: 2, 1: 12}) and not test.holds({0: 2, 1: 13})
    assert hoisted("assert [f(n) for n in range(3)] == [0, 1, 2]", "f").calls[2] == "f(2)"
    assert len(hoisted("assert f([n * n for n in range(9)]) == 204", "f").calls) == 1


def holds(test: str, value: str) -> bool:
    """Whether a test of `f` holds where every call gives `value`, which is Python."""
    apart = hoisted(test, "f")
    given = eval(value, {"deque": deque})
    return apart.holds(dict.fromkeys(range(len(apart.calls)), given))


def test_claims_are_evaluated_as_python_does() -> None:
    assert [case for case in CLAIMS["hold"] if not holds(*case)] == []
    assert [case for case in CLAIMS["fail"] if holds(*case)] == []


@pytest.mark.parametrize(("test", "value"), CLAIMS["large"], ids=range(16))
def test_no_value_makes_a_claim_hang(test: str, value: str) -> None:
    started = time.process_time()
    assert not holds(test, value)
    assert time.process_time() - started < cpu_limit(4)


@pytest.mark.parametrize("test", [*CLAIMS["refused"], f"assert {'(' * 300}f(1){')' * 300}"])
def test_what_cannot_be_taken_apart_is_refused(test: str) -> None:
    with pytest.raises(NotHoistable):
        hoisted(test, "f")


@functools.cache
def harness_names() -> Json:
    """What the harness defines, without running it."""
    names: Json = {"__name__": "harness"}
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


@settings(max_examples=examples(200), deadline=None)
@given(st.sampled_from(CLAIMS["never_break"]), VALUES, VALUES)
def test_no_values_break_a_claim(claim: str, first: Any, second: Any) -> None:
    assert hoisted(f"assert {claim}", "f").holds({0: first, 1: second}) in (True, False)


@settings(max_examples=examples(200), deadline=None)
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


NESTED = functools.reduce(lambda inner, _: ["l", [inner]], range(200), 1)
LINES = ("", "{", "nan", "NaN", "1.5", "Infinity", "1" * 5000, "[" * 100_000, f'"{"x" * 300_000}"')
SHAPES = (
    ["l"], ["l", 1], ["x", []], ["d", [1]], ["s", [["l", []]]], ["d", [["l", []], 1]],
    ["i", "0x1"], ["i", "f" * 30_000], ["f", "1.5"], ["f", 1], ["b", "0"], {"a": 1}, NESTED,
    ["l", [0] * 200_000], ["s", [["i", f"{n * (2**61 - 1):x}"] for n in range(100)]],
)  # fmt: skip


@pytest.mark.parametrize(
    ("read", "sent"),
    [*((read_json, line) for line in LINES), *((read_value, shape) for shape in SHAPES)],
    ids=range(len(LINES + SHAPES)),
)
def test_what_is_not_ours_is_refused(read: Any, sent: Any) -> None:
    with pytest.raises(BadValue):
        read(sent)


# Verdicts, with programs in a sandbox.
TESTS = ("assert f(2) == 4", "assert f(3) == 9", "assert f(-1) == 1")
SQUARE = "```python\ndef f(x): return x * x\n```"


def row(tests: Any = TESTS, **more: str) -> Json:
    return {"instruction": "Do it.", "entry_point": "f", "testcase": list(tests), **more}


async def test_programs_get_the_share_of_tests_that_they_pass(rooms: Sandboxes) -> None:
    env = code(rooms)
    programs = [
        (name, TESTS, program, float(Fraction(share)))
        for share, named in CASES["squares"].items()
        for name, program in named.items()
    ]
    programs += [(o["name"], o["tests"], o["program"], o["share"]) for o in CASES["others"]]
    got, wanted = {}, {}
    for name, tests, program, share in programs:
        result = env.response_from_row(f"```python\n{program}\n```", [])
        score = await env.score(env.task_from_row(row(tests)), result)
        assert score.reward == float(score.components["fraction"] == 1.0)
        got[name], wanted[name] = score.components["fraction"], pytest.approx(share)
    assert got == wanted


async def test_a_share_of_the_tests_may_be_paid(rooms: Sandboxes) -> None:
    half = "```python\ndef f(x): return 4\n```"
    env = code(rooms, partial_credit=True)
    task = env.task_from_row(row())
    partial = await env.score(task, Result(output=half))
    assert partial.reward == pytest.approx(1 / 3)
    assert (partial.metrics["visible_passed"], partial.metrics["hidden_passed"]) == (1.0, 0.0)


async def test_a_table_of_all_tests_is_told_from_a_solution_by_the_reference(
    rooms: Sandboxes,
) -> None:
    table = Result(output="```python\ndef f(x): return {2: 4, 3: 9, -1: 1}.get(x, 0)\n```")
    almost = Result(output="```python\ndef f(x): return x * x if x else None\n```")
    env = code(rooms)
    task = env.task_from_row(row(code="def f(x): return x * x"))
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
    with pytest.raises(SandboxError):
        await env.score(env.task_from_row(row()), Result(output=SQUARE))
