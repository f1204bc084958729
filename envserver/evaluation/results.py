"""What a groups file says of each task: its attempts, as far as reports need them.

Tokens and messages are skipped without being built, so large files are read fast.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from ..errors import InputError
from ..records import Task

LABELS = ("level", "type", "domain", "data_set")
"""Names in the public part of tasks by which reports tell tasks apart."""


class AttemptUsage(msgspec.Struct, frozen=True):
    """Of one attempt: tokens of all calls, seconds of wall clock."""

    seconds: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """One scored rollout; fields as in `records.Trajectory` and its score."""

    reward: float
    components: dict[str, float] = {}
    metrics: dict[str, float] = {}
    truncated: bool = False
    limit: str | None = None
    turns: int = 0
    usage: AttemptUsage = AttemptUsage()


class TaskResult(msgspec.Struct, frozen=True, kw_only=True):
    """The attempts at one task.

    Args:
        lost: attempts that ended by our fault and have no score.
        failed: attempts that failed, also where another followed, by kind of failure.
        labels: what the task is, by name (`LABELS`).
    """

    task_id: str
    attempts: list[Attempt]
    lost: int = 0
    failed: dict[str, int] = {}
    labels: dict[str, str] = {}


class _FailureKind(msgspec.Struct):
    kind: str


class _Facts(msgspec.Struct):
    group_id: str
    task_id: str
    model: str
    rollouts: list[Attempt]
    failures: list[_FailureKind]


class _Line(msgspec.Struct):
    envserver: _Facts


class Results(msgspec.Struct):
    """What a groups file holds: results by group id, and the model that made them ("": none)."""

    by_group: dict[str, TaskResult]
    model: str = ""


def read_results(path: Path, *, group_size: int) -> Results:
    """The results in a file that `envserver evaluate` or `process` wrote.

    Args:
        group_size: attempts that each group was to have; those missing are lost.

    Raises:
        InputError: a line is no group of ours.
    """
    results = Results({})
    for facts in _facts(path):
        results.model = facts.model
        results.by_group[facts.group_id] = TaskResult(
            task_id=facts.task_id,
            attempts=facts.rollouts,
            lost=max(0, group_size - len(facts.rollouts)),
            failed=Counter(failure.kind for failure in facts.failures),
        )
    return results


def _facts(path: Path) -> Iterator[_Facts]:
    decoder = msgspec.json.Decoder(_Line)
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                yield decoder.decode(line).envserver
            except msgspec.DecodeError as error:
                raise InputError(
                    f"{path}, line {number} is no group of ours: {error}.", place=f"line {number}"
                ) from error


class TaskFacts(msgspec.Struct, frozen=True):
    """What reports need to know of a task."""

    task_id: str
    labels: dict[str, str]


def facts_of(task: Task) -> TaskFacts:
    """By which names and values (of its public part) reports tell `task` apart."""
    said = {name: task.public.get(name) for name in LABELS}
    labels = {name: str(value) for name, value in said.items() if isinstance(value, (str, int))}
    return TaskFacts(task.id, labels)


def results_of_tasks(
    results: Mapping[str, TaskResult],
    tasks: Mapping[str, TaskFacts],
    dropped: Mapping[str, Mapping[str, int]],
    *,
    group_size: int,
) -> list[TaskResult]:
    """The results of those `tasks` (by group id) that have any, with their labels, in that order.

    Args:
        dropped: groups of which nothing was kept, by id, with the failures of their attempts by
            kind: all their attempts are lost.
    """
    found = []
    for group_id, facts in tasks.items():
        result = results.get(group_id)
        if result is not None:
            found.append(msgspec.structs.replace(result, labels=facts.labels))
        elif group_id in dropped:
            found.append(
                TaskResult(
                    task_id=facts.task_id,
                    attempts=[],
                    lost=group_size,
                    failed=dict(dropped[group_id]),
                    labels=facts.labels,
                )
            )
    return found
