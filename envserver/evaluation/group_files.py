"""Reads files of `envserver process` as reports, so that they can be compared like evaluations."""

from __future__ import annotations

from pathlib import Path

import msgspec
from envserver_records.errors import InputError

from ..export.stored_files import files_of
from .folders import View
from .report import Counted, Report, report_run
from .results import GroupFacts, TaskResult, read_facts


def report_of_files(place: Path, view: View) -> list[Report]:
    """Returns a report for each environment in a JSONL file of groups, or in a folder of them.

    A task that came several times is one task with the attempts of all its groups.

    Raises:
        InputError: a line is not a group, or there is none.
        NotFoundError: there is no file.
    """
    by_env: dict[str, list[GroupFacts]] = {}
    for path in files_of(str(place)):
        for facts in read_facts(path):
            by_env.setdefault(facts.env, []).append(facts)
    if not by_env:
        raise InputError(f"{place} holds no group.", place=str(place))
    return [_report(place, env, groups, view) for env, groups in by_env.items()]


def _report(path: Path, env: str, groups: list[GroupFacts], view: View) -> Report:
    results: dict[str, TaskResult] = {}
    for facts in groups:
        before = results.get(facts.task_id, TaskResult(task_id=facts.task_id, attempts=[]))
        lost = max(0, facts.asked - len(facts.rollouts)) if facts.asked is not None else 0
        results[facts.task_id] = msgspec.structs.replace(
            before, attempts=[*before.attempts, *facts.rollouts], lost=before.lost + lost
        )
    model = ", ".join(dict.fromkeys(one.model for one in groups))
    counted = view.over(Counted(), model)
    size = max(len(one.attempts) + one.lost for one in results.values())
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
        baselines={},
        differences={},
        prices=counted.prices,
    )
