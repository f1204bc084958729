"""The folder of an evaluation: `run.json`, `groups.jsonl` and `tasks.jsonl` (of a baseline
`groups-NAME.jsonl`, `tasks-NAME.jsonl`), and the report that follows from them and a `View`.

Made again from the same files, a report is the same, byte for byte.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from envserver_records.costs import Prices, part
from envserver_records.errors import InputError, UsageError
from envserver_records.records import Split

from ..export.stored_sources import files_of, records
from ..settings.runs import Failures, Truncated
from .report import (
    Counted,
    HarnessFacts,
    Report,
    Suite,
    asked_of,
    difference,
    report_run,
    robustness,
    stepped_of,
    suite_of,
)
from .results import (
    AttemptResult,
    AttemptUsage,
    GroupFacts,
    TaskResult,
    read_facts,
    read_results,
    read_tasks,
    shortest,
)

SAMPLES_FILE = "samples.jsonl"
Json = dict[str, Any]


class HarnessRun(msgspec.Struct, frozen=True, kw_only=True):
    """A task of the harness that was run; tokens are over all calls of its documents."""

    task: str
    model: str
    simulated: bool
    settings: Json
    facts: HarnessFacts
    prompt_tokens: int
    completion_tokens: int
    seconds: float
    documents: int
    finished_at: float


class _Results(msgspec.Struct):
    results: dict[str, Json]
    versions: dict[str, Any] = {}
    n_shot: dict[str, Any] = msgspec.field(name="n-shot", default_factory=dict)
    higher_is_better: dict[str, dict[str, bool | None]] = {}
    lm_eval_version: str = ""


class Harvest(msgspec.Struct, frozen=True, kw_only=True):
    task: str
    facts: HarnessFacts
    samples: Path
    documents: int


def harvest(folder: Path, *, metric: str | None, requests: int) -> list[Harvest]:
    """Returns the tasks in a folder that the harness wrote to; of several runs the last.

    Args:
        metric: "exact_match" or "exact_match,strict-match"; unset: for each task the first metric
            that is a mean of per-document values from 0 to 1 where higher is better.
    """
    path = max(folder.rglob("results_*.json"), key=lambda path: path.name, default=None)
    if path is None:
        raise InputError(f"{folder} holds no results of lm-evaluation-harness.", place=str(folder))
    stamp = path.stem.removeprefix("results_")
    try:
        results = msgspec.json.decode(path.read_bytes(), type=_Results)
    except (OSError, msgspec.DecodeError) as error:
        raise InputError(
            f"{path} is not a result of the harness: {error}.", place=str(path)
        ) from error
    found = []
    for task in results.results:
        samples = path.with_name(f"samples_{task}_{stamp}.jsonl")
        if samples.exists():  # groups of tasks have no samples of their own
            found.append(_harvested(task, results, samples, metric, requests))
    if not found:
        raise InputError(f"{path} has no task with samples.", place=str(path))
    return found


def _harvested(
    task: str, results: _Results, samples: Path, metric: str | None, requests: int
) -> Harvest:
    values = {
        name: float(value)
        for name, value in results.results[task].items()
        if "," in name and isinstance(value, (int, float)) and not isinstance(value, bool)
    }
    by_filter: dict[str, list[Json]] = {}
    for line in records(samples, Json, "a sample of the harness"):
        by_filter.setdefault(line.get("filter", "none"), []).append(line)
    better = results.higher_is_better.get(task, {})
    for name in values:
        measure, _, filtered = name.partition(",")
        lines = by_filter.get(filtered, [])
        if _is_wanted(name, metric, better) and _is_mean(values[name], measure, lines):
            facts = HarnessFacts(
                version=results.lm_eval_version,
                task_version=str(results.versions.get(task, "")),
                metric=measure,
                filter=filtered,
                num_fewshot=int(results.n_shot.get(task) or 0),
                values=values,
                requests=requests,
            )
            return Harvest(task=task, facts=facts, samples=samples, documents=len(lines))
    wanted = "a metric" if metric is None else f"the metric {metric!r}"
    raise InputError(
        f"{task} lacks {wanted} that is the mean of a value from 0 to 1 of each document.",
        hint=f"It has: {', '.join(name for name in values if '_stderr' not in name)}.",
        place=str(samples),
    )


def _is_wanted(name: str, metric: str | None, better: Mapping[str, bool | None]) -> bool:
    measure = name.partition(",")[0]
    if measure.endswith("_stderr"):
        return False
    if metric is None:
        return better.get(measure) is not False
    return metric in (name, measure)


def _is_mean(value: float, measure: str, lines: Sequence[Json]) -> bool:
    found = [_value(line, measure) for line in lines]
    if not found or not all(found):
        return False
    return math.isclose(value, sum(pair[0] for pair in found) / len(found), abs_tol=1e-6)


def _value(line: Json, measure: str) -> list[float]:
    value = line.get(measure)
    return [float(value)] if isinstance(value, (int, float)) and 0 <= value <= 1 else []


def report_harness(folder: Path, name: str, run: HarnessRun, counted: Counted) -> Report:
    path = folder / SAMPLES_FILE
    if not path.exists():
        raise InputError(f"{path} is missing.", place=str(path))
    rules = counted.rules(group_size=1, seed=0)
    results = _harness_results(list(records(path, Json, "a sample of the harness")), run)
    return Report(
        env=run.task,
        name=name or run.task,
        split="test",
        model=run.model,
        complete=True,
        simulated=run.simulated,
        created_at=run.finished_at,
        rules=rules,
        settings=run.settings,
        run=report_run(results, rules, counted.prices),
        prices=counted.prices,
        harness=run.facts,
    )


def _harness_results(lines: Sequence[Json], run: HarnessRun) -> list[TaskResult]:
    """Returns the documents as task results; values of other filters become components."""
    measure, own = run.facts.metric, run.facts.filter
    others: dict[Any, dict[str, float]] = {}
    for line in lines:
        for name in line.get("metrics", ()):
            key = f"{name},{line.get('filter')}"
            for value in _value(line, name):
                others.setdefault(line["doc_id"], {})[re.sub(r"\s+", " ", key)] = value
    shares = _shares(run)
    return [
        TaskResult(
            task_id=str(line["doc_id"]),
            attempts=[
                AttemptResult(
                    reward=_value(line, measure)[0],
                    components=others.get(line["doc_id"], {}),
                    turns=1,
                    usage=next(shares),
                )
            ],
            digest=str(line.get("doc_hash", ""))[:16],
        )
        for line in lines
        if line.get("filter", "none") == own and _value(line, measure)
    ]


def _shares(run: HarnessRun) -> Iterator[AttemptUsage]:
    """Yields each document's share of the tokens; the shares add up to the total."""
    count = max(1, run.documents)
    for number in range(count):
        yield AttemptUsage(
            seconds=run.seconds / count,
            prompt_tokens=part(run.prompt_tokens, number, count),
            completion_tokens=part(run.completion_tokens, number, count),
        )


