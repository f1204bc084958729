r"""Whether an answer equals the gold, by math-verify, whatever the answer is made of.

An answer is hostile input: `9^{9^9}` or `10^8!` can cost minutes and gigabytes. So each comparison
runs in a process of its own, forked from the warm scorer, with math-verify's own timeouts, a limit
of memory, a limit of CPU time, and a kill when all these fail. The answer is then wrong, which is
the model's fault, and the scorer is as before.

math-verify is not symmetric: the gold comes first, else an answer may repeat a condition of the
problem instead of solving it. It needs the main thread (it works with SIGALRM).
"""

from __future__ import annotations

import enum
import functools
import importlib
import logging
import os
import resource
import select
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envserver import ConfigError

TIMEOUT_SECONDS = 2
"""For parsing, and again for one comparison."""
KILL_SECONDS = 6.0
MEMORY_BYTES = 1 << 30
"""That one comparison may take beyond what the scorer holds."""


class Verdict(enum.StrEnum):
    """What came of a comparison."""

    EQUAL = "equal"
    DIFFERENT = "different"
    KILLED = "killed"
    """Not decided within the limits."""
    BAD_GOLD = "bad_gold"
    """The gold does not even equal itself."""


def compare(gold: str, answer: str, *, lenient: bool = False) -> Verdict:
    r"""Compares `answer` with `gold`, both LaTeX without `\boxed`.

    Args:
        lenient: also accept malformed LaTeX (`\frac12`) and plain expressions.

    Raises:
        ConfigError: math-verify is not installed.
    """
    parsed_gold = _parsed_gold(gold)
    verdict = _in_child(lambda: _equal(parsed_gold, answer, lenient))
    if verdict is Verdict.EQUAL or _verifies_itself(gold):
        return verdict
    return Verdict.BAD_GOLD


@dataclass(frozen=True)
class _Library:
    parse: Any
    verify: Any
    gold: list[Any]
    strict: list[Any]
    lenient: list[Any]


@functools.cache
def _library() -> _Library:
    try:
        math_verify = importlib.import_module("math_verify")
        normalization = importlib.import_module("latex2sympy2_extended").NormalizationConfig
    except ImportError as error:
        raise ConfigError(
            f"Scoring mathematics needs math-verify, which cannot be imported: {error}.",
            hint="pip install 'envserver[math]'",
        ) from error
    # A timeout is an ordinary verdict here, not worth a line on stderr each.
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    latex, expression = math_verify.LatexExtractionConfig, math_verify.ExprExtractionConfig
    strict = latex(
        boxed_match_priority=0,
        try_extract_without_anchor=False,
        normalization_config=normalization(
            basic_latex=True, units=True, malformed_operators=False, nits=False, boxed="all"
        ),
    )
    return _Library(
        math_verify.parse, math_verify.verify, [latex()], [strict], [expression(), latex()]
    )


@functools.lru_cache(maxsize=4096)
def _parsed_gold(gold: str) -> tuple[Any, ...]:
    library = _library()
    boxed = f"\\boxed{{{_without_math_marks(gold)}}}"
    return tuple(
        library.parse(
            boxed, library.gold, extraction_mode="first_match", parsing_timeout=TIMEOUT_SECONDS
        )
    )


@functools.lru_cache(maxsize=4096)
def _verifies_itself(gold: str) -> bool:
    parsed = list(_parsed_gold(gold))
    return _in_child(lambda: bool(_library().verify(parsed, parsed))) is Verdict.EQUAL


def _without_math_marks(gold: str) -> str:
    plain = gold.strip()
    for start, end in (("$", "$"), ("\\(", "\\)")):
        inside = plain[len(start) : -len(end)]
        if len(plain) > len(start + end) and plain == f"{start}{inside}{end}":
            return inside.strip()
    return plain


def _equal(gold: tuple[Any, ...], answer: str, lenient: bool) -> bool:
    library = _library()
    parsed = library.parse(
        f"\\boxed{{{answer}}}",
        library.lenient if lenient else library.strict,
        extraction_mode="any_match" if lenient else "first_match",
        parsing_timeout=TIMEOUT_SECONDS,
    )
    return bool(library.verify(list(gold), parsed, timeout_seconds=TIMEOUT_SECONDS))


def _in_child(compute: Any) -> Verdict:
    """Runs `compute` (-> bool) in a forked process that cannot harm this one."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        _be_the_child(compute, write_end)
    os.close(write_end)
    try:
        ready, _, _ = select.select([read_end], [], [], KILL_SECONDS)
        answer = os.read(read_end, 1) if ready else b""
    finally:
        os.close(read_end)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return {b"1": Verdict.EQUAL, b"0": Verdict.DIFFERENT}.get(answer, Verdict.KILLED)


def _be_the_child(compute: Any, write_end: int) -> None:
    """Writes one byte and ends; never returns, whatever is raised (timeouts are BaseExceptions)."""
    try:
        _limit_resources()
        os.write(write_end, b"1" if compute() else b"0")
    finally:
        os._exit(0)


def _limit_resources() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    # For a child whose parent is gone and can no longer kill it.
    cpu_seconds = int(KILL_SECONDS) + 2
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds))
