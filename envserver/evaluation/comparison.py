"""Compares two runs over the same tasks, task by task. Pure.

Tasks are paired by environment and id; both sides are counted by the same rules; a task that counts
on one side only is named and takes no part.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np

from .estimators import Estimate, estimate, mean
from .report import Report, Rules, TaskRow, counted_rewards, passes

DRAWS: Final = 100_000
_MOST_ENUMERATED: Final = 16
_LARGEST_SUM: Final = 2_000_000
_LARGEST_WORK: Final = 200_000_000
_ROUNDING: Final = 1e-9
_ROWS_AT_ONCE: Final = 2_000
_SCALES: Final = (
    *(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 16, 20, 24, 28, 32, 36, 48, 56, 60, 64, 72, 100),
    *(120, 128, 420, 840, 1000, 5040),
)
"""Candidate numbers of steps in a difference of 1."""


class SignTest(msgspec.Struct, frozen=True, kw_only=True):
    """A two-sided test of "the mean difference is 0"; exact: over all choices of signs."""

    p_value: float
    exact: bool


def sign_flip_test(differences: Sequence[float], *, seed: int = 0) -> SignTest:
    """Tests paired differences. Differences of 0 say nothing; without any other, p is 1.

    Without a difference between two runs, each pair's difference could as well have the other
    sign. The p-value is the share of all 2**n choices of signs whose sum is at least as far from 0
    as the observed one. For differences of 1 and -1 that is McNemar's exact test.
    """
    counted = [difference for difference in differences if abs(difference) > _ROUNDING]
    if not counted:
        return SignTest(p_value=1.0, exact=True)
    values, seen = np.abs(np.asarray(counted, np.float64)), abs(float(sum(counted)))
    if (steps := _whole(values)) is not None:
        return SignTest(p_value=_exact_of_steps(*steps, seen), exact=True)
    if len(values) <= _MOST_ENUMERATED:
        return SignTest(p_value=_enumerated(values, seen), exact=True)
    return SignTest(p_value=_drawn(values, seen, seed), exact=False)


def _whole(values: np.ndarray) -> tuple[np.ndarray, int] | None:
    """Returns `values` as whole numbers of steps and the steps in 1; None: there is no such step.

    Rewards of 0 and 1 over k attempts differ by whole numbers of 1/k.
    """
    for scale in _SCALES:
        scaled = values * scale
        steps = np.rint(scaled)
        if np.all(np.abs(scaled - steps) < _ROUNDING):
            total = int(steps.sum())
            fits = total <= _LARGEST_SUM and total * len(values) <= _LARGEST_WORK
            return (steps.astype(np.int64), scale) if fits else None
    return None


def _exact_of_steps(steps: np.ndarray, scale: int, seen: float) -> float:
    """Adds up the distribution of the sum of signed steps, one task after the other."""
    chances = np.ones(1)
    for step in steps.tolist():
        wider = np.zeros(len(chances) + 2 * step)
        wider[: len(chances)] += chances / 2
        wider[2 * step :] += chances / 2
        chances = wider
    middle = (len(chances) - 1) // 2
    sums = np.abs(np.arange(len(chances)) - middle)
    return min(1.0, float(chances[sums >= round(seen * scale)].sum()))


def _enumerated(values: np.ndarray, seen: float) -> float:
    sums = np.zeros(1)
    for value in values.tolist():
        sums = np.concatenate([sums - value, sums + value])
    return float(np.mean(np.abs(sums) >= seen - _ROUNDING))


def _drawn(values: np.ndarray, seen: float, seed: int) -> float:
    """Counts the observed signs as one of the draws, so that p is never 0."""
    rng = np.random.default_rng(seed)
    hits = 0
    for start in range(0, DRAWS, _ROWS_AT_ONCE):
        rows = min(_ROWS_AT_ONCE, DRAWS - start)
        signs = rng.integers(0, 2, size=(rows, len(values)), dtype=np.int8) * 2 - 1
        hits += int(np.sum(np.abs(signs @ values) >= seen - _ROUNDING))
    return (1 + hits) / (1 + DRAWS)


_EQUAL = 1e-9


class Paired(msgspec.Struct, frozen=True, kw_only=True):
    """One measure over the tasks of both runs: the means `a` and `b`, and `difference`, b minus a.

    At `better` tasks b is better than a.
    """

    tasks: int
    a: float
    b: float
    difference: Estimate
    test: SignTest
    better: int
    worse: int
    equal: int


class Fourfold(msgspec.Struct, frozen=True, kw_only=True):
    both: int
    only_a: int
    only_b: int
    neither: int


class Change(msgspec.Struct, frozen=True, kw_only=True):
    part: str
    task_id: str
    a: float
    b: float


class PartComparison(msgspec.Struct, frozen=True, kw_only=True):
    """The comparison of one environment, or of all of them together.

    `reward` and `passed` are None without a common task, `fourfold` where a task has several
    attempts. `other_tasks`: ids that name different tasks in a and b; they take no part.
    """

    name: str
    reward: Paired | None
    passed: Paired | None
    fourfold: Fourfold | None
    only_a: list[str]
    only_b: list[str]
    other_tasks: list[str]


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """The comparison of two runs.

    `together` is over the tasks of all parts, where there are several. `settings`: those that
    differ, with both values. `changes`: the tasks at which the runs differ, the largest loss of b
    first.
    """

    a: str
    b: str
    models: tuple[str, str]
    rules: Rules
    parts: list[PartComparison]
    together: PartComparison | None
    parts_of_a: list[str]
    parts_of_b: list[str]
    settings: dict[str, tuple[Any, Any]]
    warnings: list[str]
    changes: list[Change]
    schema_version: int = 1


class TaskPair(NamedTuple):
    """A task that counts on both sides, with its mean rewards."""

    part: str
    a: TaskRow
    b: TaskRow
    a_mean: float
    b_mean: float

    @property
    def difference(self) -> float:
        return self.b_mean - self.a_mean


def compare(
    a: Mapping[str, Report], b: Mapping[str, Report], rules: Rules, *, names: tuple[str, str]
) -> Comparison:
    common = [name for name in a if name in b]
    pairs = task_pairs(a, b, rules)
    parts = []
    for name in common:
        mine, other = _counting(a[name], rules), _counting(b[name], rules)
        changed = [
            task_id
            for task_id in mine
            if task_id in other and _changed(mine[task_id], other[task_id])
        ]
        parts.append(
            _part(
                name,
                [pair for pair in pairs if pair.part == name],
                rules,
                only_a=[task_id for task_id in mine if task_id not in other],
                only_b=[task_id for task_id in other if task_id not in mine],
                other_tasks=changed,
            )
        )
    return Comparison(
        a=names[0],
        b=names[1],
        models=(_models(a.values()), _models(b.values())),
        rules=rules,
        parts=parts,
        together=_part("all", pairs, rules) if len(parts) > 1 else None,
        parts_of_a=[name for name in a if name not in b],
        parts_of_b=[name for name in b if name not in a],
        settings=_settings(a, b, common),
        warnings=[*_warnings(names[0], a.values()), *_warnings(names[1], b.values())],
        changes=_changes(pairs),
    )


def task_pairs(a: Mapping[str, Report], b: Mapping[str, Report], rules: Rules) -> list[TaskPair]:
    found = []
    for part in a:
        other = _counting(b[part], rules) if part in b else {}
        for task_id, ours in _counting(a[part], rules).items():
            if task_id in other and not _changed(ours, other[task_id]):
                rows = (ours, other[task_id])
                means = (mean(counted_rewards(row, rules)) for row in rows)
                found.append(TaskPair(part, *rows, *means))
    return found


def _counting(report: Report, rules: Rules) -> dict[str, TaskRow]:
    return {row.task_id: row for row in report.run.tasks if counted_rewards(row, rules)}


def _part(
    name: str,
    pairs: Sequence[TaskPair],
    rules: Rules,
    *,
    only_a: Sequence[str] = (),
    only_b: Sequence[str] = (),
    other_tasks: Sequence[str] = (),
) -> PartComparison:
    passed = [(_passed(pair.a, rules), _passed(pair.b, rules)) for pair in pairs]
    return PartComparison(
        name=name,
        reward=_paired([(pair.a_mean, pair.b_mean) for pair in pairs], rules),
        passed=_paired([(mean(ours), mean(theirs)) for ours, theirs in passed], rules),
        fourfold=_fourfold(passed),
        only_a=list(only_a),
        only_b=list(only_b),
        other_tasks=list(other_tasks),
    )


def _passed(row: TaskRow, rules: Rules) -> list[float]:
    return [float(passes(reward, rules)) for reward in counted_rewards(row, rules)]


def _paired(means: Sequence[tuple[float, float]], rules: Rules) -> Paired | None:
    if not means:
        return None
    differences = [b - a for a, b in means]
    better = sum(difference > _EQUAL for difference in differences)
    worse = sum(difference < -_EQUAL for difference in differences)
    return Paired(
        tasks=len(means),
        a=mean([a for a, _ in means]),
        b=mean([b for _, b in means]),
        difference=estimate(differences, seed=rules.seed),
        test=sign_flip_test(differences, seed=rules.seed),
        better=better,
        worse=worse,
        equal=len(means) - better - worse,
    )


def _fourfold(passed: Sequence[tuple[list[float], list[float]]]) -> Fourfold | None:
    if not passed or any(len(ours) != 1 or len(theirs) != 1 for ours, theirs in passed):
        return None
    found = [(bool(ours[0]), bool(theirs[0])) for ours, theirs in passed]
    return Fourfold(
        both=found.count((True, True)),
        only_a=found.count((True, False)),
        only_b=found.count((False, True)),
        neither=found.count((False, False)),
    )


def _changed(row: TaskRow, other: TaskRow) -> bool:
    return bool(row.digest and other.digest and row.digest != other.digest)


def _models(reports: Iterable[Report]) -> str:
    return ", ".join(dict.fromkeys(report.model for report in reports if report.model))


def _settings(
    a: Mapping[str, Report], b: Mapping[str, Report], common: Sequence[str]
) -> dict[str, tuple[Any, Any]]:
    found: dict[str, tuple[Any, Any]] = {}
    for name in common:
        ours, theirs = _flat(a[name].settings), _flat(b[name].settings)
        for key in ours:
            if key in theirs and ours[key] != theirs[key]:
                found[key if len(common) == 1 else f"{name}: {key}"] = (ours[key], theirs[key])
    return found


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        path = f"{prefix}{name}"
        flat |= _flat(value, f"{path}.") if isinstance(value, Mapping) else {path: value}
    return flat


def _warnings(name: str, reports: Iterable[Report]) -> Iterator[str]:
    given = list(reports)
    for report in given:
        if not report.complete:
            yield f"{name}: {report.name or report.env} did not finish."
    if any(report.simulated for report in given):
        yield f"{name}: the model was simulated."


def _changes(pairs: Sequence[TaskPair]) -> list[Change]:
    differing = [pair for pair in pairs if abs(pair.difference) > _EQUAL]
    differing.sort(key=lambda pair: (pair.difference, pair.part, pair.a.task_id))
    return [
        Change(part=pair.part, task_id=pair.a.task_id, a=pair.a_mean, b=pair.b_mean)
        for pair in differing
    ]
