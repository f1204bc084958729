"""Converts rows to `Problem`s. The tests decide what is to be written: the function that they name
or call, else a program that reads and prints. Tests that cannot be split into calls and claims are
left out."""

from __future__ import annotations

import ast
import base64
import copy
import json
import pickletools
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envserver_environments.rows import (
    DataSets,
    Division,
    Row,
    decoded,
    last_message,
    missing,
    published,
    roles_of,
    value_at,
)
from envserver_records.tasks import Json

from envserver import InputError

from .expressions import FUNCTIONS
from .extraction import defined_names, extract_code, parsed
from .hoisting import Filler, NotHoistable, Values, bound, hoisted, turns

MAX_INSTRUCTION_CHARACTERS = 4000
Pair = dict[str, str]
Test = str | Pair
"""An assert on a function, or a pair for a program."""


@dataclass(frozen=True)
class Problem:
    """A function or a whole program to be written."""

    data_set: str
    instruction: str
    entry_point: str  # the function's name; "": a program that reads and prints
    tests: tuple[Test, ...]
    visible: int  # number of tests, from the first, that the model's tools have
    code: str | None = None  # a reference that passes the tests
    output: str | None = None  # a full answer, as a model would give it
    preamble: str = ""  # definitions that the program may rely on
    left_out: int = 0  # number of the row's tests that cannot be judged
    seconds: float | None = None  # CPU seconds of a program for one pair; None: the default


# Names that were set before, loops over literals and pytest's parameters are written out, so that
# each assert stands for itself. Comparisons of EvalPlus, `assertion(given, wanted, tolerance)`, are
# asserts that take near decimals.


def asserts_of(source: str, name: str) -> Iterator[str]:
    """The asserts in `source` about the function `name`; some may need more than its calls."""
    tree = parsed(source.strip(), limit=None)
    body = tree.body if tree else []
    values: Values = {}
    yield from _asserts(body, values)
    for function in _functions(body):
        first = [argument.arg for argument in function.args.args[:1]]
        if function.name == "check":
            yield from _asserts(function.body, {**values, **dict.fromkeys(first, ast.Name(name))})
        elif function.name.startswith("test"):
            for parameters in _parameters(function, values):
                yield from _asserts(function.body, {**values, **parameters})


def _functions(body: list[ast.stmt]) -> Iterator[ast.FunctionDef]:
    for statement in body:
        if isinstance(statement, ast.FunctionDef):
            yield statement
        elif isinstance(statement, ast.ClassDef):
            yield from _functions(statement.body)


def _parameters(function: ast.FunctionDef, values: Values) -> Iterator[Values]:
    match function.decorator_list:
        case [ast.Call(func=ast.Attribute(attr="parametrize"), args=[names, rows])]:
            tree = parsed(re.sub("['\"]", "", ast.unparse(names)))
            match tree.body if tree else []:
                case [ast.Expr(value=target)]:
                    yield from turns(target, _filled(rows, values)) or [{}]
        case _:
            yield {}


def _asserts(body: list[ast.stmt], values: Values) -> Iterator[str]:
    """The asserts of a block; `values` are the names that it knows, and changes."""
    for statement in body:
        match statement:
            case ast.Assign(targets=[target], value=value) if names := bound(
                target, _filled(value, values)
            ):
                values.update(names)
            case ast.Assert(
                test=ast.Compare(
                    left=given,
                    ops=[ast.Eq()],
                    comparators=[ast.Call(func=ast.Attribute(attr="approx"), args=[wanted])],
                )
            ):
                yield f"assert close({_text(given, values)}, {_text(wanted, values)})"
            case ast.Assert(test=test):
                yield f"assert {_text(test, values)}"
            case ast.Expr(ast.Call(func=ast.Name(id="assertion"), args=[given, wanted, *near])):
                pair = f"{_text(given, values)}, {_text(wanted, values)}"
                yield f"assert close({pair}, max(1e-06, {_text(near[0], values) if near else 0}))"
            case ast.For(target=target, iter=items, body=inner):
                for turn in turns(target, _filled(items, values)) or [{}]:
                    yield from _asserts(inner, {**values, **turn})
                _forget(statement, values)
            case ast.FunctionDef() | ast.ClassDef() | ast.Import() | ast.ImportFrom():
                continue
            case _:
                _forget(statement, values)


