"""Converts rows of data sets to `Problem`, by what their fields are. Pure; runs nothing.

The tests decide what is to be written: a function that they name or call, else a program that reads
and prints. Tests that cannot be split into calls and claims are left out.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from envserver_environments.roles import decoded, last_message, missing, roles_of, table_of
from envserver_environments.rows import Row

from envserver import InputError

from .check_functions import asserts_of
from .extraction import defined_names, extract_code, parsed
from .hoisting import hoisted
from .problem import Problem
from .row_tests import NAMES, RowTests, kept, read_tests
from .vocabulary import FUNCTIONS

ROLES = table_of(
    instruction=(
        "instruction, question_content, problem_description, question, description, problem, "
        "text, problem_statement, extra_info.question, prompt, query, input, messages"
    ),
    entry_point=", ".join((*NAMES, "test_info.function_name")),
    tests=(
        "test, testcase, official_tests, input_output, tests, test_cases, testcases, "
        "verification_info.test_cases, verification_info.ground_truth, private_test_cases, "
        "private_tests, unit_tests, hidden_unit_tests, test_list, reward_model.ground_truth, "
        "ground_truth, extra_info.ground_truth"
    ),
    more_tests="generated_tests",
    public_tests="public_test_cases, public_tests, examples",
    starter="starter_code",
    code=(
        "code, solution, canonical_solution, gold_standard_solution, solutions, completion, "
        "reference_solution, extra_info.solution, output, response"
    ),
    input_format="input_format, input_spec",
    output_format="output_format, output_spec",
    time_limit="time_limit, time_limit_seconds",
    checker="generated_checker, checker, interaction_format, input_file, output_file",
)
"""Names of each role in published sets, after their cards."""
IMPORTS = """\
from typing import *
from collections import *
from functools import *
from itertools import *
from math import *
import bisect, collections, functools, heapq, itertools, math, re, string
from bisect import *
from heapq import *
"""
"""Imports that programs with a `class Solution` rely on."""
_CHECKED = re.compile(r"^\s*check\((\w+)\)\s*$", re.MULTILINE)
PYTHON3 = 3
"""CodeContests' number for the language of a solution."""


def read_problem(
    row: Row, data_set: str = "rows", columns: Mapping[str, str] | None = None
) -> Problem:
    """The problem in `row`.

    Args:
        data_set: a name for rows that do not have one.
        columns: the row's fields by role (`ROLES`), where its names are unknown.
    """
    found = roles_of(row, ROLES, columns or {})
    text = _instruction(found)
    if not text:
        raise missing(row, ["instruction"])
    public, hidden = _tests(row, found)
    starter = str(found.get("starter", "")).strip()
    code = _reference(found.get("code"))
    name = _entry_point(found, [*public, *hidden], starter, code or "")
    if name and not name.isidentifier():
        raise InputError("The entry point is not a name.")
    judged = [[test for tests in part for test in tests.made(name)] for part in (public, hidden)]
    tests, visible, left_out = kept(*judged, is_program=not name)
    is_stub = bool(name) and name in defined_names(text)
    if is_stub:
        if code and name not in defined_names(code):
            code = text + code
        asked = f"Complete this function.\n\n```python\n{text.strip()}\n```"
    else:
        asked = text.strip()
        if starter and name:
            asked += f"\n\nBegin with:\n\n```python\n{starter}\n```"
    named = [str(found.get("entry_point")), *(one.name for one in hidden)]
    in_class = "class Solution" in starter or any("Solution()" in one for one in named)
    given, answer = row.get("visible"), row.get("output")
    return Problem(
        str(row.get("data_set") or data_set),
        asked,
        name,
        tests,
        given if isinstance(given, int) and 0 <= given <= len(tests) else visible,
        code,
        answer if isinstance(answer, str) and "```" in answer else None,
        preamble=IMPORTS if in_class else _preamble(text, name) if is_stub else "",
        left_out=left_out,
        seconds=_seconds(found.get("time_limit")),
    )


def _instruction(found: Mapping[str, Any]) -> str:
    text = last_message(found.get("instruction"))
    if not isinstance(text, str):
        return ""
    for role in ("input_format", "output_format"):  # Codeforces has them apart
        if (part := str(found.get(role, "")).strip()) not in text:
            text = f"{text.rstrip()}\n\n{role.removesuffix('_format').capitalize()}: {part}"
    return text


def _tests(row: Row, found: Mapping[str, Any]) -> tuple[list[RowTests], list[RowTests]]:
    """The tests that the row calls public, and the others."""
    if "checker" in found or row.get("input_mode") == "file":
        raise InputError("Its outputs need a checker, or files, of their own.")
    given = [found[role] for role in ("tests", "more_tests") if role in found]
    # Codeforces has the number of its generated tests.
    hidden = [read_tests(one) for one in given if not isinstance(one, int) and decoded(one) != []]
    try:
        public = [read_tests(found["public_tests"])] if "public_tests" in found else []
    except InputError:  # examples in prose
        public = []
    if hidden or public:
        return public, hidden
    if {"inputs", "outputs"} - row.keys():
        raise missing(row, ["tests"])
    return [], [read_tests(row)]


def _entry_point(found: Mapping[str, Any], tests: list[RowTests], starter: str, code: str) -> str:
    """The function that the tests call; "": they are of a program."""
    name = found.get("entry_point") or next((one.name for one in tests if one.name), "")
    if isinstance(name, str) and name:
        return name.strip().rpartition(".")[2]
    scripts = [script for one in tests for script in one.scripts]
    if scripts and not any(parsed(script.strip(), limit=None) for script in scripts):
        raise InputError("The tests are not Python.")
    if checked := [one for script in scripts for one in _CHECKED.findall(script)]:
        return str(checked[-1])
    begun = re.findall(r"def (\w+)", starter)
    if not scripts:
        return begun[0] if len(begun) == 1 and begun != ["main"] else ""
    known = defined_names(code) or {*begun}
    called = Counter(
        node.func.id
        for script in scripts
        for source in asserts_of(script, "len")  # a name that does not count
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        and (node.func.id in known if known else node.func.id not in FUNCTIONS)
    )  # fmt: skip
    if not called:
        raise InputError("The tests call no function.")
    return called.most_common(1)[0][0]


def _preamble(stub: str, entry_point: str) -> str:
    """Returns the definitions in a stub before the function itself."""
    tree = parsed(stub)
    before = [
        statement
        for statement in (tree.body if tree else [])
        if not (isinstance(statement, ast.FunctionDef) and statement.name == entry_point)
    ]
    return "\n".join(ast.unparse(statement) for statement in before)


def _reference(value: Any) -> str | None:
    """The first solution in Python."""
    value = decoded(value)
    if isinstance(value, Mapping):  # CodeContests
        pairs = zip(value.get("language") or (), value.get("solution") or (), strict=False)
        value = [text for language, text in pairs if language in (PYTHON3, "PYTHON3")]
    first = value[0] if isinstance(value, list) and value else value
    if not isinstance(first, str) or not first.strip():
        return None
    return extract_code(first, "") if "```" in first else first


def _seconds(limit: Any) -> float | None:
    """A limit of time as a number, in words ("6.0 seconds"), or as CodeContests writes it."""
    if isinstance(limit, Mapping):
        return float(limit.get("seconds") or 0) + float(limit.get("nanos") or 0) / 1e9 or None
    said = re.match(r"\s*(\d+(?:\.\d+)?)\s*(m(?:illi)?s)?", str(limit))
    return float(said[1]) / (1000 if said[2] else 1) or None if said else None


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
