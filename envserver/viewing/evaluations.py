"""Results of evaluations and comparisons of two of them, as JSON for the page."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
from envserver_records.errors import InputError, NotFoundError
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from ..evaluation.comparison import Comparison, TaskPair, compare, task_pairs
from ..evaluation.folders import RUN_FILE, View, called_alike, read_run
from ..evaluation.report import Report, Rules, RunReport, suite_of
from ..evaluation.tables import comparison_notes, notes_of, verdicts_of
from ..trainers.bodies import MOST_GROUPS
from .index import IndexReader
from .sources import Viewed

TaskOrder = Literal["worst", "best", "task"]
"""worst: the largest loss of b first; best: its largest gain first; task: by id."""

_MOST_NAMED: Final = 100
_MOST_REWARDS: Final = 64

Run = Mapping[str, Report]


class ComparisonSearch(BaseModel):
    """Which runs are compared, and which of their tasks are shown."""

    model_config = ConfigDict(extra="forbid", defer_build=False)

    a: str = ""
    b: str = ""
    order: TaskOrder = "worst"
    environment: str = ""
    text: str = ""
    cursor: Annotated[int, BeforeValidator(lambda given: given or 0)] = Field(0, ge=0)
    limit: int = Field(100, ge=1, le=MOST_GROUPS)


class Evaluations:
    def __init__(self, viewed: Viewed, index: IndexReader) -> None:
        self._viewed = viewed
        self._index = index
        self._known: dict[str, tuple[Any, Run]] = {}
        self._averages: dict[str, Any] = {}
        """Mean over the environments of a run; None where there is one."""
        self._reading = asyncio.Lock()
        self._compared: tuple[Any, Comparison] | None = None

    async def all(self) -> dict[str, Any]:
        found, problems = [], []
        for name in self._viewed.runs:
            try:
                run = await self._run(name)
            except InputError as error:
                problems.append({"name": name, "message": error.message})
                continue
            parts = [_part(part, report) for part, report in run.items()]
            facts = {"average": self._averages[name], "environments": parts}
            found.append({"name": name, "model": _models(run), **facts})
        return {"evaluations": found, "problems": problems}

    async def comparison(self, wanted: ComparisonSearch) -> dict[str, Any]:
        names = self._viewed.runs
        a, b = wanted.a or names[0], wanted.b or names[min(1, len(names) - 1)]
        run = await self._run(a)
        two = called_alike(run, await self._run(b))
        found = await self._compared_runs((a, run), (b, two))
        pairs = await asyncio.to_thread(_chosen, run, two, found.rules, wanted)
        end = wanted.cursor + wanted.limit
        page = pairs[wanted.cursor : end]
        parts = {pair.part for pair in page}
        a_groups = {part: await self._groups(a, run[part]) for part in parts}
        b_groups = {part: await self._groups(b, two[part]) for part in parts}
        return {
            **_facts(found),
            "verdicts": verdicts_of(found),
            "notes": comparison_notes(found),
            "tasks": [
                {
                    "environment": pair.part,
                    "task_id": pair.a.task_id,
                    "a_mean": pair.a_mean,
                    "b_mean": pair.b_mean,
                    "difference": pair.difference,
                    "a_rewards": pair.a.rewards[:_MOST_REWARDS],
                    "b_rewards": pair.b.rewards[:_MOST_REWARDS],
                    "a_group": a_groups[pair.part].get(pair.a.task_id),
                    "b_group": b_groups[pair.part].get(pair.b.task_id),
                }
                for pair in page
            ],
            "total": len(pairs),
            "cursor": str(end) if end < len(pairs) else "",
        }

    async def _compared_runs(self, a: tuple[str, Run], b: tuple[str, Run]) -> Comparison:
        """Compares; remembers the last comparison, whose intervals take a while."""
        key = (a[0], self._known[a[0]][0], b[0], self._known[b[0]][0])
        if self._compared is None or self._compared[0] != key:
            rules = next(iter(a[1].values())).rules
            found = await asyncio.to_thread(compare, a[1], b[1], rules, names=(a[0], b[0]))
            self._compared = (key, found)
        return self._compared[1]

    async def _groups(self, run: str, report: Report) -> dict[str, str]:
        is_alone = len(self._viewed.runs) == 1
        return await self._index.groups_of_tasks("" if is_alone else run, report.name or report.env)

    async def _run(self, name: str) -> Run:
        if name not in self._viewed.runs:
            raise NotFoundError(
                f"There is no run {name!r}.", hint=f"Runs: {', '.join(self._viewed.runs)}."
            )
        place = Path(self._viewed.places[self._viewed.runs.index(name)])
        async with self._reading:
            state = await asyncio.to_thread(_state, place)
            known = self._known.get(name)
            if known is None or known[0] != state:
                run = await asyncio.to_thread(read_run, place, View())
                self._averages[name] = await asyncio.to_thread(_average, run)
                known = self._known[name] = (state, run)
        return known[1]


def _average(run: Run) -> Any:
    return _plain(suite_of(list(run.values())).average) if len(run) > 1 else None


def _part(name: str, report: Report) -> dict[str, Any]:
    return {
        "environment": name,
        "split": report.split,
        "model": report.model,
        "complete": report.complete,
        "simulated": report.simulated,
        "created_at": report.created_at,
        "lowest": report.rules.worst,
        "highest": report.rules.best,
        "group_size": report.rules.group_size,
        "notes": notes_of(report),
        **_numbers(report.run),
        "baselines": [
            {
                "name": baseline,
                **_numbers(run),
                "difference": _plain(report.differences.get(baseline)),
            }
            for baseline, run in report.baselines.items()
        ],
    }


def _numbers(run: RunReport) -> dict[str, Any]:
    overall = {} if run.overall is None else _plain(run.overall)
    reward = overall.get("mean_reward", {})
    return {
        "reward_mean": reward.get("value"),
        "low": reward.get("low"),
        "high": reward.get("high"),
        "tasks": run.counts.tasks,
        "rollouts": run.counts.scored,
        "lost": run.counts.lost,
        "truncated": run.counts.truncated,
        "pass_at": overall.get("pass_at", {}),
        "pass_hat": overall.get("pass_hat", {}),
        "by": {
            label: {value: _plain(measured.mean_reward) for value, measured in values.items()}
            for label, values in run.by.items()
        },
        "costs": _plain(run.costs),
        "components": run.components,
    }


def _facts(found: Comparison) -> dict[str, Any]:
    facts: dict[str, Any] = _plain(found)
    del facts["changes"]
    for part in facts["parts"]:
        for name in ("only_a", "only_b", "other_tasks"):
            part[f"{name}_count"] = len(part[name])
            part[name] = part[name][:_MOST_NAMED]
    return facts


def _chosen(a: Run, b: Run, rules: Rules, wanted: ComparisonSearch) -> list[TaskPair]:
    found = [
        pair
        for pair in task_pairs(a, b, rules)
        if wanted.environment in ("", pair.part) and wanted.text.lower() in pair.a.task_id.lower()
    ]
    sign = {"worst": 1, "best": -1, "task": 0}[wanted.order]
    return sorted(found, key=lambda pair: (sign * pair.difference, pair.part, pair.a.task_id))


def _models(run: Run) -> str:
    return ", ".join(dict.fromkeys(report.model for report in run.values() if report.model))


def _plain(value: Any) -> Any:
    return msgspec.to_builtins(value, str_keys=True)


def _state(place: Path) -> list[tuple[str, int, int]]:
    paths = [*place.rglob("*.jsonl"), *place.rglob(RUN_FILE)] if place.is_dir() else [place]
    facts = [(str(path), path.stat()) for path in sorted(paths)]
    return [(path, facts_of.st_size, facts_of.st_mtime_ns) for path, facts_of in facts]