def _forget(statement: ast.stmt, values: Values) -> None:
    """Drops what a statement mentions and may change, but for the function itself."""
    for node in ast.walk(statement):
        if isinstance(node, ast.Name) and not isinstance(values.get(node.id), ast.Name):
            values.pop(node.id, None)


def _filled(node: ast.expr, values: Values) -> ast.expr:
    filled: ast.expr = _Filler(values).visit(copy.deepcopy(node))
    return filled


class _Filler(Filler):
    """Also calls a method of a class Solution, or of the module that is tested, by its name."""

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        filled = self.generic_visit(node)
        match filled:
            case ast.Attribute(
                value=ast.Name(id="solution") | ast.Call(func=ast.Name(id="Solution")), attr=name
            ):
                return ast.Name(name, ast.Load())
        return filled


def _text(node: ast.expr, values: Values) -> str:
    return ast.unparse(_filled(node, values))


# The tests of a row, in every published form, each as an object, as JSON text, or packed as
# LiveCodeBench does:
#
#     [{"input", "output"}, ...], {"input": [], "output": []}    pairs; {"inputs", "outputs"}, too
#     ["assert f(1) == 2", ...]                                  asserts
#     "def check(candidate): ...", "def test_f(): ..."           Python (see `asserts_of`)
#     {"test_cases": ..., "fn_name": "f"}                        any of these, with the function


MAX_PAIRS = 40
MAX_ASSERTS = 100
MAX_PAIRS_CHARACTERS = 2**21
MAX_ASSERTS_CHARACTERS = 200_000
MAX_PACKED_BYTES = 64 * 2**20
NAMES = (
    *("entry_point", "fn_name", "func_name", "function_name"),
    *("metadata.func_name", "metadata.fn_name"),
)
_HOLDERS = (
    "test_cases",
    "tests",
    "testcases",
    "functional",
    "assert_case",
    "input_output",
    "test_code",
)
_PAIRS = (("input", "output"), ("input", "expected_output"), ("stdin", "stdout"))
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')
_PACKED = re.compile(r"[A-Za-z0-9+/]{8,}={0,2}")
_PLAIN_TEXT = {
    "PROTO", "FRAME", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "MEMOIZE", "BINPUT",
    "LONG_BINPUT", "STOP",
}  # fmt: skip


@dataclass(frozen=True)
class RowTests:
    """Tests as a row has them."""

    pairs: tuple[tuple[Any, Any], ...] = ()  # inputs (of a function: its arguments) and outputs
    scripts: tuple[str, ...] = ()  # Python with asserts
    name: str = ""  # the function, "" where the tests do not say one

    def made(self, name: str) -> list[Test | None]:
        """The tests of the function `name` ("": of a program); None: it cannot be judged."""
        if not name:
            return [
                None if wanted is None else {"input": _lines(given), "output": _lines(wanted)}
                for given, wanted in self.pairs
            ]
        sources: list[str | None] = []
        for script in self.scripts:
            sources += asserts_of(script, name)
        sources += [_assert(given, wanted, name) for given, wanted in self._calls()]
        return [source if _is_hoistable(source, name) else None for source in sources]

    def _calls(self) -> Iterator[tuple[Any, Any]]:
        # Where tests name the function as APPS does, each result is in a list of its own.
        outputs = [wanted for _, wanted in self.pairs]
        wrapped = self.name and all(
            isinstance(output, list) and len(output) == 1 for output in outputs
        )
        for given, wanted in self.pairs:
            yield _call(given, wanted[0], True) if wrapped else _call(given, wanted, False)


def read_tests(value: Any) -> RowTests:
    value = _unpacked(value) if isinstance(value, str) and _PACKED.fullmatch(value) else value
    match decoded(value):
        case str(script):
            return RowTests(scripts=(script,))
        case [str(), *_] as scripts if all(isinstance(script, str) for script in scripts):
            return RowTests(scripts=tuple(scripts))
        case {"inputs": given, "outputs": wanted} | {"input": given, "output": wanted} as found:
            given, wanted = decoded(given), decoded(wanted)
            if isinstance(given, list) and isinstance(wanted, list) and len(given) == len(wanted):
                return RowTests(tuple(zip(given, wanted, strict=True)), name=_name_in(found))
        case Mapping() as found:
            inner = next((found[name] for name in _HOLDERS if found.get(name)), None)
            if inner is not None:
                tests = read_tests(inner)
                return RowTests(tests.pairs, tests.scripts, tests.name or _name_in(found))
        case [Mapping() as first, *_] as tests if all(isinstance(test, Mapping) for test in tests):
            for given, wanted in _PAIRS:
                if all({given, wanted} <= test.keys() for test in tests):
                    pairs = tuple((test[given], test[wanted]) for test in tests)
                    lists = tuple(
                        (decoded(argument), decoded(output)) for argument, output in pairs
                    )
                    if first.get("fn_name") and all(
                        isinstance(value, list) for pair in lists for value in pair
                    ):
                        pairs = lists
                    return RowTests(pairs, name=_name_in(first))
    raise InputError("The tests are neither pairs of input and output, nor asserts, nor Python.")


