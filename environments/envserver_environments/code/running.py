"""Runs programs in a sandbox: calls of a function (`Trial`), or a whole program per pair.

One run of the harness does all calls. If a call ends the program, it has failed, and a new run
does the remaining calls: a few times, within a time limit for all.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msgspec import structs

from envserver import ExecResult, Sandbox, SandboxError, SandboxLimits, SandboxSpec

from .data_sets import Pair
from .values import MAX_DEPTH, MAX_NODES, MAX_TEXT, BadValue, read_json, read_value

CALL_CPU_SECONDS = 2.5
CALL_WALL_SECONDS = 4.0
"""Limit of one call, enforced by alarms; a program that ignores them is killed with its run."""
RUN_SECONDS = 8.0
ALL_CPU_SECONDS = 4.0
ALL_WALL_SECONDS = 10.0
"""Limit of all runs of a program together."""
LAST_CPU_SECONDS = 0.5
LAST_WALL_SECONDS = 1.0
"""Limit of one more run once the time is used up."""
MAX_RUNS = 3

SPEC = SandboxSpec(
    # What programs of this kind import: it costs nothing where it has been imported before.
    preload=(
        "bisect", "cmath", "collections", "copy", "dataclasses", "datetime", "decimal", "enum",
        "fractions", "functools", "heapq", "itertools", "json", "math", "operator", "random", "re",
        "signal", "statistics", "string", "types", "typing",
    ),
    limits=SandboxLimits(
        wall_seconds=RUN_SECONDS,
        cpu_seconds=ALL_CPU_SECONDS,
        memory_mb=600,
        disk_mb=8,
        inodes=256,
        processes=16,
        output_kb=2048,
        input_kb=4096,
    ),
)  # fmt: skip


NOT_THE_PROGRAM = ("lost", "cancelled")
"""Ends of a run that say nothing about the program."""


@dataclass(frozen=True)
class Program:
    """The program to run."""

    code: str
    entry_point: str
    preamble: str = ""  # definitions of the task that it may rely on
    prelude: str = ""  # imports of the calls, in a separate namespace


@dataclass(frozen=True)
class Verdict:
    """The outcome of one test."""

    passed: bool
    error: str | None  # what went wrong if a call returned no value
    values: str  # the values of its calls, as text


@dataclass
class Trial:
    program: Program
    calls: Sequence[str]
    values: dict[int, Any] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    runs: int = 0
    cpu_seconds: float = 0.0
    wall_seconds: float = 0.0

    def request(self) -> bytes | None:
        """Returns the next run's stdin; None when all is done."""
        left = self._left()
        if not left:
            return None
        if self.runs >= MAX_RUNS:
            self.errors.update(dict.fromkeys(left, "there was no time left"))
            return None
        return json.dumps(
            {
                "code": self.program.code,
                "preamble": self.program.preamble,
                "prelude": self.program.prelude,
                "entry_point": self.program.entry_point,
                "calls": [[number, self.calls[number]] for number in left],
                "cpu_seconds": CALL_CPU_SECONDS,
                "wall_seconds": CALL_WALL_SECONDS,
                "depth": MAX_DEPTH - 2,
                "nodes": MAX_NODES - 2,
                "text": MAX_TEXT,
                "total": 4 * MAX_TEXT,
            }
        ).encode()

    def limits(self) -> SandboxLimits:
        return structs.replace(
            SPEC.limits,
            cpu_seconds=max(LAST_CPU_SECONDS, ALL_CPU_SECONDS - self.cpu_seconds),
            wall_seconds=max(
                LAST_WALL_SECONDS, min(RUN_SECONDS, ALL_WALL_SECONDS - self.wall_seconds)
            ),
        )

    def take(self, result: ExecResult) -> None:
        if result.killed_by in NOT_THE_PROGRAM:
            raise SandboxError(f"The run of a program was {result.killed_by}.")
        self.runs += 1
        self.cpu_seconds += result.usage.cpu_seconds
        self.wall_seconds += result.usage.wall_seconds
        left = self._left()
        try:
            values, errors = _read_answers(result, set(left))
        except BadValue as error:
            values, errors = {}, dict.fromkeys(left, f"its output was not ours: {error}")
        self.values |= values
        self.errors |= errors
        if unanswered := self._left():
            self.errors[unanswered[0]] = cause(result)

    def _left(self) -> list[int]:
        numbers = range(len(self.calls))
        return [n for n in numbers if n not in self.values and n not in self.errors]


async def run_trial(trial: Trial, sandbox: Sandbox) -> Trial:
    while (request := trial.request()) is not None:
        trial.take(await sandbox.run_python(harness(), stdin=request, limits=trial.limits()))
    return trial


@functools.cache
def harness() -> str:
    return (Path(__file__).parent / "harness.py").read_text(encoding="utf-8")


