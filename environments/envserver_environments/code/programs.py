"""Runs a whole program once for each pair of input and output. The output never goes in.

Each test is a separate run. It passes if the program ends by itself with status 0, stays within the
output limit, and prints the expected lines: trailing blanks of a line and empty lines at the end do
not count.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager

from msgspec import structs

from envserver import ExecResult, Sandbox, SandboxError, SandboxLimits

from .problem import Pair
from .running import NOT_THE_PROGRAM, SPEC, Verdict, cause

_NUMBER = re.compile(rb"(?<![\w.:])([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d{1,3})?)(?![\w:]|\.\w)")
_DECIMAL = re.compile(rb"[-+]?(?:\d*\.(\d*)|[1-9]\d*(?=[eE])).*")
MOST_SECONDS = 30.0
"""CPU seconds of a program at most, whatever limit its row has."""
LEAST_SECONDS = 1.0
"""Minimum CPU seconds of one test, whatever a row says; the maximum is the sandbox's."""
ALL_WALL_SECONDS = 40.0
SLOW_TESTS = 2
"""After this many slow tests the rest is skipped."""
_SHOWN = 200


async def judged_pairs(
    code: str,
    pairs: Sequence[Pair],
    seconds: float | None,
    opened: Callable[[], AbstractAsyncContextManager[Sandbox]],
) -> list[Verdict]:
    """The verdict of each test.

    Args:
        seconds: of CPU for each.
        opened: the sandbox for a test.
    """
    limits = _limits(seconds)
    verdicts: list[Verdict] = []
    slow, wall = 0, 0.0
    for pair in pairs:
        if slow == SLOW_TESTS or wall > ALL_WALL_SECONDS:
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
    that such tasks come from, or by half of the last of at least four decimals that are expected.
    All else is the same.
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
