"""Rows whose tests are inputs and outputs of a program (stdin, stdout) or a function.

In: a row. Out: a Problem whose tests are pairs, or asserts if the row names a function. Known:

    input_output                           {"inputs": [], "outputs": [], "fn_name"}: APPS, TACO
    tests, verification_info.test_cases    [{"input", "output"}, ...], which may name the function
                                           (`fn_name`, `metadata.func_name`)
    public_test_cases, private_test_cases  the same, as in LiveCodeBench, also packed
    public_tests, private_tests, ...       {"input": [...], "output": [...]}: CodeContests

each as JSON text or as an object. Tests marked public are visible, else the first half.
"""

from __future__ import annotations

import base64
import io
import json
import pickle
import re
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from envserver import InputError

from .hoisting import NotHoistable, hoisted
from .problem import Pair, Problem, Test, text_of

TEXTS = (
    "instruction", "question_content", "question", "prompt", "problem", "description", "text",
)  # fmt: skip
"""Fields that may hold the instruction; the first present one counts."""
SOURCES = ("input_output", "tests", "public_test_cases", "public_tests", "verification_info")
"""Fields of tests; the first that is there says what shape the row has."""

MAX_PAIRS = 40
MAX_PAIR_CHARACTERS = 2**20
MAX_CHARACTERS = 2**21
MAX_PACKED_BYTES = 64 * 2**20
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
PYTHON3 = 3
"""CodeContests' number for the language of a solution."""


def read_pairs(row: dict[str, Any]) -> Problem:
    """The problem in `row`.

    Raises:
        InputError: it has no tests of these shapes.
    """
    public, private, name = _TESTS_OF[next(source for source in SOURCES if source in row)](row)
    name = text_of(row, "fn_name", "entry_point") or name
    if name and not name.isidentifier():
        raise InputError("The entry point is not a name.")
    tests, visible, left_out = _kept([_test(t, name) for t in public], private, name)
    starter = text_of(row, "starter_code")
    shown = f"\n\nBegin with:\n\n```python\n{starter}\n```" if starter and name else ""
    text = text_of(row, *TEXTS)
    return Problem(
        "pairs",
        text + shown if text else "",
        name,
        tests,
        visible,
        _reference(row),
        preamble=IMPORTS if "class Solution" in starter else "",
        left_out=left_out,
        seconds=_seconds(row.get("time_limit")),
    )


def _kept(
    public: list[Test | None], private: list[tuple[Any, Any]], name: str
) -> tuple[tuple[Test, ...], int, int]:
    """Tests within our limits, how many of them are visible, and how many were left out."""
    tests = [*public, *(_test(test, name) for test in private)]
    kept: list[Test] = []
    visible, left = 0, MAX_CHARACTERS
    for place, test in enumerate(tests):
        size = _size(test)
        if test is None or size > min(left, MAX_PAIR_CHARACTERS) or len(kept) == MAX_PAIRS:
            continue
        if test in kept:
            continue
        left -= size
        kept.append(test)
        visible += place < len(public)
    if not kept:
        raise InputError("The row has no test that can be judged.")
    # Where nothing would be hidden, half is.
    if visible == len(kept) or not public:
        visible = len(kept) // 2
    return tuple(kept), visible, len(tests) - len(kept)


def _size(test: Test | None) -> int:
    return len(test) if isinstance(test, str) else sum(map(len, (test or {}).values()))


def _test(test: tuple[Any, Any], name: str) -> Test | None:
    """Returns a program's pair, a function's assert, or None if it is neither."""
    given, wanted = test
    if name:
        return _assert(given, wanted, name)
    pair: Pair = {"input": _lines(given), "output": _lines(wanted)}
    return pair


def _lines(value: Any) -> str:
    """Some rows hold the lines one by one."""
    if isinstance(value, list):
        return "\n".join(str(line).removesuffix("\n") for line in value) + "\n"
    return value if isinstance(value, str) else str(value)


def _assert(arguments: Any, wanted: Any, name: str) -> str | None:
    # The sites that such tasks come from take a decimal that is this near.
    tolerance = ", 1e-05" if _has_decimals(wanted) else ""
    source = f"assert close({name}(*{arguments!r}), {wanted!r}{tolerance})"
    try:
        return source if isinstance(arguments, list) and hoisted(source, name) else None
    except NotHoistable:
        return None


def _has_decimals(value: Any) -> bool:
    items = value.values() if isinstance(value, dict) else value
    inside = isinstance(value, list | tuple | dict) and any(map(_has_decimals, items))
    return isinstance(value, float) or inside


Tests = list[tuple[Any, Any]]
"""Inputs (of a function: its arguments) and outputs."""


def _of_input_output(row: dict[str, Any]) -> tuple[Tests, Tests, str]:
    content = _read(row["input_output"])
    if not isinstance(content, dict):
        raise InputError("The tests are not inputs and outputs.")
    found = _zipped(content.get("inputs"), content.get("outputs"))
    name = str(content.get("fn_name") or "")
    if name:
        # Each value is in a list of its own.
        wrapped = all(isinstance(wanted, list) and len(wanted) == 1 for _, wanted in found)
        found = [(_read(given), _unwrapped(_read(w), wrapped)) for given, w in found]
    return [], found, name


def _unwrapped(value: Any, wrapped: bool) -> Any:
    return value[0] if wrapped and isinstance(value, list) and value else value


