"""Makes a report from results: how good, how sure, at what cost. Pure.

Every number has a declared denominator: `Rules` says which attempts count, and what passes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
from envserver_records.costs import Prices

from ..settings.runs import Failures, Truncated
from .estimators import Estimate, estimate, estimate_of_means, mean, pass_at_k, pass_hat_k
from .results import AttemptResult, Stepped, TaskResult, shortest, step_measures


class Robustness(msgspec.Struct, frozen=True, kw_only=True):
    """Measures over tasks that were asked in several ways.

    `consistency`: the chance that an attempt at the original and one at a variant both pass or both
    fail; `worst_*`: reward and share of passes of the worst way to ask each task.
    """

    variants: list[str]
    consistency: Estimate
    worst_reward: Estimate
    worst_pass: Estimate


class Asked(msgspec.Struct, frozen=True):
    """Attempts at one task asked in one way: mean reward and share that passed."""

    reward: float
    passed: float


def robustness(
    original: Mapping[str, Asked], variants: Mapping[str, Mapping[str, Asked]], *, seed: int
) -> Robustness | None:
    """Measures the runs, each by task id; None if no task was asked in two ways."""
    ways = {
        task_id: [run[task_id] for run in variants.values() if task_id in run]
        for task_id in original
    }
    pairs = [(original[task_id], others) for task_id, others in ways.items() if others]
    if not pairs:
        return None
    return Robustness(
        variants=list(variants),
        consistency=estimate([_agreement(first, others) for first, others in pairs], seed=seed),
        worst_reward=estimate(
            [min(way.reward for way in (first, *others)) for first, others in pairs], seed=seed
        ),
        worst_pass=estimate(
            [min(way.passed for way in (first, *others)) for first, others in pairs], seed=seed
        ),
    )


def _agreement(attempt: Asked, others: Sequence[Asked]) -> float:
    chances = [
        attempt.passed * other.passed + (1 - attempt.passed) * (1 - other.passed)
        for other in others
    ]
    return mean(chances)


SCHEMA_VERSION = 1
CORRECT = "correct_"
"""Prefix of metrics that measure correctness for the tasks of one type only."""
MOST_VALUES = 40
"""A label with more values than this is not used to tell kinds of tasks apart."""
_ROUNDING = 1e-6


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """Rules by which a report counts attempts.

    Args:
        group_size: attempts planned for each task.
        pass_at: the smallest reward of a success.
        failures: an attempt lost to an infrastructure failure: left out, or counted as `worst`.
        truncated: an attempt in which the model was cut off: counts its score, `worst`, or nothing.
        worst, best: the environment's lowest and highest reward, 0 and 1 in most.
    """

    group_size: int
    pass_at: float = 1.0
    failures: Failures = "drop"
    truncated: Truncated = "score"
    seed: int = 0
    worst: float = 0.0
    best: float = 1.0


class Counted(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The user's rules of counting (see `Rules`), and the prices of tokens."""

    pass_at: float = 1.0
    failures: Failures = "drop"
    truncated: Truncated = "score"
    prices: Prices | None = None
    worst: float = 0.0
    best: float = 1.0

    def rules(self, *, group_size: int, seed: int) -> Rules:
        names = ("pass_at", "failures", "truncated", "worst", "best")
        own = {name: getattr(self, name) for name in names}
        return Rules(group_size=group_size, seed=seed, **own)