RUN_FILE = "run.json"
Pricing = Callable[[str], Prices | None]
"""Returns the prices of a model by its name."""


class View(msgspec.Struct, frozen=True, kw_only=True):
    """Overrides of how attempts are counted, see `Counted`. None leaves a rule as it was."""

    pass_at: float | None = None
    failures: Failures | None = None
    truncated: Truncated | None = None
    pricing: Pricing | None = None

    def over(self, before: Counted, model: str) -> Counted:
        rules = {"pass_at": self.pass_at, "failures": self.failures, "truncated": self.truncated}
        prices = self.pricing(model) if self.pricing else None
        given = {
            name: rule for name, rule in {**rules, "prices": prices}.items() if rule is not None
        }
        return msgspec.structs.replace(before, **given)


class Evaluated(msgspec.Struct, frozen=True, kw_only=True):
    """An environment that was evaluated.

    Args:
        agent: the program that played the agents (`--agent`); empty: the environment's own.
        shard: "2/4" where only every fourth task was tried, from the second on; empty: all.
        baselines: names of the baselines and variants that were run beside it.
        variants: runs that asked the same tasks in other words, with paraphrases by task id.
    """

    environment: str
    env: dict[str, Any]
    sampling: dict[str, Any]
    split: Split
    group_size: int
    seed: int
    simulated: bool
    agent: dict[str, str] = {}
    shard: str = ""
    baselines: list[str] = []
    variants: dict[str, dict[str, str]] = {}
    complete: bool = False
    finished_at: float = 0.0


