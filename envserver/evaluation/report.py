"""From results to a report: how good, how sure, at what cost. Pure.

What holds: every number has a declared denominator (`Rules`: whether attempts that were lost by our
fault count, and those in which the model was cut off); an attempt passes with a reward from
`Rules.pass_at` on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec

from .estimators import Estimate, estimate, pass_at_k, pass_hat_k
from .prices import Prices
from .results import Attempt, TaskResult

SCHEMA_VERSION = 1
CORRECT = "correct_"
"""With which metrics begin that say how right an attempt was, of tasks of one type only."""
MOST_VALUES = 40
"""A label with more values than these tells no kinds of tasks apart."""
_ROUNDING = 1e-6

Failures = Literal["drop", "zero"]
Truncated = Literal["score", "zero", "drop"]


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """By which a report counts.

    Args:
        group_size: attempts that each task was to have.
        pass_at: the least reward of a success.
        failures: what an attempt counts that was lost by our fault: nothing (drop), or 0 (zero).
        truncated: what one counts in which the model was cut off: its score, 0, or nothing.
        seed: of the intervals.
    """

    group_size: int
    pass_at: float = 1.0
    failures: Failures = "drop"
    truncated: Truncated = "score"
    seed: int = 0


class Counted(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a person wants attempts to be counted: see `Rules`, and what tokens cost."""

    pass_at: float = 1.0
    failures: Failures = "drop"
    truncated: Truncated = "score"
    prices: Prices | None = None

    def rules(self, *, group_size: int, seed: int) -> Rules:
        """The rules of a report."""
        return Rules(
            group_size=group_size,
            pass_at=self.pass_at,
            failures=self.failures,
            truncated=self.truncated,
            seed=seed,
        )


class Measures(msgspec.Struct, frozen=True, kw_only=True):
    """How good some tasks were done.

    Args:
        tasks, rollouts: that count.
        mean_reward: over tasks, of the mean over the attempts at each (avg@k).
        pass_at, pass_hat: pass@k and pass^k by k, over the tasks with at least k attempts.
    """

    tasks: int
    rollouts: int
    mean_reward: Estimate
    pass_at: dict[int, Estimate]
    pass_hat: dict[int, Estimate]


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """What happened.

    Args:
        tasks: that were tried; `tasks_lost`: of which no attempt has a score.
        scored, lost: attempts with a score, and those lost by our fault.
        truncated: scored attempts in which the model was cut off.
        limits: scored attempts that a limit ended, by limit.
        failed: attempts that failed, also where another one followed, by kind of failure.
    """

    tasks: int
    tasks_lost: int
    scored: int
    lost: int
    truncated: int
    limits: dict[str, int]
    failed: dict[str, int]


class Costs(msgspec.Struct, frozen=True, kw_only=True):
    """What scored attempts took: means over them, and `total_*` of all together.

    Args:
        cost: mean, in `Prices.currency`; None where no prices are known.
        cost_of_pass: all that was paid, by the attempts that passed; None where none did.
    """

    turns: float
    prompt_tokens: float
    completion_tokens: float
    seconds: float
    total_tokens: int
    total_prompt_tokens: int
    total_completion_tokens: int
    total_seconds: float
    cost: float | None = None
    total_cost: float | None = None
    cost_of_pass: float | None = None


class TaskRow(msgspec.Struct, frozen=True, kw_only=True):
    """One task: the rewards of its scored attempts, and what is known of it.

    Args:
        truncated: of each of these attempts, whether the model was cut off.
        digest: see `TaskResult`.
    """

    task_id: str
    rewards: list[float]
    lost: int
    labels: dict[str, str]
    truncated: list[bool] = []
    digest: str = ""


class RunReport(msgspec.Struct, frozen=True, kw_only=True):
    """One run over the tasks.

    Args:
        overall: None where no attempt counts.
        by: the same by name and value of a label; under "correct", of metrics `correct_<type>`, by
            type: what is measured there is that metric.
        components, metrics: means over the scored attempts that have them.
    """

    overall: Measures | None
    by: dict[str, dict[str, Measures]]
    counts: Counts
    costs: Costs | None
    components: dict[str, float]
    metrics: dict[str, float]
    tasks: list[TaskRow]


class HarnessFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A task of lm-evaluation-harness, in its own numbers.

    Args:
        metric, filter: which of its metrics are the rewards here.
        values: all of them: "metric,filter" -> value, "metric_stderr,filter" -> its error.
        requests: calls that its tasks made of the model, all of one run of it together.
    """

    version: str
    task_version: str
    metric: str
    filter: str
    num_fewshot: int
    values: dict[str, float]
    requests: int = 0


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """An evaluation.

    Args:
        env: the environment, or the task of a harness.
        name: what it is called among others: `env`, where no other has that name.
        complete: whether every run came to its end.
        simulated: whether the model was (then nothing here is a measure of any real one).
        created_at: `time.time()`.
        settings: of the environment and the sampling.
        prices: by which `Costs` are told.
        baselines: runs that `run` is to be held against, by name.
        differences: mean reward of `run` less that of the baseline, over the tasks of both.
        harness: what the harness says that measured it; None where we did.
    """

    env: str
    split: str
    model: str
    complete: bool
    simulated: bool
    created_at: float
    rules: Rules
    settings: dict[str, Any]
    run: RunReport
    baselines: dict[str, RunReport]
    differences: dict[str, Estimate]
    name: str = ""
    prices: Prices | None = None
    harness: HarnessFacts | None = None
    schema_version: int = SCHEMA_VERSION


def report_run(
    results: Sequence[TaskResult], rules: Rules, prices: Prices | None = None
) -> RunReport:
    """The report of one run, from the results of its tasks."""
    attempts = [attempt for result in results for attempt in result.attempts]
    return RunReport(
        overall=measured([rewards_of(result, rules) for result in results], rules),
        by=_by_kind(results, rules),
        counts=_counts(results),
        costs=_costs(attempts, rules, prices),
        components=_means(attempt.components for attempt in attempts),
        metrics=_means(attempt.metrics for attempt in attempts),
        tasks=[
            TaskRow(
                task_id=result.task_id,
                rewards=[attempt.reward for attempt in result.attempts],
                lost=result.lost,
                labels=result.labels,
                truncated=[attempt.truncated for attempt in result.attempts],
                digest=result.digest,
            )
            for result in results
        ],
    )


def rewards_of(result: TaskResult, rules: Rules) -> list[float]:
    """What the attempts at a task count."""
    found = [_counted(one.reward, one.truncated, rules) for one in result.attempts]
    return [value for value in found if value is not None] + _zeros(result, rules)


def counted_rewards(row: TaskRow, rules: Rules) -> list[float]:
    """The same from a report, by `rules` that need not be the report's own."""
    cut = row.truncated or [False] * len(row.rewards)
    found = [_counted(one, was_cut, rules) for one, was_cut in zip(row.rewards, cut, strict=True)]
    zeros = [0.0] * row.lost if rules.failures == "zero" else []
    return [value for value in found if value is not None] + zeros


def _counted(value: float, truncated: bool, rules: Rules) -> float | None:
    """What an attempt counts; None: nothing."""
    if not truncated or rules.truncated == "score":
        return value
    return 0.0 if rules.truncated == "zero" else None


def _zeros(result: TaskResult, rules: Rules) -> list[float]:
    return [0.0] * result.lost if rules.failures == "zero" else []


def measured(values: Sequence[Sequence[float]], rules: Rules) -> Measures | None:
    """The measures of tasks, each of whose attempts has a value; None where there is no value."""
    tried = [task for task in values if task]
    if not tried:
        return None
    passed = [(len(task), sum(passes(value, rules) for value in task)) for task in tried]
    pass_at: dict[int, Estimate] = {}
    pass_hat: dict[int, Estimate] = {}
    for k in range(1, max(map(len, tried)) + 1):
        enough = [(n, c) for n, c in passed if n >= k]
        pass_at[k] = estimate([pass_at_k(n, c, k) for n, c in enough], seed=rules.seed)
        pass_hat[k] = estimate([pass_hat_k(n, c, k) for n, c in enough], seed=rules.seed)
    return Measures(
        tasks=len(tried),
        rollouts=sum(map(len, tried)),
        mean_reward=estimate([sum(task) / len(task) for task in tried], seed=rules.seed),
        pass_at=pass_at,
        pass_hat=pass_hat,
    )


