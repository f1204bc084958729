"""Reads the attempts at each task from files, as far as reports need them.

Tokens and messages are skipped without being decoded, so large files are read fast.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec
import orjson
from envserver_records.costs import Cost, JudgeUsage, Prices
from envserver_records.records import Task

from ..actions import CUT
from ..export.stored_sources import records
from .estimators import Estimate, estimate, mean

# A step is an action that the agent logged (`run.log_action`), without `finalize` and what the
# other side of a conversation said. A step is a repetition if the same tool had the same input and
# output in this attempt before; it is useless if it failed, is a repetition, or had no output.

NOT_STEPS: Final = frozenset(("finalize", "user", CUT))
_NOTHING: Final = frozenset((b"", b"null", b'""', b"{}", b"[]"))


class Action(msgspec.Struct, frozen=True):
    tool: str = ""
    input: msgspec.Raw = msgspec.Raw(b"")
    output: msgspec.Raw = msgspec.Raw(b"")
    error: str = ""


class Steps(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of an attempt's steps; `useless` counts each of the others once."""

    steps: int
    errors: int
    repeated: int
    useless: int


def steps_of(actions: Iterable[Action]) -> Steps:
    seen: set[tuple[str, bytes, bytes]] = set()
    steps = errors = repeated = useless = 0
    for action in actions:
        if action.tool in NOT_STEPS:
            continue
        gave = bytes(action.output)
        step = (action.tool, bytes(action.input), gave)
        again = step in seen
        seen.add(step)
        steps += 1
        errors += bool(action.error)
        repeated += again
        useless += bool(action.error) or again or gave in _NOTHING
    return Steps(steps=steps, errors=errors, repeated=repeated, useless=useless)


class Stepped(msgspec.Struct, frozen=True):
    steps: Steps
    passed: bool


def shortest(runs: Iterable[Mapping[str, Sequence[Stepped]]]) -> dict[str, int]:
    """Returns for each task the fewest steps with which an attempt of any run passed."""
    found: dict[str, int] = {}
    for run in runs:
        for task_id, attempts in run.items():
            passed = [attempt.steps.steps for attempt in attempts if attempt.passed]
            if passed:
                found[task_id] = min(*passed, found.get(task_id, passed[0]))
    return found


def step_measures(
    run: Mapping[str, Sequence[Stepped]], best: Mapping[str, int], *, seed: int
) -> dict[str, Estimate]:
    """Returns the measures by name, each a mean over tasks of the mean over their attempts."""
    values: dict[str, list[float]] = {}
    for task_id, attempts in run.items():
        passed = [attempt.steps.steps for attempt in attempts if attempt.passed]
        tried = [attempt.steps for attempt in attempts if attempt.steps.steps]
        found: dict[str, Sequence[float]] = {
            "steps": [attempt.steps.steps for attempt in attempts],
            "steps of a success": passed,
            "steps beyond the shortest success": [n - best.get(task_id, n) for n in passed],
            "share with an error": [attempt.errors / attempt.steps for attempt in tried],
            "share repeated": [attempt.repeated / attempt.steps for attempt in tried],
            "share useless": [attempt.useless / attempt.steps for attempt in tried],
        }
        for name, numbers in found.items():
            if numbers:
                values.setdefault(name, []).append(mean(numbers))
    return {name: estimate(numbers, seed=seed) for name, numbers in values.items()}


LABELS = ("level", "type", "domain", "data_set")
"""Names in the public part of tasks by which reports group tasks."""


class AttemptSandbox(msgspec.Struct, frozen=True):
    wall_seconds: float = 0.0


class AttemptUsage(msgspec.Struct, frozen=True):
    """Usage of one attempt, see `records.Usage`."""

    seconds: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    scoring_seconds: float = 0.0
    sandbox: AttemptSandbox | None = None
    judge: JudgeUsage | None = None
    cost: Cost | None = None

    def cost_at(self, prices: Prices | None) -> float | None:
        """Returns the cost at `prices`, the judge's recorded cost included; None if unknown.

        Named agents may have models of their own: then the cost that was recorded counts.
        """
        recorded = self.cost
        if prices is None:
            return None if recorded is None else recorded.total
        if recorded is None:
            return prices.cost(self.prompt_tokens, self.completion_tokens)
        if recorded.models and "" not in recorded.models:
            return recorded.total
        if recorded.judge and recorded.currency != prices.currency:
            return None
        return prices.cost(self.prompt_tokens, self.completion_tokens) + (recorded.judge or 0.0)