class RunFile(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The contents of `run.json`; `parts` names the folders of a suite's parts."""

    name: str = ""
    evaluated: Evaluated | None = None
    harness: HarnessRun | None = None
    counted: Counted = Counted()
    parts: list[str] = []


def groups_path(folder: Path, baseline: str = "") -> Path:
    return folder / f"groups{baseline and f'-{baseline}'}.jsonl"


def tasks_path(folder: Path, baseline: str = "") -> Path:
    return folder / f"tasks{baseline and f'-{baseline}'}.jsonl"


def read_run_file(folder: Path) -> RunFile | None:
    path = folder / RUN_FILE
    if not path.exists():
        return None
    try:
        run = msgspec.json.decode(path.read_bytes(), type=RunFile)
        baselines = run.evaluated.baselines if run.evaluated is not None else []
        for name in (*run.parts, *baselines):
            if name in ("", "..") or Path(name).name != name:
                raise ValueError(f"{name!r} is not the name of a folder in it")
        return run
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {error}.", place=str(path)) from error


def read_folder(folder: Path, view: View) -> list[Report]:
    found = list(_parts(folder, view))
    if not found:
        raise InputError(
            f"{folder} holds no evaluation.",
            hint="`envserver evaluate --out DIR` makes one.",
            place=str(folder),
        )
    return found


def whole(parts: Sequence[Report]) -> Report | Suite:
    """Returns the contents of `report.json`: the report of the only part, or a suite of all."""
    return parts[0] if len(parts) == 1 else suite_of(parts)


def _parts(folder: Path, view: View) -> Iterator[Report]:
    run = read_run_file(folder)
    if run is None:
        return
    if run.evaluated is not None and (folder / "tasks.jsonl").exists():
        yield _report(folder, run, run.evaluated, view)
    if run.harness is not None:
        counted = view.over(run.counted, run.harness.model)
        yield report_harness(folder, run.name, run.harness, counted)
    for name in run.parts:
        yield from _parts(folder / name, view)


def _report(folder: Path, noted: RunFile, run: Evaluated, view: View) -> Report:
    results, model = _results(folder, "", run)
    counted = view.over(noted.counted, model)
    rules, prices = counted.rules(group_size=run.group_size, seed=run.seed), counted.prices
    baselines = {
        name: _results(folder, name, run)[0]
        for name in run.baselines
        if tasks_path(folder, name).exists()
    }
    differences = {
        name: found
        for name, others in baselines.items()
        if (found := difference(results, others, rules)) is not None
    }
    best = shortest(stepped_of(results_of, rules) for results_of in (results, *baselines.values()))
    return Report(
        env=run.environment,
        name=noted.name or run.environment,
        split=run.split,
        model=model,
        complete=run.complete,
        simulated=run.simulated,
        created_at=run.finished_at,
        rules=rules,
        settings={
            "environment": run.environment,
            "env": run.env,
            "sampling": run.sampling,
            **({"agent": run.agent} if run.agent else {}),
        },
        prices=prices,
        run=report_run(results, rules, prices, best),
        baselines={
            name: report_run(others, rules, prices, best) for name, others in baselines.items()
        },
        differences=differences,
        robustness=robustness(
            asked_of(results, rules),
            {name: asked_of(baselines[name], rules) for name in run.variants if name in baselines},
            seed=rules.seed,
        ),
    )


def _results(folder: Path, baseline: str, run: Evaluated) -> tuple[list[TaskResult], str]:
    tasks = read_tasks(tasks_path(folder, baseline))
    path = groups_path(folder, baseline)
    if not path.exists():
        raise InputError(f"{path} is missing.", place=str(path))
    return read_results(path, tasks, group_size=run.group_size)


def report_of_files(place: Path, view: View) -> list[Report]:
    """Returns a report for each environment in files of groups; groups of the same task are one
    task."""
    by_env: dict[str, list[GroupFacts]] = {}
    for path in files_of(str(place)):
        for facts in read_facts(path):
            by_env.setdefault(facts.env, []).append(facts)
    if not by_env:
        raise InputError(f"{place} holds no group.", place=str(place))
    return [_report_of_groups(place, env, groups, view) for env, groups in by_env.items()]


def _report_of_groups(path: Path, env: str, groups: list[GroupFacts], view: View) -> Report:
    results: dict[str, TaskResult] = {}
    for facts in groups:
        before = results.get(facts.task_id, TaskResult(task_id=facts.task_id, attempts=[]))
        lost = max(0, facts.asked - len(facts.rollouts)) if facts.asked is not None else 0
        results[facts.task_id] = msgspec.structs.replace(
            before, attempts=[*before.attempts, *facts.rollouts], lost=before.lost + lost
        )
    model = ", ".join(dict.fromkeys(group.model for group in groups))
    counted = view.over(Counted(), model)
    size = max(len(result.attempts) + result.lost for result in results.values())
    rules = counted.rules(group_size=size, seed=0)
    return Report(
        env=env,
        name=env,
        split=groups[0].split,
        model=model,
        complete=True,
        simulated=False,
        created_at=path.stat().st_mtime,
        rules=rules,
        settings={"environment": env, "env": {"split": groups[0].split, "seed": groups[0].seed}},
        run=report_run(list(results.values()), rules, counted.prices),
        prices=counted.prices,
    )


def read_run(path: Path, view: View) -> dict[str, Report]:
    if path.is_dir() and (read_run_file(path) is not None or not any(path.rglob("*.jsonl*"))):
        return {report.name or report.env: report for report in read_folder(path, view)}
    if not path.exists():
        raise InputError(f"There is no {path}.", place=str(path))
    return {report.env: report for report in report_of_files(path, view)}


def called_alike(a: Mapping[str, Report], b: Mapping[str, Report]) -> dict[str, Report]:
    """Returns the reports of `b`; a single one gets the name of the single one of `a`."""
    if len(a) == len(b) == 1:  # one environment each: whatever they are called
        (name, report), (_, other) = *a.items(), *b.items()
        b = {name: other} if report.env == other.env else b
    if not set(a) & set(b):
        raise UsageError(
            f"One run has {', '.join(a)}, the other has {', '.join(b)}: they have no environment "
            "in common."
        )
    return dict(b)
