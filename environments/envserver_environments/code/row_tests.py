"""Reads the tests of a row, in every form that is published. Pure.

In: the value of a field. Out: asserts on a function, or pairs of input and output.

    [{"input", "output"}, ...], {"input": [], "output": []}    pairs; {"inputs", "outputs"}, too
    ["assert f(1) == 2", ...]                                  asserts
    "def check(candidate): ...", "def test_f(): ..."           Python (see `check_functions`)
    {"test_cases": ..., "fn_name": "f"}                        any of these, with the function

each as an object, as JSON text, or packed as LiveCodeBench does.
"""

from __future__ import annotations

import ast
import base64
import json
import pickletools
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from envserver_environments.roles import decoded, value_at

from envserver import InputError

from .check_functions import asserts_of
from .hoisting import NotHoistable, hoisted
from .problem import Test

MAX_PAIRS = 40
MAX_ASSERTS = 100
MAX_PAIRS_CHARACTERS = 2**21
MAX_ASSERTS_CHARACTERS = 200_000
MAX_PACKED_BYTES = 64 * 2**20
NAMES = (
    *("entry_point", "fn_name", "func_name", "function_name"),
    *("metadata.func_name", "metadata.fn_name"),
)
"""Fields with the name of a function, in a row or beside its tests."""
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
"""Instructions of a pickle that holds one text."""


@dataclass(frozen=True)
class RowTests:
    """Tests as a row has them.

    Args:
        pairs: inputs (of a function: its arguments) and outputs.
        scripts: Python with asserts.
        name: the function, "" where the tests do not say one.
    """

    pairs: tuple[tuple[Any, Any], ...] = ()
    scripts: tuple[str, ...] = ()
    name: str = ""

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
        wrapped = self.name and all(isinstance(one, list) and len(one) == 1 for one in outputs)
        for given, wanted in self.pairs:
            yield _call(given, wanted[0], True) if wrapped else _call(given, wanted, False)


def read_tests(value: Any) -> RowTests:
    """The tests in `value`."""
    value = _unpacked(value) if isinstance(value, str) and _PACKED.fullmatch(value) else value
    match decoded(value):
        case str(script):
            return RowTests(scripts=(script,))
        case [str(), *_] as scripts if all(isinstance(one, str) for one in scripts):
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
        case [Mapping() as first, *_] as tests if all(isinstance(one, Mapping) for one in tests):
            for given, wanted in _PAIRS:
                if all({given, wanted} <= test.keys() for test in tests):
                    pairs = tuple((test[given], test[wanted]) for test in tests)
                    lists = tuple((decoded(one), decoded(other)) for one, other in pairs)
                    if first.get("fn_name") and all(
                        isinstance(one, list) for pair in lists for one in pair
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
    pairs = [one for one in tests if isinstance(one, dict)]
    given = {one["input"].strip() for one in pairs}
    if len({(one["input"].strip(), *one["output"].split()) for one in pairs}) > len(given):
        raise InputError("Two of its tests have the same input and different outputs.")
    # Where nothing would be hidden, half is.
    if visible == len(tests) or not visible:
        visible = len(tests) // 2
    return tuple(tests), visible, len(public) + len(hidden) - len(tests)


def _name_in(tests: Mapping[str, Any]) -> str:
    return next((str(name) for field in NAMES if (name := value_at(tests, field))), "")


def _lines(value: Any) -> str:
    """Text of a program; some rows hold its lines one by one, and its words."""
    if not isinstance(value, list):
        return "" if value is None else str(value)
    lines = [" ".join(map(str, line)) if isinstance(line, list) else str(line) for line in value]
    return "\n".join(line.removesuffix("\n") for line in lines) + "\n"


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        try:
            return ast.literal_eval(text)
        except (SyntaxError, RecursionError, MemoryError) as error:
            raise ValueError(text) from error


def _call(given: Any, wanted: Any, is_value: bool) -> tuple[Any, Any]:
    """Arguments and result. They may be values or texts of values: a text without quotes among the
    arguments shows that they are values."""
    texts = [one for one in given if isinstance(one, str)] if isinstance(given, list) else []
    if texts and all(_QUOTED.fullmatch(one) for one in texts):
        return [_result(one) for one in given], _result(wanted)
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
    """LiveCodeBench packs its private tests: a pickled text, compressed, in base 64. The pickle's
    instructions are read and never executed."""
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