class AttemptResult(msgspec.Struct, frozen=True, kw_only=True):
    """One scored rollout; `actions` only while a line is read, then counted in `steps`."""

    reward: float
    rewards: dict[str, float] = {}
    components: dict[str, float] = {}
    metrics: dict[str, float] = {}
    truncated: bool = False
    limit: str | None = None
    turns: int = 0
    usage: AttemptUsage = AttemptUsage()
    actions: list[Action] = []
    steps: Steps | None = None

    def counted(self) -> AttemptResult:
        """Returns the attempt with its actions counted: they refer to the whole line."""
        if not self.actions:
            return self
        return msgspec.structs.replace(self, actions=[], steps=steps_of(self.actions))


class TaskResult(msgspec.Struct, frozen=True, kw_only=True):
    """The attempts at one task.

    `lost` attempts have no score; `failed` counts failures by kind, retried ones included; `digest`
    is that of what the task asks, "" where unknown.
    """

    task_id: str
    attempts: list[AttemptResult]
    lost: int = 0
    failed: dict[str, int] = {}
    labels: dict[str, str] = {}
    digest: str = ""


class _FailureKind(msgspec.Struct):
    kind: str


class GroupFacts(msgspec.Struct):
    group_id: str
    task_id: str
    model: str
    rollouts: list[AttemptResult]
    failures: list[_FailureKind]
    env: str = ""
    split: str = ""
    seed: int = 0
    asked: int | None = None

    @property
    def failed(self) -> dict[str, int]:
        """The failures by kind, retried ones included."""
        return Counter(failure.kind for failure in self.failures)


class _Line(msgspec.Struct):
    envserver: GroupFacts


def read_facts(path: Path) -> Iterator[GroupFacts]:
    """Yields the groups of a file, compressed or not, without an unfinished last line."""
    for line in records(path, _Line, "a group of this project", may_be_torn=True):
        facts = line.envserver
        facts.rollouts = [rollout.counted() for rollout in facts.rollouts]
        yield facts


class TaskFacts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A line of `tasks.jsonl`; `dropped`: failures by kind, for a group that was dropped."""

    group_id: str
    task_id: str
    labels: dict[str, str]
    digest: str = ""
    dropped: dict[str, int] | None = None


def facts_of(group_id: str, task: Task) -> TaskFacts:
    said = {name: task.public.get(name) for name in LABELS}
    labels = {name: str(value) for name, value in said.items() if isinstance(value, (str, int))}
    return TaskFacts(
        group_id=group_id, task_id=task.id, labels=labels, digest=digest_of(task.public)
    )


def digest_of(task: object) -> str:
    """Returns a digest of JSON-like data, the same for equal data."""
    text = orjson.dumps(task, default=str, option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS)
    return hashlib.blake2b(text, digest_size=8).hexdigest()


def read_tasks(path: Path) -> list[TaskFacts]:
    return list(records(path, TaskFacts, "a task"))


def read_results(
    groups: Path, tasks: Iterable[TaskFacts], *, group_size: int
) -> tuple[list[TaskResult], str]:
    """Returns the results of the tasks that have any, from a file that `envserver evaluate` or
    `process` wrote, and its model ("": unknown); all attempts of a dropped group are lost."""
    by_group = {facts.group_id: facts for facts in read_facts(groups)}
    results = []
    for task in tasks:
        group = by_group.get(task.group_id)
        if group is None and task.dropped is None:
            continue
        attempts = group.rollouts if group is not None else []
        results.append(
            TaskResult(
                task_id=task.task_id,
                attempts=attempts,
                lost=max(0, group_size - len(attempts)),
                failed=group.failed if group is not None else task.dropped or {},
                labels=task.labels,
                digest=task.digest,
            )
        )
    return results, next((facts.model for facts in reversed(by_group.values())), "")