def _of_tests(row: dict[str, Any]) -> tuple[Tests, Tests, str]:
    content = _read(row["tests"])
    if isinstance(content, dict):
        return _of_input_output({**row, "input_output": content})
    first = content[0] if isinstance(content, list) and content else None
    name = _name_in(first, row) if isinstance(first, Mapping) else ""
    found = list(_objects(content, bool(name or text_of(row, "fn_name", "entry_point"))))
    if isinstance(first, Mapping) and first.get("fn_name"):  # each value in a list of its own
        wrapped = all(isinstance(wanted, list) and len(wanted) == 1 for _, wanted in found)
        found = [(given, _unwrapped(wanted, wrapped)) for given, wanted in found]
    return [], found, name


def _name_in(test: Mapping[str, Any], row: dict[str, Any]) -> str:
    """The function that a test calls, if it or its row says one."""
    for place in (test, _read(test.get("metadata")), _read(row.get("metadata"))):
        if isinstance(place, Mapping) and (name := place.get("fn_name") or place.get("func_name")):
            return str(name)
    return ""


def _of_verification(row: dict[str, Any]) -> tuple[Tests, Tests, str]:
    content = _read(row["verification_info"])
    if not isinstance(content, Mapping):
        raise InputError("The tests are not inputs and outputs.")
    return _of_tests({**row, "tests": content.get("test_cases")})


def _of_cases(row: dict[str, Any]) -> tuple[Tests, Tests, str]:
    metadata = _read(row.get("metadata") or "{}")
    name = str(metadata.get("func_name") or "") if isinstance(metadata, dict) else ""
    private = row.get("private_test_cases") or "[]"
    public = list(_objects(_read(row["public_test_cases"]), bool(name)))
    return public, list(_objects(_read(private, packed=True), bool(name))), name


def _of_contests(row: dict[str, Any]) -> tuple[Tests, Tests, str]:
    public, *others = (
        _zipped(content.get("input"), content.get("output"))
        for content in (_read(row.get(f"{k}_tests")) for k in ("public", "private", "generated"))
        if isinstance(content, dict)
    )
    return public, [test for tests in others for test in tests], ""


_READERS = (_of_input_output, _of_tests, _of_cases, _of_contests, _of_verification)
_TESTS_OF = dict(zip(SOURCES, _READERS, strict=True))


def _zipped(given: Any, wanted: Any) -> Tests:
    if not isinstance(given, list) or not isinstance(wanted, list) or len(given) != len(wanted):
        raise InputError("The tests are not inputs and outputs.")
    return list(zip(given, wanted, strict=True))


def _objects(tests: Any, calls: bool) -> Iterator[tuple[Any, Any]]:
    """Parses the input of a call as JSON: a list of arguments, or one argument per line."""
    if not isinstance(tests, list):
        raise InputError("The tests are not inputs and outputs.")
    for test in tests:
        if not isinstance(test, Mapping) or not {"input", "output"} <= test.keys():
            raise InputError("The tests are not inputs and outputs.")
        given, wanted = test["input"], test["output"]
        if calls and isinstance(given, str):
            given = [_read(line) for line in given.splitlines() if line.strip()]
        yield given, _read(wanted) if calls else wanted


def _read(value: Any, *, packed: bool = False) -> Any:
    """Parses JSON text; returns other values unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        if packed:
            return _read(_unpacked(value))
        raise InputError("The tests are not JSON.") from error


class _TextOnly(pickle.Unpickler):
    """Reads plain values; whatever would import or call something is refused."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"{module}.{name} is not text")


def _unpacked(text: str) -> str:
    """LiveCodeBench packs its private tests: a pickled text, compressed, in base 64."""
    try:
        unzipped = zlib.decompressobj().decompress(base64.b64decode(text), MAX_PACKED_BYTES)
        found = _TextOnly(io.BytesIO(unzipped)).load()
    except Exception as error:  # a broken pickle raises whatever it likes
        raise InputError("The private tests cannot be unpacked.") from error
    if not isinstance(found, str):
        raise InputError("The private tests cannot be unpacked.")
    return found


def _reference(row: dict[str, Any]) -> str | None:
    """The first solution in Python that the row has."""
    code = text_of(row, "code", "solution", "gold_standard_solution")
    if code:
        return code
    solutions = row.get("solutions")
    if isinstance(solutions, str):
        solutions = _read(solutions or "[]")
    if isinstance(solutions, Mapping):
        pairs = _zipped(solutions.get("language"), solutions.get("solution"))
        solutions = [text for language, text in pairs if language == PYTHON3]
    if isinstance(solutions, list) and solutions and isinstance(solutions[0], str):
        return solutions[0]
    return None


def _seconds(limit: Any) -> float | None:
    """A limit of time as a number, in words ("6.0 seconds"), or as CodeContests writes it."""
    said = (
        re.match(r"\s*(\d+(?:\.\d+)?)\s*(m(?:illi)?)?s", limit) if isinstance(limit, str) else None
    )
    if said:
        limit = float(said[1]) / (1000 if said[2] else 1)
    if isinstance(limit, Mapping):
        return float(limit.get("seconds") or 0) + float(limit.get("nanos") or 0) / 1e9 or None
    return float(limit) if isinstance(limit, int | float) and limit > 0 else None
