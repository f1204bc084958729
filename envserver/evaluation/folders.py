"""The folder of an evaluation: its files, and the report that follows from them.

`run.json` says what was run, `groups.jsonl` (for a baseline: `groups-NAME.jsonl`) holds the
results, `tasks.jsonl` beside each holds what else is known about its tasks. A folder of several
parts names their folders in its `run.json`. What holds: a report is a function of these files and
of a `View`; made again it is the same, byte for byte.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
from envserver_records.costs import Prices
from envserver_records.errors import InputError
from envserver_records.records import Split

from ..evaluation_config import Failures, Truncated
from .harness import HarnessRun, report_harness
from .report import Counted, Report, asked_of, difference, report_run, stepped_of
from .results import TaskResult, read_results, read_tasks, results_of_tasks
from .robustness import robustness
from .steps import shortest
from .suite import Suite, suite_of

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
        """Returns the rules of `before` with these overrides."""
        return Counted(
            pass_at=before.pass_at if self.pass_at is None else self.pass_at,
            worst=before.worst,
            best=before.best,
            failures=self.failures or before.failures,
            truncated=self.truncated or before.truncated,
            prices=(self.pricing(model) if self.pricing else None) or before.prices,
        )


class Evaluated(msgspec.Struct, frozen=True, kw_only=True):
    """An environment that was evaluated.

    Args:
        env, sampling: the settings that decide results.
        agent: the program that played the agents (`--agent`); empty: the environment's own.
        shard: "2/4" where only every fourth task was tried, from the second on; empty: all.
        baselines: names of the baselines and variants that were run beside it.
        variants: those which asked the same tasks in other words, with paraphrases by task id.
        complete: whether all runs finished; `finished_at`: when (`time.time()`).
        simulated: whether the model was the simulated engine.
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
    """The contents of `run.json`: what was run in this folder, and which folders belong to it.

    Args:
        name: name of this part among others.
        counted: how attempts are counted by default.
        parts: names of the folders below that are parts of this evaluation.
    """

    name: str = ""
    evaluated: Evaluated | None = None
    harness: HarnessRun | None = None
    counted: Counted = Counted()
    parts: list[str] = []


def groups_path(folder: Path, baseline: str = "") -> Path:
    """Returns the path of a run's groups."""
    return folder / f"groups{baseline and f'-{baseline}'}.jsonl"


def tasks_path(folder: Path, baseline: str = "") -> Path:
    """Returns the path of the facts about a run's tasks."""
    return folder / f"tasks{baseline and f'-{baseline}'}.jsonl"


def read_run_file(folder: Path) -> RunFile | None:
    """Reads what was run in a folder; None where nothing was.
    Raises InputError: the file cannot be read.
    """
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
    """Reads the reports of all parts of the evaluation in a folder, at least one.
    Raises InputError: the folder holds no evaluation, or one of its files cannot be read.
    """
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
    best = shortest(stepped_of(one, rules) for one in (results, *baselines.values()))
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
    found = read_results(path, group_size=run.group_size)
    return results_of_tasks(found.by_group, tasks, group_size=run.group_size), found.model