class Measures(msgspec.Struct, frozen=True, kw_only=True):
    """Results over the tasks and attempts that count.

    `mean_reward` is the mean over tasks of the mean over each task's attempts (avg@k); `pass_at`
    and `pass_hat` have pass@k and pass^k by k, over the tasks with at least k attempts.
    """

    tasks: int
    rollouts: int
    mean_reward: Estimate
    pass_at: dict[int, Estimate]
    pass_hat: dict[int, Estimate]


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of tasks and attempts.

    `tasks_lost`: tasks without any scored attempt. `lost`: attempts lost to infrastructure
    failures. `failed`: failed attempts by kind of failure, retried ones included.
    """

    tasks: int
    tasks_lost: int
    scored: int
    lost: int
    truncated: int
    limits: dict[str, int]
    failed: dict[str, int]


class Costs(msgspec.Struct, frozen=True, kw_only=True):
    """Costs of scored attempts: means over them, and `total_*` of all together.

    `cost` includes the judge's, None without known prices; `cost_of_pass` is per passing attempt.
    """

    turns: float
    prompt_tokens: float
    completion_tokens: float
    seconds: float
    total_tokens: int
    total_prompt_tokens: int
    total_completion_tokens: int
    total_seconds: float
    total_sandbox_seconds: float = 0.0
    total_scoring_seconds: float = 0.0
    total_judge_tokens: int = 0
    currency: str = ""
    cost: float | None = None
    total_cost: float | None = None
    cost_of_pass: float | None = None


class TaskRow(msgspec.Struct, frozen=True, kw_only=True):
    """One task: rewards of its scored attempts, and whether the model was cut off in each."""

    task_id: str
    rewards: list[float]
    lost: int
    labels: dict[str, str]
    truncated: list[bool] = []
    digest: str = ""


class RunReport(msgspec.Struct, frozen=True, kw_only=True):
    """One run over the tasks; `overall` is None where no attempt counts.

    Args:
        by: measures by name and value of a label; under "agent", where agents have rewards of their
            own, by agent; under "correct", for metrics `correct_<type>`, by type.
        components, metrics: means over the scored attempts that have them.
        steps: measures of the logged steps, by name (`step_measures`).
    """

    overall: Measures | None
    by: dict[str, dict[str, Measures]]
    counts: Counts
    costs: Costs | None
    components: dict[str, float]
    metrics: dict[str, float]
    tasks: list[TaskRow]
    steps: dict[str, Estimate] = {}


class HarnessFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A task of lm-evaluation-harness, in its own numbers.

    `metric` and `filter` give the rewards here; `values` has all metrics: "metric,filter" -> value,
    "metric_stderr,filter" -> its error; `requests` counts the calls of all tasks of the run.
    """

    version: str
    task_version: str
    metric: str
    filter: str
    num_fewshot: int
    values: dict[str, float]
    requests: int = 0


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The report of an evaluation.

    Args:
        env: the environment, or the task of a harness.
        name: name among other reports; `env` where it is unique.
        created_at: `time.time()`.
        baselines: runs to compare `run` with, by name; those in other words, too (`robustness`).
        differences: mean reward of `run` minus the baseline's, over the tasks of both.
        harness: what the harness measured; None for our own evaluations.
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
    baselines: dict[str, RunReport] = {}
    differences: dict[str, Estimate] = {}
    name: str = ""
    prices: Prices | None = None
    harness: HarnessFacts | None = None
    robustness: Robustness | None = None
    schema_version: int = SCHEMA_VERSION


def report_run(
    results: Sequence[TaskResult],
    rules: Rules,
    prices: Prices | None = None,
    best: Mapping[str, int] | None = None,
) -> RunReport:
    stepped = stepped_of(results, rules)
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
        steps=step_measures(stepped, best or shortest([stepped]), seed=rules.seed),
    )


def asked_of(results: Sequence[TaskResult], rules: Rules) -> dict[str, Asked]:
    counted = {result.task_id: rewards_of(result, rules) for result in results}
    return {
        task_id: Asked(mean(rewards), mean([passes(reward, rules) for reward in rewards]))
        for task_id, rewards in counted.items()
        if rewards
    }


def stepped_of(results: Sequence[TaskResult], rules: Rules) -> dict[str, list[Stepped]]:
    found = {
        result.task_id: [
            Stepped(attempt.steps, passes(attempt.reward, rules))
            for attempt in result.attempts
            if attempt.steps is not None
        ]
        for result in results
    }
    return {task_id: attempts for task_id, attempts in found.items() if attempts}


def rewards_of(result: TaskResult, rules: Rules) -> list[float]:
    """Returns the rewards of a task's attempts as `rules` count them."""
    found = [_counted(attempt.reward, attempt.truncated, rules) for attempt in result.attempts]
    return [value for value in found if value is not None] + _zeros(result, rules)


def counted_rewards(row: TaskRow, rules: Rules) -> list[float]:
    """Likewise for a row of a report, by `rules` that may differ from the report's own."""
    found = [_counted(*attempt, rules) for attempt in attempts_of(row)]
    return [value for value in found if value is not None] + _zeros(row, rules)


