"""Scores a rollout: 1 if the program passes every test, else 0. A program must also agree now and
then with the task's reference on changed arguments: a table of answers is not a solution. A sandbox
that fails is our fault (SandboxError); what a program does in it is the model's."""

from __future__ import annotations

import ast
import asyncio
import functools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from itertools import islice, pairwise
from typing import Any

from envserver_environments.answers import last_reply
from envserver_records.tasks import Json

from envserver import Result, Sandbox, Sandboxes, Score, Task

from .expressions import close
from .extraction import MAX_CODE_CHARACTERS, extract_code
from .hoisting import HoistedTest, hoisted, prelude
from .running import SPEC, Program, Trial, Verdict, judged_pairs, run_trial

# A program that holds the tests' answers in a table passes them all and solves nothing. So the
# reference computes values for new arguments: those of a test, changed a little in one place, in a
# way that seldom leaves the task's domain (signs, sortedness, similar lengths, characters that the
# text already has).

_TRIES = 6


def changed_calls(calls: Sequence[str], count: int, seed: str) -> list[str]:
    rng = random.Random(f"fuzz-{seed}")
    readable = [read for call in dict.fromkeys(calls) if (read := _read(call)) is not None]
    found: dict[str, None] = {}
    for _ in range(count * _TRIES if readable else 0):
        name, arguments = rng.choice(readable)
        place = rng.randrange(len(arguments))
        changed = [*arguments]
        changed[place] = _changed(arguments[place], rng)
        call = f"{name}({', '.join(map(repr, changed))})"
        if call not in calls and _read(call) is not None:
            found[call] = None
        if len(found) == count:
            break
    return list(found)


def agreement(program: Mapping[int, Any], reference: Mapping[int, Any]) -> float | None:
    """The share of the reference's values that the program has, too; None without values."""
    if not reference:
        return None
    same = sum(number in program and close(program[number], reference[number], 1e-9)
               for number in reference)  # fmt: skip
    return same / len(reference)


def _read(call: str) -> tuple[str, list[Any]] | None:
    try:
        tree = ast.parse(call, mode="eval").body
        if not isinstance(tree, ast.Call) or not isinstance(tree.func, ast.Name) or tree.keywords:
            return None
        arguments = [ast.literal_eval(argument) for argument in tree.args]
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return None
    return (tree.func.id, arguments) if arguments else None


def _changed(value: Any, rng: random.Random) -> Any:
    match value:
        case bool() | None:
            return value
        case int():
            return _changed_int(value, rng)
        case float():
            return round(value * rng.choice([0.5, 1.5, 2.0]) + rng.choice([0.0, 0.25]), 6)
        case str() if value:
            return _changed_text(value, rng)
        case list() | tuple() if value:
            return type(value)(_changed_items(list(value), rng))
        case dict() if value:
            key = rng.choice(list(value))
            return {**value, key: _changed(value[key], rng)}
    return value


