"""The environment `tau`: an assistant with tools serves a customer by a policy.

Tasks of tau2-bench: `public` names domain and task, `hidden` holds what is expected.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from envserver import (
    ConfigError,
    Environment,
    InputError,
    Message,
    PublicTask,
    Result,
    Rollout,
    Score,
    Split,
    Task,
)

from .domains.kinds import tau2_domain
from .domains.world import Domain
from .evaluation import Strictness
from .rows import RecordedTask, read_recorded_task, replayed
from .scoring import score_conversation
from .tasks import TauTask, read_task

DomainName = Literal["mock", "retail", "airline", "telecom", "telecom-workflow"]


class Tau(Environment):
    """Serve a customer with tools, by a policy, in a conversation."""

    name = "tau"

    class Config(Environment.Config):
        """Which domain, and what counts."""

        domain: DomainName = "mock"
        """Domain of tau2-bench whose tasks are used."""
        tau2_data: Path | None = None
        """Folder of tau2-bench (or of its data/tau2); unset: the data of inspect_evals."""
        strict: bool = False
        """Close the holes of tau2-bench's reward (see the README)."""

    def tasks(self, split: Split) -> Iterator[Task]:
        domain = self._domain(self.config.domain)
        ids = domain.splits.get(split) or domain.splits.get("base") or list(domain.tasks)
        for task_id in ids:
            yield _task(f"{domain.name}/{task_id}", {"domain": domain.name, "task_id": task_id})

    async def rollout(self, task: PublicTask, run: Rollout) -> Any:
        raise ConfigError("The environment tau has no agent yet: it scores conversations.")

    def score(self, task: Task, result: Result) -> Score:
        recorded = read_recorded_task(task.hidden["recorded"])
        domain = self._domain(recorded.domain)
        known = _known_task(domain, recorded)
        try:
            episode = replayed(domain, known, recorded.rules, result.messages)
        except InputError as error:
            return Score(reward=None, error=str(error))
        return score_conversation(
            domain,
            known,
            episode.messages,
            episode.ending or "unfinished",
            evaluation_type=recorded.evaluation_type,
            nl_verdicts=recorded.nl_verdicts,
            strictness=Strictness.STRICT if self.config.strict else Strictness.UPSTREAM,
        )

    def task_from_row(self, row: dict[str, Any]) -> Task:
        recorded = read_recorded_task(row)
        _known_task(self._domain(recorded.domain), recorded)
        text = json.dumps(row, sort_keys=True, default=str)
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        return _task(f"row-{digest}", recorded.model_dump())

    def response_from_row(self, response: str, messages: list[Message]) -> Result:
        return Result(output=response, messages=messages)

    def _domain(self, name: str) -> Domain:
        return tau2_domain(name, self.config.tau2_data)


def _task(task_id: str, recorded: dict[str, Any]) -> Task:
    public = {"domain": recorded["domain"], "task_id": recorded["task_id"]}
    return Task(task_id, public, {"recorded": recorded})


def _known_task(domain: Domain, recorded: RecordedTask) -> TauTask:
    if recorded.task_id not in domain.tasks:
        raise InputError(f"The domain {domain.name!r} has no task {recorded.task_id!r}.")
    return read_task(domain.tasks[recorded.task_id])