def attempts_of(row: TaskRow) -> Iterator[tuple[float, bool]]:
    """Yields the reward of each attempt, and whether the model was cut off in it."""
    return zip(row.rewards, row.truncated or [False] * len(row.rewards), strict=True)


def _counted(value: float, truncated: bool, rules: Rules) -> float | None:
    """Returns what an attempt counts as; None where it does not count."""
    if not truncated or rules.truncated == "score":
        return value
    return rules.worst if rules.truncated == "zero" else None


def _zeros(result: TaskResult | TaskRow, rules: Rules) -> list[float]:
    return [rules.worst] * result.lost if rules.failures == "zero" else []


def measured(values: Sequence[Sequence[float]], rules: Rules) -> Measures | None:
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
        mean_reward=estimate([mean(task) for task in tried], seed=rules.seed),
        pass_at=pass_at,
        pass_hat=pass_hat,
    )


def passes(value: float, rules: Rules) -> bool:
    return value >= rules.pass_at - _ROUNDING


def difference(
    run: Sequence[TaskResult], baseline: Sequence[TaskResult], rules: Rules
) -> Estimate | None:
    """Returns the mean reward of `run` minus that of `baseline` over the tasks of both, if any."""
    others = {result.task_id: rewards_of(result, rules) for result in baseline}
    pairs = [(rewards_of(result, rules), others.get(result.task_id)) for result in run]
    values = [mean(mine) - mean(other) for mine, other in pairs if mine and other]
    return estimate(values, seed=rules.seed) if values else None


def _by_kind(results: Sequence[TaskResult], rules: Rules) -> dict[str, dict[str, Measures]]:
    kinds = {name: dict(_of_label(results, name, rules)) for name in _telling_labels(results)}
    agents = dict.fromkeys(
        name for result in results for attempt in result.attempts for name in attempt.rewards
    )
    metrics = {
        name for result in results for attempt in result.attempts for name in attempt.metrics
    }
    correct = sorted(name for name in metrics if name.startswith(CORRECT))
    for kind, values, names in (("agent", "rewards", agents), ("correct", "metrics", correct)):
        if names:
            kinds[kind] = {
                name.removeprefix(CORRECT) if kind == "correct" else name: found
                for name in names
                if (found := _of_named(results, values, name, rules)) is not None
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


def _of_named(
    results: Sequence[TaskResult], values: str, name: str, rules: Rules
) -> Measures | None:
    """Measures by one of the attempts' named `values`: their rewards or metrics."""
    counted = []
    for result in results:
        having = [attempt for attempt in result.attempts if name in getattr(attempt, values)]
        found = [
            _counted(getattr(attempt, values)[name], attempt.truncated, rules) for attempt in having
        ]
        if having:
            counted.append([value for value in found if value is not None] + _zeros(result, rules))
    return measured(counted, rules)


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
        limits=dict(Counter(attempt.limit for attempt in attempts if attempt.limit is not None)),
        failed=dict(failed),
    )


def _costs(attempts: Sequence[AttemptResult], rules: Rules, prices: Prices | None) -> Costs | None:
    if not attempts:
        return None
    count = len(attempts)
    prompt = sum(attempt.usage.prompt_tokens for attempt in attempts)
    completion = sum(attempt.usage.completion_tokens for attempt in attempts)
    seconds = sum(attempt.usage.seconds for attempt in attempts)
    counted = (_counted(attempt.reward, attempt.truncated, rules) for attempt in attempts)
    passed = sum(value is not None and passes(value, rules) for value in counted)
    paid = [attempt.usage.cost_at(prices) for attempt in attempts]
    known = [price for price in paid if price is not None]
    total = sum(known) if known and len(known) == count else None
    judges = [attempt.usage.judge for attempt in attempts if attempt.usage.judge is not None]
    sandboxes = [
        attempt.usage.sandbox.wall_seconds for attempt in attempts if attempt.usage.sandbox
    ]
    return Costs(
        turns=sum(attempt.turns for attempt in attempts) / count,
        prompt_tokens=prompt / count,
        completion_tokens=completion / count,
        seconds=seconds / count,
        total_tokens=prompt + completion,
        total_prompt_tokens=prompt,
        total_completion_tokens=completion,
        total_seconds=seconds,
        total_sandbox_seconds=sum(sandboxes),
        total_scoring_seconds=sum(attempt.usage.scoring_seconds for attempt in attempts),
        total_judge_tokens=sum(judge.prompt_tokens + judge.completion_tokens for judge in judges),
        currency=_currency(attempts, prices),
        cost=None if total is None else total / count,
        total_cost=total,
        cost_of_pass=total / passed if total is not None and passed else None,
    )