def _changed_int(value: int, rng: random.Random) -> int:
    if value == 0:
        return rng.choice([0, 1])
    size = max(1, abs(value) + rng.choice([-2, -1, 1, 2, 3, abs(value) // 3]))
    return size if value > 0 else -size


def _changed_text(value: str, rng: random.Random) -> str:
    place = rng.randrange(len(value))
    way = rng.randrange(3)
    end = place if way == 0 else place + 1
    more = "" if way == 1 and len(value) > 1 else rng.choice(value)
    return value[:place] + more + value[end:]


def _changed_items(items: list[Any], rng: random.Random) -> list[Any]:
    place = rng.randrange(len(items))
    changed = [*items]
    match rng.randrange(3):
        case 0 if len(items) > 1:
            del changed[place]
        case 1:
            changed.insert(place, items[place])
        case _:
            changed[place] = _changed(items[place], rng)
    return sorted(changed) if _is_sorted(items) else changed


def _is_sorted(items: list[Any]) -> bool:
    try:
        return all(a <= b for a, b in pairwise(items))
    except TypeError:
        return False


LEAST_AGREEMENT = 0.25
"""Low: changed arguments may leave the task's domain, where right programs differ."""
_REMEMBERED_REFERENCES = 512


@dataclass(frozen=True)
class ScoringRules:
    """Options that turn a verdict into a reward."""

    partial_credit: bool = False  # the share of passed tests is the reward
    fuzz: int = 6  # changed calls that compare the program with the reference


@dataclass
class References:
    _known: dict[tuple[str, str], tuple[list[str], dict[int, Any]]] = field(default_factory=dict)

    async def values(
        self, task: Task, count: int, sandboxes: Sandboxes
    ) -> tuple[list[str], dict[int, Any]]:
        code, name = task.hidden.get("code"), str(task.public["entry_point"])
        if not code or not name or count < 1:
            return [], {}
        key = (task.id, code)
        if key not in self._known:
            tests = [hoisted(source, name) for source in all_tests(task)]
            # Where a test leaves several right values, the reference's is only one of them.
            known = [call for test in tests if test.determines for call in test.calls]
            calls = changed_calls(known, count, task.id)
            program = _program(task.public, code, tests)
            # In a separate sandbox: the program under test must not see its content.
            async with sandboxes.open(SPEC) as sandbox:
                trial = await run_trial(Trial(program, calls), sandbox)
            self._known[key] = (calls, trial.values)
            if len(self._known) > _REMEMBERED_REFERENCES:
                del self._known[next(iter(self._known))]
        return self._known[key]


async def score_rollout(
    task: Task, result: Result, rules: ScoringRules, sandboxes: Sandboxes, references: References
) -> Score:
    entry_point = str(task.public["entry_point"])
    verdicts: list[Verdict] = []
    agreed = None
    metrics = {
        "truncated": float(result.truncated),
        "tool_errors": float(result.metrics.get("tool_errors", 0.0)),
    }
    code = None if result.truncated else submitted(result, entry_point)
    metrics["answered"] = float(code is not None)
    if code is not None and len(code) > MAX_CODE_CHARACTERS:
        metrics["too_long"] = 1.0
    elif code is not None:
        fuzzed, wanted = await references.values(task, rules.fuzz, sandboxes)
        opened = functools.partial(sandboxes.open, SPEC)
        verdicts, given = await judged(task.public, code, all_tests(task), opened, fuzzed)
        agreed = agreement(given, wanted)
    return _score(task, verdicts, rules, agreed, metrics)


def all_tests(task: Task) -> list[Any]:
    return [*task.public["tests"], *task.hidden["tests"]]


def _program(public: Json, code: str, tests: Sequence[HoistedTest]) -> Program:
    return Program(
        code,
        str(public["entry_point"]),
        str(public.get("preamble", "")),
        prelude(tuple(call for test in tests for call in test.calls)),
    )


async def judged(
    public: Json,
    code: str,
    sources: Sequence[Any],
    opened: Callable[[], AbstractAsyncContextManager[Sandbox]],
    more: Sequence[str] = (),
) -> tuple[list[Verdict], dict[int, Any]]:
    """The verdict of each test, and the values of the calls `more`, by their places."""
    if not public["entry_point"]:
        return await judged_pairs(code, sources, public.get("seconds"), opened), {}
    tests = [hoisted(source, str(public["entry_point"])) for source in sources]
    calls = [call for test in tests for call in test.calls]
    async with opened() as sandbox:
        trial = await run_trial(Trial(_program(public, code, tests), [*calls, *more]), sandbox)
    verdicts, start = [], 0
    for test in tests:
        numbers = range(start, start + len(test.calls))
        start += len(test.calls)
        values = {n - numbers.start: trial.values[n] for n in numbers if n in trial.values}
        error = next((trial.errors[n] for n in numbers if n in trial.errors), None)
        shown = ", ".join(_shown(value) for value in values.values())
        verdicts.append(Verdict(test.holds(values), error, shown))
    return verdicts, {n - start: value for n, value in trial.values.items() if n >= start}


def submitted(result: Result, entry_point: str) -> str | None:
    output = result.output
    if isinstance(output, dict) and isinstance(output.get("code"), str):
        return str(output["code"])
    if isinstance(output, dict):
        text = output.get("text")
    else:
        text = output if isinstance(output, str) else last_reply(result.messages).get("content")
    return extract_code(text, entry_point) if isinstance(text, str) else None


def _score(
    task: Task,
    verdicts: list[Verdict],
    rules: ScoringRules,
    agreed: float | None,
    metrics: dict[str, float],
) -> Score:
    fraction = sum(verdict.passed for verdict in verdicts) / len(all_tests(task))
    visible = len(task.public["tests"])
    knows_a_rule = agreed is None or agreed >= LEAST_AGREEMENT
    passed = float(fraction == 1.0 and knows_a_rule)
    metrics["tests_passed"] = fraction
    metrics["visible_passed"] = _all_passed(verdicts[:visible])
    metrics["hidden_passed"] = _all_passed(verdicts[visible:])
    if agreed is not None:
        metrics["fuzz_agreement"] = agreed
    partial = fraction if knows_a_rule else 0.0
    reward = partial if rules.partial_credit else passed
    return Score(
        reward=reward, components={"passed": passed, "fraction": fraction}, metrics=metrics
    )


def _all_passed(verdicts: list[Verdict]) -> float:
    return float(bool(verdicts) and all(verdict.passed for verdict in verdicts))


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except ValueError:  # Python writes no integers of that many digits
        return f"a {type(value).__name__} with a very large number"
    return text if len(text) <= 200 else f"{text[:200]}..."


BATCH = 8


def checked(tasks: Iterable[Task], sandboxes: Sandboxes) -> Iterator[tuple[Task, str | None]]:
    waiting = iter(tasks)
    # The first alone, so that a first task is there soon.
    size = 1
    while batch := list(islice(waiting, size)):
        size = BATCH
        # In a thread: the caller may itself be in an event loop.
        with ThreadPoolExecutor(1, thread_name_prefix="references") as thread:
            reasons = thread.submit(asyncio.run, _why_wrong_all(batch, sandboxes)).result()
        yield from zip(batch, reasons, strict=True)


async def _why_wrong_all(tasks: list[Task], sandboxes: Sandboxes) -> list[str | None]:
    return await asyncio.gather(*(why_wrong(task, sandboxes) for task in tasks))


async def why_wrong(task: Task, sandboxes: Sandboxes) -> str | None:
    """Returns the fault of the reference of `task`, or None if it passes all tests."""
    code = task.hidden.get("code")
    if not code:
        return "it has no reference solution (--env.check_references false keeps it)"
    opened = functools.partial(sandboxes.open, SPEC)
    verdicts, _ = await judged(task.public, code, all_tests(task), opened)
    passed = all(verdict.passed for verdict in verdicts)
    return None if passed else "the reference fails its own tests"
