"""Converts the rows of each data set to `Problem`. Pure; loads and runs nothing.

    opc             instruction, entry_point, testcase (asserts), code, output
    mbpp            text or prompt, test_list (asserts), code
    humaneval       prompt, entry_point, test (a function `check`), canonical_solution
    humaneval_plus  the same, with EvalPlus's tests: lists of inputs and results
    mbpp_plus       MBPP's fields, and EvalPlus's tests in `test`
    pairs           inputs and outputs, of a program or of a function (see `pair_rows`)

A row names its data set by a key `data_set`, else its fields show it. All tests of opc and MBPP
must be separable into calls and claims; of the others, tests that are not are left out.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from typing import Any

from envserver_environments.rows import Row

from envserver import InputError

from .check_functions import tests_of_check, tests_of_script
from .extraction import defined_names, parsed
from .hoisting import NotHoistable, hoisted
from .pair_rows import SOURCES, TEXTS, read_pairs
from .problem import Problem, text_of

MAX_TESTS = 100
MAX_TESTS_CHARACTERS = 200_000


def read_problem(row: Row, data_set: str | None = None) -> Problem:
    """The problem in `row`.

    Args:
        data_set: whose shape it has; unset: found from the row.

    Raises:
        InputError: it has no known shape, or no tests that can be judged.
    """
    name = data_set or _shape_of(row)
    missing = [field for field in _FIELDS[name] if not any(f in row for f in field.split("|"))]
    if missing:
        raise InputError(f"A row of {name} must have {', '.join(missing)}.")
    problem = _READERS[name](row)
    is_program = name == "pairs" and not problem.entry_point
    if not is_program and not problem.entry_point.isidentifier():
        raise InputError("The entry point is not a name.")
    if not problem.instruction:
        raise InputError("The row has no instruction.")
    return problem


def _shape_of(row: Row) -> str:
    named = row.get("data_set")
    for name in (named, *_FIELDS) if isinstance(named, str) and named in _FIELDS else _FIELDS:
        if all(any(f in row for f in field.split("|")) for field in _FIELDS[name]):
            return name
    raise InputError(
        f"The fields {', '.join(map(str, list(row)[:12])) or '(none)'} are those of no data set.",
        hint=f"Known: {', '.join(_FIELDS)}; a key data_set says which one is meant.",
    )


def _opc(row: Row) -> Problem:
    entry_point = text_of(row, "entry_point")
    tests = _all_hoistable(_texts(row["testcase"]), entry_point)
    visible = row.get("visible")
    return Problem(
        "opc",
        text_of(row, "instruction"),
        entry_point,
        tests,
        visible if isinstance(visible, int) and 0 <= visible <= len(tests) else len(tests) // 2,
        _code(row, "code"),
        _code(row, "output"),
    )


def _mbpp(row: Row) -> Problem:
    sources = _texts(row["test_list"])
    entry_point = _called(sources, text_of(row, "code"))
    _refuse_setup(row)
    tests = _all_hoistable(sources, entry_point)
    return Problem(
        "mbpp",
        text_of(row, "text", "prompt"),
        entry_point,
        tests,
        len(tests) // 2,
        _code(row, "code"),
    )


def _mbpp_plus(row: Row) -> Problem:
    entry_point = _called(_texts(row["test_list"]), text_of(row, "code"))
    sources = list(tests_of_script(text_of(row, "test"), entry_point))
    tests = _some_hoistable(sources, entry_point)
    return Problem(
        "mbpp_plus",
        text_of(row, "prompt", "text"),
        entry_point,
        tests,
        len(tests) // 2,
        _code(row, "code"),
        left_out=len(sources) - len(tests),
    )


def _human_eval(row: Row) -> Problem:
    entry_point = text_of(row, "entry_point")
    prompt = row["prompt"] if isinstance(row["prompt"], str) else ""
    sources = list(tests_of_check(text_of(row, "test"), entry_point))
    tests = _some_hoistable(sources, entry_point)
    solution = row.get("canonical_solution")
    return Problem(
        "humaneval",
        f"Complete this function.\n\n```python\n{prompt.strip()}\n```" if prompt.strip() else "",
        entry_point,
        tests,
        len(tests) // 2,
        prompt + solution if isinstance(solution, str) and solution.strip() else None,
        preamble=_preamble(prompt, entry_point),
        left_out=len(sources) - len(tests),
    )


def _all_hoistable(sources: list[str], entry_point: str) -> tuple[str, ...]:
    for source in sources:
        try:
            hoisted(source, entry_point)
        except NotHoistable as error:
            raise InputError(f"A test cannot be judged outside of the program: {error}.") from error
    return _bounded(iter(sources))


def _some_hoistable(sources: list[str], entry_point: str) -> tuple[str, ...]:
    return _bounded(source for source in sources if _is_hoistable(source, entry_point))


def _is_hoistable(source: str, entry_point: str) -> bool:
    try:
        return bool(hoisted(source, entry_point))
    except NotHoistable:
        return False


def _bounded(sources: Iterator[str]) -> tuple[str, ...]:
    tests: list[str] = []
    left = MAX_TESTS_CHARACTERS
    for source in sources:
        left -= len(source)
        if left < 0 or len(tests) == MAX_TESTS:
            break
        tests.append(source.strip())
    if not tests:
        raise InputError("The row has no test that can be judged.")
    return tuple(tests)


def _called(sources: list[str], code: str) -> str:
    """The function that the asserts are about: of those that `code` defines, the one they call."""
    defined = defined_names(code)
    names: list[str] = []
    for source in sources:
        tree = parsed(source)
        names += [
            node.func.id
            for node in (ast.walk(tree) if tree else ())
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
            and (node.func.id in defined or not code)
        ]  # fmt: skip
    if not names:
        raise InputError("The tests call no function of the reference.")
    return max(names, key=names.count)


def _refuse_setup(row: Row) -> None:
    """Imports the calls get by themselves; whatever else a set-up does, they would lack."""
    tree = parsed(text_of(row, "test_setup_code"))
    if tree is None or any(not isinstance(s, ast.Import | ast.ImportFrom) for s in tree.body):
        raise InputError("A test cannot be judged outside of the program: it needs a set-up.")


def _preamble(prompt: str, entry_point: str) -> str:
    """Returns the definitions in a prompt before the function itself."""
    tree = parsed(prompt)
    before = [
        statement
        for statement in (tree.body if tree else [])
        if not (isinstance(statement, ast.FunctionDef) and statement.name == entry_point)
    ]
    return "\n".join(ast.unparse(statement) for statement in before)


def _code(row: Row, key: str) -> str | None:
    value = row.get(key)
    return value if isinstance(value, str) and value.strip() else None


def _texts(value: Any) -> list[str]:
    """A list of texts, which some files hold as one text."""
    if isinstance(value, str):
        try:
            value = ast.literal_eval(value)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            value = value.splitlines()
    if not isinstance(value, list | tuple) or not all(isinstance(part, str) for part in value):
        raise InputError("The tests are not a list of asserts.")
    return [part for part in value if part.strip()]


CONSTANTS: tuple[Any, ...] = (True, False, None, 0, 1, -1, "", [], {}, ())


def a_constant_passes(problem: Problem) -> bool:
    """Returns whether a program with a constant result passes all tests."""
    if not problem.entry_point:
        return len({test["output"].strip() for test in problem.tests if isinstance(test, dict)}) < 2
    tests = [hoisted(test, problem.entry_point) for test in problem.tests if isinstance(test, str)]
    wanted = [test.wanted for test in tests[:1] if test.wanted is not None]
    return any(
        all(test.holds(dict.fromkeys(range(len(test.calls)), value)) for test in tests)
        for value in (*CONSTANTS, *wanted)
    )


def normalised(instruction: str) -> str:
    """Normalises case, spaces and punctuation."""
    return " ".join(re.findall(r"\w+", instruction.lower()))


_READERS: dict[str, Callable[[Row], Problem]] = {
    "opc": _opc,
    "mbpp_plus": _mbpp_plus,
    "mbpp": _mbpp,
    "humaneval": _human_eval,
    "humaneval_plus": _human_eval,
    "pairs": read_pairs,
}
_FIELDS: dict[str, tuple[str, ...]] = {
    "opc": ("instruction", "entry_point", "testcase"),
    "mbpp_plus": ("text|prompt", "code", "test_list", "test"),
    "mbpp": ("text|prompt", "test_list"),
    "humaneval": ("prompt", "entry_point", "test"),
    "humaneval_plus": ("prompt", "entry_point", "test"),
    "pairs": ("|".join(TEXTS), "|".join(SOURCES)),
}
