"""The environment `tau`: an assistant with tools serves a customer by a policy.

`public` holds the domain's name, `task` (id, scenario, set-up), the customer's `user_script`, and
whether a judge is called. The server and the scorer read the expected results in the domain's
files; those of a single question, and of a recorded conversation, are in `hidden`.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from envserver_environments.rows import SEVERAL, DataEnvironment, copied, id_of, listed, mixed
from envserver_records.tasks import Json
from pydantic import PositiveFloat, PositiveInt, field_validator

from envserver import (
    AgentRole,
    ConfigError,
    Environment,
    InputError,
    KnownResult,
    Message,
    NotFoundError,
    PublicTask,
    Result,
    Rollout,
    Score,
    Split,
    Task,
)

from .agent import AGENT, Manner, Protocol, solve
from .domains.loading import KINDS, OWN, find_domain
from .domains.world import Domain
from .episodes import COMPLETE, GREETING, STOP, Episode, EpisodeRules
from .evaluation import Strictness, score_conversation, verdicts
from .known import KnownConversations, demonstrate
from .replays import RecordedTask, read_recorded_task, replayed
from .speaking import USER, UserKind, as_texts
from .tasks import TauTask, read_task

MINI = "mini_"
"""Name prefix of the built-in domains that have the tools of a tau2-bench domain."""


class Tau(DataEnvironment):
    """Serve a customer with tools, by a policy, in a conversation."""

    name = "tau"

    class Config(Environment.Config):
        """Selects the tasks, the customer, and the scoring."""

        domain: Annotated[str | list[str], SEVERAL] = list(OWN)
        """Domains (repeat the flag, or separate with commas): built-in ones (mini_...), or
        tau2-bench's: mock, retail, airline, telecom, telecom-workflow."""
        tau2_data: Path | None = None
        """Folder of tau2-bench (or of its data/tau2); unset: the data of inspect_evals."""
        task_split: str | None = None
        """The domain's own split name (base, small, full); unset: chosen by `split`."""
        user: UserKind = "auto"
        """What acts as the customer. script: the task's script; model: the model of agents.user;
        auto: the script if the task has one."""
        protocol: Protocol = "tools"
        """How the assistant calls tools. tools: tool calls; text: THOUGHT, TOOL_CALL and FINAL in
        plain text, for models without tool calls."""
        nl_assertions: Literal["skip", "ignore", "judge"] = "skip"
        """Tasks that need a judge. skip: leave them out; ignore: score without the judge; judge:
        ask it (`--judge.base_url`)."""
        strict: bool | None = None
        """Close the loopholes in tau2-bench's reward (see the README); unset: in the built-in
        domains and in the split train."""
        max_steps: PositiveInt = 100
        """Maximum messages and tool rounds of both sides; beyond it the reward is 0."""
        max_tool_errors: PositiveInt = 10
        """Maximum failed tool calls of both sides; beyond it the reward is 0."""
        max_turns: PositiveInt = 30
        """Maximum model calls of the assistant, and again of the customer."""
        max_token_length: PositiveInt = 32768
        """Maximum training sequence length in tokens; groups with a longer one are dropped."""
        worker_timeout: PositiveFloat = 600.0
        """Wall-clock seconds per rollout, from start to result."""

        @field_validator("tau2_data")
        @classmethod
        def _from_everywhere(cls, value: Path | None) -> Path | None:
            return value and value.absolute()  # agents, which read it, work in other folders

        @field_validator("domain")
        @classmethod
        def _known(cls, value: str | list[str]) -> str | list[str]:
            if not value or {*listed(value)} - {*OWN, *KINDS}:
                raise ValueError(f"must be of {', '.join([*OWN, *KINDS])}")
            return value

    class Question(Environment.Question):
        """A customer's question to the assistant of a domain."""

        subdomain: str = "retail"
        """Domain; without tau2-bench's data, retail, airline and telecom are the built-in ones."""
        context: Path | None = None
        """Text file added to the assistant's policy."""

    def agents(self) -> Mapping[str, AgentRole]:
        return {AGENT: AgentRole(), USER: AgentRole(trained=False)}

    async def setup(self) -> None:
        for name in listed(self.config.domain):
            find_domain(name, self.config.tau2_data, with_tasks=False)

    @classmethod
    def write_sample(cls, folder: Path) -> Mapping[str, Any]:
        data = Path(__file__).parent / "data"
        copied(data / f"{MINI}mock", folder / "mock", {"files": ""})
        return {"tau2_data": folder, "domain": "mock"}

    def tasks(self, split: Split) -> Iterator[Task]:
        hint = "See --env.task_split, --env.user and --env.nl_assertions."
        streams = [
            self.rows.usable(name, self._tasks_of(name, split), hint=hint)
            for name in listed(self.config.domain)
        ]
        return mixed(streams, f"mix-{self.config.seed}-{split}")

    async def rollout(self, task: PublicTask, run: Rollout) -> Json:
        name, data = task.public["domain"], self.config.tau2_data
        domain = await asyncio.to_thread(find_domain, name, data, with_tasks=False)
        return await solve(task, run, domain, self._manner)

    def score(self, task: Task, result: Result) -> Score:
        output = result.output
        said = output.get("messages") if isinstance(output, dict) else None
        if not isinstance(said, list) or not all(isinstance(message, dict) for message in said):
            return Score(reward=0.0, metrics={"no_conversation": 1.0})
        domain, known, recorded = self._meant(task)
        rules = self._rules if recorded is None else recorded.rules
        try:
            episode = replayed(domain, known, rules, said)
        except InputError as error:
            return Score(reward=None, error=str(error))
        judged = output.get("verdicts") if recorded is None else recorded.nl_verdicts
        if judged is None and recorded is None:
            judged = self._verdicts(task, known, episode)
        return score_conversation(
            domain,
            known,
            episode.messages,
            episode.ending or "unfinished",
            evaluation_type="all" if recorded is None else recorded.evaluation_type,
            nl_verdicts=judged,
            strictness=Strictness.STRICT if self._is_strict(task) else Strictness.UPSTREAM,
        )

    def demonstration(self, task: Task) -> Mapping[str, list[Message]]:
        domain, known, _ = self._meant(task)
        turns = demonstrate(domain, known, self._script(task), self._rules).by_agent()
        if self.config.protocol == "text":
            turns[AGENT] = list(as_texts(turns[AGENT]))
        return turns

    def known_results(self, task: Task) -> Iterator[KnownResult]:
        domain, known, _ = self._meant(task)
        count = len(known.criteria.nl_assertions or ())
        return KnownConversations(
            domain,
            known,
            self._script(task),
            self._rules,
            strict=self._is_strict(task),
            verdicts=[True] * count if task.public["judged"] else None,
        ).all()

    def task_from_row(self, row: Json) -> Task:
        recorded = read_recorded_task(row)
        _task_of(self._domain(recorded.domain), recorded.task_id)
        return Task(id_of(row), {}, {"recorded": recorded.model_dump()})

    def response_from_row(self, response: str, messages: list[Message]) -> Result:
        return Result(output={"messages": messages}, messages=messages)

    def task_from_question(self, question: Question) -> Task:
        context = _text_of(question.context) if question.context is not None else ""
        script = [
            {"if": f"^{re.escape(GREETING)}$", "say": question.question},
            {"if": "always", "say": STOP},
        ]
        public = {
            "domain": self._subdomain(question.subdomain),
            "task": {"id": "question", "user_scenario": {"instructions": question.question}},
            "question": question.question,
            "user_script": script,
            "judged": False,
            "context": context,
        }
        criteria: Json = {"reward_basis": ["COMMUNICATE"]}
        criteria["communicate_info"] = [] if question.answer is None else [question.answer]
        key = hashlib.blake2b(question.question.encode(), digest_size=6).hexdigest()
        return Task(f"question-{key}", public, {"criteria": criteria, "strict": True})

    @property
    def _manner(self) -> Manner:
        return Manner(self._rules, self.config.user, self.config.protocol)

    @property
    def _rules(self) -> EpisodeRules:
        return EpisodeRules(
            max_steps=self.config.max_steps,
            max_errors=self.config.max_tool_errors,
            whole_numbers=True,
        )

    def _domain(self, name: str) -> Domain:
        return find_domain(name, self.config.tau2_data)

    def _subdomain(self, name: str) -> str:
        try:
            find_domain(name, self.config.tau2_data, with_tasks=False)
        except NotFoundError:
            if f"{MINI}{name}" not in OWN:
                raise
            return f"{MINI}{name}"
        return name

    def _tasks_of(self, name: str, split: Split) -> Iterator[tuple[str, Task | str]]:
        domain = self._domain(name)
        ids = list(_ids(domain, split, self.config.task_split))
        random.Random(f"tau-{self.config.seed}-{name}-{split}").shuffle(ids)
        strict = self.config.strict
        if strict is None:
            strict = name in OWN or split == "train"
        for task_id in ids:
            row = domain.tasks[task_id]
            try:
                task = read_task(row)
            except InputError as error:
                yield task_id, error.message
                continue
            script = row.get("user_script") or []
            needs_judge = _needs_judge(task)
            if strict and task.evaluation_criteria is None:
                yield task_id, "it has no evaluation_criteria: any conversation would solve it"
            elif needs_judge and self.config.nl_assertions == "skip":
                yield task_id, "it needs a judge (nl_assertions)"
            elif self.config.user == "script" and not script:
                yield task_id, "its customer has no script"
            else:
                judged = needs_judge and self.config.nl_assertions == "judge"
                yield task_id, _task(domain, task, script, judged=judged, strict=strict)

    def _meant(self, task: Task) -> tuple[Domain, TauTask, RecordedTask | None]:
        """The domain and the whole task that `task` is about; of a row, how it was recorded."""
        if "recorded" in task.hidden:
            recorded = read_recorded_task(task.hidden["recorded"])
            domain = self._domain(recorded.domain)
            return domain, self._counted(_task_of(domain, recorded.task_id)), recorded
        domain = self._domain(task.public["domain"])
        if "criteria" in task.hidden:
            row = {**task.public["task"], "evaluation_criteria": task.hidden["criteria"]}
            return domain, read_task(row), None
        return domain, self._counted(_task_of(domain, task.public["task"]["id"])), None

    def _counted(self, task: TauTask) -> TauTask:
        criteria = task.evaluation_criteria
        if criteria is None or self.config.nl_assertions != "ignore" or not _needs_judge(task):
            return task
        basis = [kind for kind in criteria.reward_basis if kind != "NL_ASSERTION"]
        changed = criteria.model_copy(update={"reward_basis": basis})
        return task.model_copy(update={"evaluation_criteria": changed})

    def _verdicts(self, task: Task, known: TauTask, episode: Episode) -> Sequence[bool] | None:
        criteria = known.evaluation_criteria
        if not task.public["judged"] or criteria is None or episode.ending not in COMPLETE:
            return None
        return verdicts(self.judge, criteria.nl_assertions or (), episode.messages)

    def _is_strict(self, task: Task) -> bool:
        if "recorded" in task.hidden:
            return bool(self.config.strict)
        return bool(task.hidden["strict"])

    def _script(self, task: Task) -> Sequence[Json]:
        return () if self.config.user == "model" else task.public["user_script"]