def kept(
    public: list[Test | None], hidden: list[Test | None], *, is_program: bool
) -> tuple[tuple[Test, ...], int, int]:
    """Tests within our limits, how many of them are visible, and how many were left out."""
    most = MAX_PAIRS if is_program else MAX_ASSERTS
    left = MAX_PAIRS_CHARACTERS if is_program else MAX_ASSERTS_CHARACTERS
    largest = left // 2
    tests: list[Test] = []
    visible = 0
    for place, test in enumerate([*public, *hidden]):
        size = len(test) if isinstance(test, str) else sum(map(len, (test or {}).values()))
        if test is None or size > min(left, largest) or len(tests) == most or test in tests:
            continue
        left -= size
        tests.append(test)
        visible += place < len(public)
    if not tests:
        raise InputError("The row has no test that can be judged.")
    pairs = [test for test in tests if isinstance(test, dict)]
    given = {pair["input"].strip() for pair in pairs}
    if len({(pair["input"].strip(), *pair["output"].split()) for pair in pairs}) > len(given):
        raise InputError("Two of its tests have the same input and different outputs.")
    # Where nothing would be hidden, half is.
    if visible == len(tests) or not visible:
        visible = len(tests) // 2
    return tuple(tests), visible, len(public) + len(hidden) - len(tests)


def _name_in(tests: Mapping[str, Any]) -> str:
    return next((str(name) for field in NAMES if (name := value_at(tests, field))), "")


def _lines(value: Any) -> str:
    if not isinstance(value, list):
        return "" if value is None else str(value)
    lines = [" ".join(map(str, line)) if isinstance(line, list) else str(line) for line in value]
    return "\n".join(line.removesuffix("\n") for line in lines) + "\n"


def _value(text: str) -> Any:
    for parse in (json.loads, ast.literal_eval):
        with suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            return parse(text)
    raise ValueError(text)


def _call(given: Any, wanted: Any, is_value: bool) -> tuple[Any, Any]:
    """Arguments and result, as values or texts of values: an argument without quotes shows that
    they are values."""
    texts = (
        [argument for argument in given if isinstance(argument, str)]
        if isinstance(given, list)
        else []
    )
    if texts and all(_QUOTED.fullmatch(text) for text in texts):
        return [_result(argument) for argument in given], _result(wanted)
    return _arguments(given), wanted if texts or is_value else _result(wanted)


def _arguments(given: Any) -> Any:
    """The arguments of a call: a list, from texts line by line; other text is Python's."""
    if not isinstance(given, str):
        return given
    lines = [line for line in given.splitlines() if line.strip()]
    try:
        return [_value(line) for line in lines]
    except ValueError:
        return ", ".join(lines)  # nums = [3, 3], target = 6


def _result(wanted: Any) -> Any:
    try:
        return _value(wanted) if isinstance(wanted, str) else wanted
    except ValueError:
        return wanted


def _assert(arguments: Any, wanted: Any, name: str) -> str | None:
    if not isinstance(arguments, list | str):
        return None
    call = f"{name}({arguments})" if isinstance(arguments, str) else f"{name}(*{arguments!r})"
    # The sites that such tasks come from take a decimal that is this near.
    tolerance = ", 1e-05" if _has_decimals(wanted) else ""
    return f"assert close({call}, {wanted!r}{tolerance})"


def _has_decimals(value: Any) -> bool:
    items = value.values() if isinstance(value, dict) else value
    inside = isinstance(value, list | tuple | dict) and any(map(_has_decimals, items))
    return isinstance(value, float) or inside


def _is_hoistable(source: str | None, name: str) -> bool:
    try:
        return source is not None and bool(hoisted(source, name))
    except NotHoistable:
        return False


