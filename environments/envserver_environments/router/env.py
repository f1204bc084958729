"""The environment `router`: plan which agents answer a query, and let them.

`public` holds the `query`, which is all that the router's model sees, its `profile`, and what
running a plan needs (`runs`: the answer can be checked); `hidden` the right plan and results.
"""

from __future__ import annotations

import dataclasses
import json
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from envserver_environments.code.running import SPEC
from envserver_environments.rows import (
    DataEnvironment,
    NumberedRow,
    Row,
    RowsConfig,
    id_of,
    made,
    missing,
    name_of,
)
from envserver_records.tasks import Json
from pydantic import BeforeValidator, Field

from envserver import (
    AgentRole,
    Environment,
    KnownResult,
    Message,
    PublicTask,
    Result,
    Rollout,
    Score,
    Split,
    Task,
)
from envserver.rows.sources import every_row

from .agent import ROUTER, SUBAGENTS, final_answer, solve
from .known import demonstrate, known_answers
from .loading import (
    DATA,
    SAMPLE,
    SAMPLE_DOCUMENTS,
    Problem,
    Profile,
    answer_of,
    hidden_part,
    public_part,
    query_tasks,
    read_documents,
    read_problem,
)
from .scoring import last_plan, score_rollout

DataSetName = Literal["sample", "coursegpt", "queries"]


def _repairs(value: Any) -> Any:
    """Reads the words of a switch as a number of repairs: true is 1, false is 0."""
    words = {"true": 1, "yes": 1, "on": 1, "false": 0, "no": 0, "off": 0}
    return words.get(value.lower(), value) if isinstance(value, str) else value


class Router(DataEnvironment):
    """Plan which agents answer a query, in strict JSON, and run the plan."""

    name = "router"

    class Config(RowsConfig):
        """Selects the queries, the form of the plans, and whether plans are executed."""

        data_set: DataSetName = "sample"
        """Data set. sample: 40 built-in tasks; coursegpt: CourseGPT's router data; queries: a file
        of queries (`data_path`) for which a teacher writes plans: each valid one gets 1."""
        profile: Profile | None = None
        """Plan format. graph: steps and handoffs; coursegpt: ten keys; unset: as the row says, and
        coursegpt for queries."""
        repair: Annotated[int, BeforeValidator(_repairs)] = Field(default=1, ge=0, le=7)
        """Number of times that an invalid plan may be rewritten, each for 0.8 of the reward;
        false: none."""
        teachers: int = Field(default=1, ge=1, le=64)
        """Number of models that write plans, equal shares, at random: the agents `teacher_1`,
        `teacher_2`, ... (`agents.teacher_2.model_name`); 1: the agent `router`."""
        skip_bad: bool = False
        """Leave out lines of the file of queries that are not queries."""
        execute: bool = False
        """Let sub-agents run plans whose answer can be checked, for 0.7 of the reward."""

    class Question(Environment.Question):
        """A query to be routed."""

        documents: Path | None = None
        """File for the search agent: JSON or JSONL with title and text, or plain text."""
        execute: bool = False
        """Run the plan even without an expected answer; otherwise the plan is the answer."""

        def settings(self) -> Json:
            return {"execute": self.execute or self.answer is not None}

    def __init__(self, config: Config | None = None) -> None:
        super().__init__(config)
        if self.config.execute:
            # For the code agent and for answers that are functions; plans alone need none.
            self.sandbox = SPEC

    def agents(self) -> Mapping[str, AgentRole]:
        routers = dict.fromkeys(self._routers(), AgentRole())
        return {**routers, **dict.fromkeys(SUBAGENTS, AgentRole(trained=False))}

    @classmethod
    def write_sample(cls, folder: Path) -> Mapping[str, Any]:
        documents = read_documents(SAMPLE_DOCUMENTS)
        rows = [{"documents": documents, **row} for row in every_row(SAMPLE)]
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / SAMPLE.name
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
        return {"data_path": path}

    def tasks(self, split: Split) -> Iterator[Task]:
        name = self.config.data_set
        if name == "queries":
            profile: Profile = self.config.profile or "coursegpt"
            return query_tasks(self.config.data_path, profile, skip_bad=self.config.skip_bad)
        path = self.config.data_path
        shared = read_documents(SAMPLE_DOCUMENTS) if name == "sample" and path is None else []
        rows = DATA.rows(name, path, split, self.config.seed)

        def task(row: Row, numbered: NumberedRow) -> Task:
            problem = read_problem(row, self.config.columns)
            if not problem.query:
                raise missing(row, ["query"])
            if not problem.documents:
                problem = dataclasses.replace(problem, documents=list(shared))
            return self._task(numbered.task_id(name), problem)

        read = made(rows, task)
        return self.rows.usable(name_of(name, path), read)

    async def rollout(self, task: PublicTask, run: Rollout) -> Json:
        routers = self._routers()
        router = routers[zlib.crc32(run.rollout_id.encode()) % len(routers)]
        repair, execute = self.config.repair, self.config.execute
        return await solve(task, run, repair=repair, execute=execute, router=router)

    async def score(self, task: Task, result: Result) -> Score:
        sandboxes = getattr(self, "sandboxes", None)
        return await score_rollout(task, result, execute=self.config.execute, sandboxes=sandboxes)

    def final_answer(self, result: Result) -> str:
        if isinstance(result.output, dict):
            return final_answer(result.output)
        return super().final_answer(result)

    def demonstration(self, task: Task) -> dict[str, list[Message]] | None:
        return demonstrate(task, execute=self.config.execute)

    def known_results(self, task: Task) -> Iterator[KnownResult]:
        return known_answers(task, execute=self.config.execute)

    def task_from_row(self, row: Json) -> Task:
        return self._task(id_of(row), read_problem(row, self.config.columns))

    def response_from_row(self, response: str, messages: list[Message]) -> Result:
        said = {"plan": response, "repaired": last_plan(messages).repaired}
        return Result(output=said, messages=messages)

    def task_from_question(self, question: Question) -> Task:
        problem = Problem(
            question.question,
            "graph",
            documents=[] if question.documents is None else read_documents(question.documents),
            answer=None if question.answer is None else answer_of(question.answer),
        )
        task = self._task("question", problem)
        return Task(task.id, {**task.public, "runs": True}, task.hidden)

    def _routers(self) -> list[str]:
        count = self.config.teachers
        return [ROUTER] if count == 1 else [f"teacher_{number}" for number in range(1, count + 1)]

    def _task(self, task_id: str, problem: Problem) -> Task:
        profile = self.config.profile or problem.profile
        return Task(task_id, public_part(problem, profile), hidden_part(problem, profile))