def _currency(attempts: Sequence[AttemptResult], prices: Prices | None) -> str:
    recorded = (
        attempt.usage.cost.currency for attempt in attempts if attempt.usage.cost is not None
    )
    return prices.currency if prices is not None else next(recorded, "")


def _means(all_values: Iterable[Mapping[str, float]]) -> dict[str, float]:
    found: dict[str, list[float]] = {}
    for values in all_values:
        for name, value in values.items():
            found.setdefault(name, []).append(value)
    return {name: mean(values) for name, values in sorted(found.items())}


class Totals(msgspec.Struct, frozen=True, kw_only=True):
    """Totals over all parts, without baselines; no cost where currencies differ."""

    tasks: int
    tasks_lost: int
    scored: int
    lost: int
    truncated: int
    prompt_tokens: int
    completion_tokens: int
    seconds: float
    cost: float | None
    currency: str


class Suite(msgspec.Struct, frozen=True, kw_only=True):
    """An evaluation of several parts; `model` joins their models with commas.

    `average` is the mean over the parts of their mean reward, equally weighted; `average_pass` that
    of pass@1. None where nothing counts.
    """

    model: str
    complete: bool
    simulated: bool
    created_at: float
    average: Estimate | None
    average_pass: Estimate | None
    totals: Totals
    parts: list[Report]
    schema_version: int = SCHEMA_VERSION


def suite_of(parts: Sequence[Report]) -> Suite:
    rewards = [
        [found for row in part.run.tasks if (found := counted_rewards(row, part.rules))]
        for part in parts
    ]
    means = [[mean(task) for task in tasks] for tasks in rewards if tasks]
    passed = [
        [mean([passes(reward, part.rules) for reward in task]) for task in tasks]
        for part, tasks in zip(parts, rewards, strict=True)
        if tasks
    ]
    seed = parts[0].rules.seed
    return Suite(
        model=", ".join(dict.fromkeys(part.model for part in parts if part.model)),
        complete=all(part.complete for part in parts),
        simulated=any(part.simulated for part in parts),
        created_at=max(part.created_at for part in parts),
        average=estimate_of_means(means, seed=seed) if means else None,
        average_pass=estimate_of_means(passed, seed=seed) if passed else None,
        totals=_totals(parts),
        parts=list(parts),
    )


def _totals(parts: Sequence[Report]) -> Totals:
    counts = [part.run.counts for part in parts]
    costs = [part.run.costs for part in parts if part.run.costs is not None]
    paid = [cost.total_cost for cost in costs if cost.total_cost is not None]
    currencies = {part.prices.currency for part in parts if part.prices is not None}
    known = bool(paid) and len(currencies) == 1
    counted = ("tasks", "tasks_lost", "scored", "lost", "truncated")
    spent = ("prompt_tokens", "completion_tokens", "seconds")
    return Totals(
        **{name: sum(getattr(count, name) for count in counts) for name in counted},
        **{name: sum(getattr(cost, f"total_{name}") for cost in costs) for name in spent},
        cost=sum(paid) if known else None,
        currency=next(iter(currencies)) if known else "",
    )


def summary_scalars(report: Report | Suite) -> dict[str, float]:
    """Returns the results of an evaluation as numbers by name, for trackers."""
    found: dict[str, float] = {}
    for part in report.parts if isinstance(report, Suite) else [report]:
        measured = part.run.overall
        if measured is None:
            continue
        of = f"evaluate/{part.name or part.env}"
        estimates = {
            "mean_reward": measured.mean_reward,
            **{f"pass_at_{k}": share for k, share in measured.pass_at.items()},
            **{f"pass_hat_{k}": share for k, share in measured.pass_hat.items()},
        }
        for name, measure in estimates.items():
            ends = {"": measure.value, "_low": measure.low, "_high": measure.high}
            found |= {f"{of}/{name}{end}": at for end, at in ends.items() if at is not None}
    return found