def passes(value: float, rules: Rules) -> bool:
    """Whether an attempt with this reward is a success."""
    return value >= rules.pass_at - _ROUNDING


def difference(
    run: Sequence[TaskResult], baseline: Sequence[TaskResult], rules: Rules
) -> Estimate | None:
    """Mean reward of `run` less that of `baseline`, pair by pair; None: no task counts in both."""
    others = {result.task_id: rewards_of(result, rules) for result in baseline}
    pairs = [(rewards_of(result, rules), others.get(result.task_id)) for result in run]
    values = [
        sum(mine) / len(mine) - sum(other) / len(other) for mine, other in pairs if mine and other
    ]
    return estimate(values, seed=rules.seed) if values else None


def _by_kind(results: Sequence[TaskResult], rules: Rules) -> dict[str, dict[str, Measures]]:
    kinds = {name: dict(_of_label(results, name, rules)) for name in _telling_labels(results)}
    metrics = {name for result in results for one in result.attempts for name in one.metrics}
    names = sorted(name for name in metrics if name.startswith(CORRECT))
    if names:
        kinds["correct"] = {
            name.removeprefix(CORRECT): found
            for name in names
            if (found := _of_metric(results, name, rules)) is not None
        }
    return kinds


def _telling_labels(results: Sequence[TaskResult]) -> Iterator[str]:
    for name in dict.fromkeys(name for result in results for name in result.labels):
        if 1 < len({result.labels.get(name) for result in results}) <= MOST_VALUES:
            yield name


def _of_label(
    results: Sequence[TaskResult], name: str, rules: Rules
) -> Iterator[tuple[str, Measures]]:
    by_value: dict[str, list[list[float]]] = {}
    for result in results:
        if name in result.labels:
            by_value.setdefault(result.labels[name], []).append(rewards_of(result, rules))
    for value, rewards in sorted(by_value.items()):
        if (found := measured(rewards, rules)) is not None:
            yield value, found


def _of_metric(results: Sequence[TaskResult], name: str, rules: Rules) -> Measures | None:
    """Of the tasks of which an attempt has this metric."""
    values = []
    for result in results:
        having = [one for one in result.attempts if name in one.metrics]
        said = [_counted(one.metrics[name], one.truncated, rules) for one in having]
        if having:
            values.append([value for value in said if value is not None] + _zeros(result, rules))
    return measured(values, rules)


def _counts(results: Sequence[TaskResult]) -> Counts:
    attempts = [attempt for result in results for attempt in result.attempts]
    failed: Counter[str] = Counter()
    for result in results:
        failed.update(result.failed)
    return Counts(
        tasks=len(results),
        tasks_lost=sum(not result.attempts for result in results),
        scored=len(attempts),
        lost=sum(result.lost for result in results),
        truncated=sum(attempt.truncated for attempt in attempts),
        limits=dict(Counter(one.limit for one in attempts if one.limit is not None)),
        failed=dict(failed),
    )


def _costs(attempts: Sequence[Attempt], rules: Rules, prices: Prices | None) -> Costs | None:
    if not attempts:
        return None
    count = len(attempts)
    prompt = sum(attempt.usage.prompt_tokens for attempt in attempts)
    completion = sum(attempt.usage.completion_tokens for attempt in attempts)
    seconds = sum(attempt.usage.seconds for attempt in attempts)
    counted = (_counted(attempt.reward, attempt.truncated, rules) for attempt in attempts)
    passed = sum(value is not None and passes(value, rules) for value in counted)
    total = None if prices is None else prices.cost(prompt, completion)
    return Costs(
        turns=sum(attempt.turns for attempt in attempts) / count,
        prompt_tokens=prompt / count,
        completion_tokens=completion / count,
        seconds=seconds / count,
        total_tokens=prompt + completion,
        total_prompt_tokens=prompt,
        total_completion_tokens=completion,
        total_seconds=seconds,
        cost=None if total is None else total / count,
        total_cost=total,
        cost_of_pass=total / passed if total is not None and passed else None,
    )


def _means(all_values: Iterable[Mapping[str, float]]) -> dict[str, float]:
    found: dict[str, list[float]] = {}
    for values in all_values:
        for name, value in values.items():
            found.setdefault(name, []).append(value)
    return {name: sum(values) / len(values) for name, values in sorted(found.items())}