def _read_answers(result: ExecResult, numbers: set[int]) -> tuple[dict[int, Any], dict[int, str]]:
    """Values and errors by number of the call."""
    # Text after the last newline was cut off with the program.
    lines = result.stdout.split(b"\n")[:-1]
    match _record(lines[0]) if lines else ["load", cause(result)]:
        case ["load", str(reason)]:
            return {}, dict.fromkeys(numbers, f"the program could not be loaded: {reason}")
        case ["ready"]:
            pass
        case _:
            raise BadValue("its first line is unknown")
    values: dict[int, Any] = {}
    errors: dict[int, str] = {}
    for line in lines[1:]:
        match _record(line):
            case [int(number), "v" | "e", _] if number in values or number in errors:
                raise BadValue("a call was answered twice")
            case [int(number), "v", shape] if number in numbers:
                try:
                    values[number] = read_value(shape)
                except BadValue as error:
                    errors[number] = str(error)
            case [int(number), "e", str(reason)] if number in numbers:
                errors[number] = reason
            case _:
                raise BadValue("a line is unknown")
    return values, errors


def _record(line: bytes) -> Any:
    try:
        return read_json(line.decode("ascii"))
    except UnicodeDecodeError as error:
        raise BadValue("a line is not text") from error


def cause(result: ExecResult) -> str:
    if result.killed_by:
        return f"it passed the limit of {result.killed_by}"
    if result.signal is not None:
        return f"it was ended by signal {result.signal}"
    return f"it ended the program with status {result.exit}"


# A whole program runs once per pair; the expected output never enters the sandbox. A test passes if
# the program ends by itself with status 0, stays within the output limit, and prints the expected
# lines: trailing blanks of a line and empty lines at the end do not count.

_NUMBER = re.compile(rb"(?<![\w.:])([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d{1,3})?)(?![\w:]|\.\w)")
_DECIMAL = re.compile(rb"[-+]?(?:\d*\.(\d*)|[1-9]\d*(?=[eE])).*")
MOST_SECONDS = 30.0
"""CPU seconds of a program at most, whatever limit its row has."""
LEAST_SECONDS = 1.0
ALL_TESTS_WALL_SECONDS = 40.0
SLOW_TESTS = 2
"""After this many slow tests the rest is skipped."""
_SHOWN = 200


async def judged_pairs(
    code: str,
    pairs: Sequence[Pair],
    seconds: float | None,
    opened: Callable[[], AbstractAsyncContextManager[Sandbox]],
) -> list[Verdict]:
    limits = _limits(seconds)
    verdicts: list[Verdict] = []
    slow, wall = 0, 0.0
    for pair in pairs:
        if slow == SLOW_TESTS or wall > ALL_TESTS_WALL_SECONDS:
            verdicts.append(Verdict(False, "other tests took too long", ""))
            continue
        async with opened() as sandbox:
            stdin = pair["input"].encode("utf-8", "surrogatepass")
            result = await sandbox.run_python(code, stdin=stdin, limits=limits)
        if result.killed_by in NOT_THE_PROGRAM:
            raise SandboxError(f"The run of a program was {result.killed_by}.")
        wall += result.usage.wall_seconds
        slow += result.killed_by in ("cpu", "wall")
        verdicts.append(_verdict(result, pair["output"]))
    return verdicts


def same_lines(printed: bytes, wanted: str) -> bool:
    """Returns whether a program printed the expected lines.

    Where a decimal is expected, a number may differ by 1e-6, absolute or relative, as on the sites
    that such tasks come from, or by half of the last of at least four expected decimals.
    """
    given, right = _lines(printed), _lines(wanted.encode("utf-8", "surrogatepass"))
    return given == right or (len(given) == len(right) and all(map(_same_line, given, right)))


def _same_line(given: bytes, right: bytes) -> bool:
    parts, wanted = _NUMBER.split(given), _NUMBER.split(right)  # every second one is a number
    return len(parts) == len(wanted) and all(map(_same_part, parts, wanted))


def _same_part(given: bytes, right: bytes) -> bool:
    decimal = _DECIMAL.fullmatch(right)
    if given == right or not (decimal and _NUMBER.fullmatch(right) and _NUMBER.fullmatch(given)):
        return given == right
    digits = len(decimal[1] or b"")
    nearest = 0.500001 * 10**-digits if digits >= 4 else 1e-6
    return math.isclose(float(given), float(right), rel_tol=1e-6, abs_tol=max(1e-6, nearest))


def _lines(text: bytes) -> list[bytes]:
    lines = [line.rstrip(b" \t\r") for line in text.split(b"\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def _limits(seconds: float | None) -> SandboxLimits:
    most = SPEC.limits.cpu_seconds
    cpu = most if seconds is None else min(MOST_SECONDS, max(LEAST_SECONDS, seconds))
    return structs.replace(SPEC.limits, cpu_seconds=cpu, wall_seconds=2 * cpu)


def _verdict(result: ExecResult, wanted: str) -> Verdict:
    shown = repr(result.stdout[:_SHOWN].decode("utf-8", "replace"))
    if not result.ok:
        said = result.stderr[-_SHOWN:].decode("utf-8", "replace").strip()
        return Verdict(False, f"{cause(result)}; {said}" if said else cause(result), shown)
    if result.truncated:
        return Verdict(False, "it printed too much", shown)
    return Verdict(same_lines(result.stdout, wanted), None, shown)
