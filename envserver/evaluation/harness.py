"""Reads the results of lm-evaluation-harness as reports.

In: what it writes with `--log_samples`: `results_*.json` and, for each task, `samples_TASK_*.jsonl`
with a line for each document and filter. Out: for each task a `HarnessRun`, and from it a `Report`
in which a document is a task with one attempt. What holds: the mean reward is the harness's own
value of that metric.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from envserver_records.costs import part
from envserver_records.errors import InputError

from .report import Counted, HarnessFacts, Report, report_run
from .results import AttemptResult, AttemptUsage, TaskResult

SAMPLES_FILE = "samples.jsonl"
Json = dict[str, Any]


class HarnessRun(msgspec.Struct, frozen=True, kw_only=True):
    """A task of the harness that was run.

    Args:
        settings: the settings that decide results.
        prompt_tokens, completion_tokens: over all calls; divided evenly among the documents.
    """

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
    """One task as the harness wrote it: its numbers and the place of its documents."""

    task: str
    facts: HarnessFacts
    samples: Path
    documents: int


def harvest(folder: Path, *, metric: str | None, requests: int) -> list[Harvest]:
    """Returns the tasks in a folder that the harness wrote to; of several runs the last.

    Args:
        metric: the metric that gives rewards: "exact_match" or "exact_match,strict-match"; unset:
            for each task the first metric that is a mean of per-document values from 0 to 1 where
            higher is better.
        requests: see `HarnessFacts`.

    Raises:
        InputError: the folder holds no results, or no task in it has such a metric.
    """
    path = _latest(folder, "results_*.json")
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


def _latest(folder: Path, pattern: str) -> Path | None:
    return max(folder.rglob(pattern), key=lambda path: path.name, default=None)


def _harvested(
    task: str, results: _Results, samples: Path, metric: str | None, requests: int
) -> Harvest:
    values = {
        name: float(value)
        for name, value in results.results[task].items()
        if "," in name and isinstance(value, (int, float)) and not isinstance(value, bool)
    }
    by_filter: dict[str, list[Json]] = {}
    for line in _lines(samples):
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
    """Whether the harness's value is the mean of per-document values that can be rewards."""
    found = [_value(line, measure) for line in lines]
    if not found or not all(found):
        return False
    return math.isclose(value, sum(one[0] for one in found) / len(found), abs_tol=1e-6)


def _value(line: Json, measure: str) -> list[float]:
    """Returns the value of one document, [] where it has none from 0 to 1."""
    value = line.get(measure)
    return [float(value)] if isinstance(value, (int, float)) and 0 <= value <= 1 else []


def _lines(path: Path) -> Iterator[Json]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                yield msgspec.json.decode(line, type=Json)
            except msgspec.DecodeError as error:
                raise InputError(
                    f"{path}, line {number} is not a sample of the harness: {error}.",
                    place=f"line {number}",
                ) from error


def report_harness(folder: Path, name: str, run: HarnessRun, counted: Counted) -> Report:
    """Returns the report of one task, from the samples in its folder.
    Raises InputError: the samples cannot be read.
    """
    path = folder / SAMPLES_FILE
    if not path.exists():
        raise InputError(f"{path} is missing.", place=str(path))
    rules = counted.rules(group_size=1, seed=0)
    results = _results(list(_lines(path)), run)
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
        baselines={},
        differences={},
        prices=counted.prices,
        harness=run.facts,
    )


def _results(lines: Sequence[Json], run: HarnessRun) -> list[TaskResult]:
    """Returns the documents as task results; values of other filters become components."""
    measure, own = run.facts.metric, run.facts.filter
    others: dict[Any, dict[str, float]] = {}
    for line in lines:
        for name in line.get("metrics", ()):
            key = f"{name},{line.get('filter')}"
            for value in _value(line, name):
                others.setdefault(line["doc_id"], {})[_word(key)] = value
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


def _word(key: str) -> str:
    return re.sub(r"\s+", " ", key)