def _task(domain: Domain, task: TauTask, script: list[Any], *, judged: bool, strict: bool) -> Task:
    public = {
        "domain": domain.name,
        "task": task.model_dump(mode="json", exclude={"evaluation_criteria"}, exclude_none=True),
        "user_script": script,
        "judged": judged,
    }
    if script:
        public["question"] = script[-1]["say"]
    return Task(f"{domain.name}/{task.id}", public, {"strict": strict})


def _ids(domain: Domain, split: Split, named: str | None) -> Sequence[str]:
    """The tasks of a split; where a domain does not have ours, all of its `base`."""
    if named is not None:
        if named not in domain.splits:
            raise ConfigError(
                f"The domain {domain.name!r} has no split {named!r}.",
                hint=f"It has {', '.join(domain.splits) or 'none'}.",
            )
        return domain.splits[named]
    return domain.splits.get(split) or domain.splits.get("base") or list(domain.tasks)


def _task_of(domain: Domain, task_id: str) -> TauTask:
    if task_id not in domain.tasks:
        raise InputError(f"The domain {domain.name!r} has no task {task_id!r}.")
    return read_task(domain.tasks[task_id])


def _needs_judge(task: TauTask) -> bool:
    criteria = task.criteria
    return bool(criteria.nl_assertions and "NL_ASSERTION" in criteria.reward_basis)


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error}") from error