def _unpacked(text: str) -> str:
    """LiveCodeBench packs private tests: a pickled text, compressed, in base 64. The pickle is
    read, never executed."""
    try:
        packed = base64.b64decode(text, validate=True)
        pickled = zlib.decompressobj().decompress(packed, MAX_PACKED_BYTES)
        steps = [(step.name, value) for step, value, _ in pickletools.genops(pickled)]
    except (ValueError, zlib.error) as error:
        raise InputError("The tests cannot be unpacked.") from error
    texts = [value for name, value in steps if name.endswith(("UNICODE", "UNICODE8"))]
    if len(texts) != 1 or {name for name, _ in steps} - _PLAIN_TEXT:
        raise InputError("The tests cannot be unpacked.")
    return str(texts[0])


ROLES, HUBS = published(__file__)
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
_CHECKED = re.compile(r"^\s*check\((\w+)\)\s*$", re.MULTILINE)
PYTHON3 = 3
"""CodeContests' number for the language of a solution."""


def read_problem(
    row: Row, data_set: str = "rows", columns: Mapping[str, str] | None = None
) -> Problem:
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
        instruction = f"Complete this function.\n\n```python\n{text.strip()}\n```"
    else:
        instruction = text.strip()
        if starter and name:
            instruction += f"\n\nBegin with:\n\n```python\n{starter}\n```"
    named = [str(found.get("entry_point")), *(part.name for part in hidden)]
    in_class = "class Solution" in starter or any("Solution()" in name for name in named)
    given, answer = row.get("visible"), row.get("output")
    return Problem(
        str(row.get("data_set") or data_set),
        instruction,
        name,
        tests,
        given if isinstance(given, int) and 0 <= given <= len(tests) else visible,
        code,
        answer if isinstance(answer, str) and "```" in answer else None,
        preamble=IMPORTS if in_class else _preamble(text, name) if is_stub else "",
        left_out=left_out,
        seconds=_seconds(found.get("time_limit")),
    )


def _instruction(found: Json) -> str:
    text = last_message(found.get("instruction"))
    if not isinstance(text, str):
        return ""
    for role in ("input_format", "output_format"):  # Codeforces has them apart
        if (part := str(found.get(role, "")).strip()) not in text:
            text = f"{text.rstrip()}\n\n{role.removesuffix('_format').capitalize()}: {part}"
    return text


def _tests(row: Row, found: Json) -> tuple[list[RowTests], list[RowTests]]:
    if "checker" in found or row.get("input_mode") == "file":
        raise InputError("Its outputs need a checker, or files, of their own.")
    given = [found[role] for role in ("tests", "more_tests") if role in found]
    # Codeforces has the number of its generated tests.
    hidden = [
        read_tests(part) for part in given if not isinstance(part, int) and decoded(part) != []
    ]
    try:
        public = [read_tests(found["public_tests"])] if "public_tests" in found else []
    except InputError:  # examples in prose
        public = []
    if hidden or public:
        return public, hidden
    if {"inputs", "outputs"} - row.keys():
        raise missing(row, ["tests"])
    return [], [read_tests(row)]


def _entry_point(found: Json, tests: list[RowTests], starter: str, code: str) -> str:
    name = found.get("entry_point") or next((test.name for test in tests if test.name), "")
    if isinstance(name, str) and name:
        return name.strip().rpartition(".")[2]
    scripts = [script for test in tests for script in test.scripts]
    if scripts and not any(parsed(script.strip(), limit=None) for script in scripts):
        raise InputError("The tests are not Python.")
    if checked := [checked_name for script in scripts for checked_name in _CHECKED.findall(script)]:
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
    tree = parsed(stub)
    before = [
        statement
        for statement in (tree.body if tree else [])
        if not (isinstance(statement, ast.FunctionDef) and statement.name == entry_point)
    ]
    return "\n".join(ast.unparse(statement) for statement in before)


def _reference(value: Any) -> str | None:
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
    if not problem.entry_point:
        return len({test["output"].strip() for test in problem.tests if isinstance(test, dict)}) < 2
    tests = [hoisted(test, problem.entry_point) for test in problem.tests if isinstance(test, str)]
    wanted = [test.wanted for test in tests[:1] if test.wanted is not None]
    return any(
        all(test.holds(dict.fromkeys(range(len(test.calls)), value)) for test in tests)
        for value in (*CONSTANTS, *wanted)
    )


def normalised(instruction: str) -> str:
    return " ".join(re.findall(r"\w+", instruction.lower()))


SAMPLE = Path(__file__).parent / "data" / "sample.jsonl"


DATA = DataSets(SAMPLE, HUBS, {"opc": Division()})
