"""The environment `math`: problems with a checkable answer. `public` holds `question`, `options`
and `data_set`; `hidden` the answer and how it is compared (`kind`)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Annotated, Literal

from envserver_environments.answers import last_boxed
from envserver_environments.rows import (
    SEVERAL,
    DataEnvironment,
    FirstOption,
    NumberedRow,
    OptionRowsConfig,
    Row,
    first_option,
    id_of,
    listed,
    made,
    mixed,
    name_of,
)
from envserver_records.tasks import Json
from envserver_tools.calling import visible_text
from pydantic import PositiveInt

from envserver import (
    Environment,
    HarnessTask,
    InputError,
    KnownResult,
    Message,
    PublicTask,
    Result,
    Rollout,
    Score,
    Split,
    Task,
)
from envserver.rows.columns import doubt

from . import procedural
from .agent import Mode, solve
from .data_sets import DATA, Kind, Problem, read_problem, why_unusable
from .known import demonstrate, doubts, known_answers, row_answers
from .literals import is_number_literal, plain_number
from .prompts import BOXED, question
from .scoring import ScoringRules, last_answer, score_rollout
from .verification import compared_together

DataSetName = Literal[
    "sample", "gsm8k", "math", "math500", "svamp", "mawps", "mathqa", "aqua", "aime", "deepmath",
    "mathx", "procedural", "arithmetic", "sorting",
]  # fmt: skip
OTHER_ROWS = 10
"""Rows among which a gold is looked for that is a wrong answer to another row."""


class Math(DataEnvironment):
    """Solve mathematics problems, with a calculator or without tools."""

    name = "math"
    sample_files = {"data_path": "sample.jsonl"}
    checks_rows = True

    class Config(OptionRowsConfig):
        """Selects the problems, the way of solving them, and the scoring."""

        data_set: Annotated[DataSetName | list[DataSetName], SEVERAL] = "sample"
        """Data sets (repeat the flag, or separate with commas). sample: 48 built-in tasks."""
        mode: Mode = "tools"
        """tools: calculator and finish; single: one answer, no tools; seed0: fenced commands."""
        literal: Literal["auto"] | bool = "auto"
        """Require plain numbers as answers. auto: if the data set's answers are numbers."""
        lenient: bool = False
        """Accept plain expressions, as math-verify does by default."""
        system_prompt: str | None = None
        """Replaces the mode's system prompt; "": no system prompt."""
        max_operand: PositiveInt = 9
        """Largest number in the questions of the data set `arithmetic`."""
        procedural: Annotated[list[str], SEVERAL] = list(procedural.ALLOWED)
        """Generators of the data set `procedural`."""
        partial_credit: bool = False
        """Keep the generators' scores between 0 and 1."""
        tool_error_penalty: float = 0.0
        """Subtracted from the reward per failed tool call; the reward stays at least 0."""

    def tasks(self, split: Split) -> Iterator[Task]:
        streams = [self._tasks_of(name, split) for name in listed(self.config.data_set)]
        return mixed(streams, f"mix-{self.config.seed}-{split}")

    async def rollout(self, task: PublicTask, run: Rollout) -> Json:
        return await solve(task, run, self.config.mode, self.config.system_prompt)

    def harness_task(self, task: PublicTask, run: Rollout) -> HarnessTask:
        return HarnessTask(instruction=f"{question(task.public)}\n\n{BOXED}")

    def score(self, task: Task, result: Result) -> Score:
        return score_rollout(task, result, self._rules)

    def demonstration(self, task: Task) -> list[Message]:
        return demonstrate(task, self.config.mode)

    def known_results(self, task: Task) -> Iterator[KnownResult]:
        return known_answers(task, literal=self._literal)

    def row_results(self, tasks: Sequence[Task]) -> Iterator[tuple[Task, KnownResult]]:
        known = [
            (task, known_result)
            for place, task in enumerate(tasks)
            if task.hidden["kind"] != "procedural"
            for known_result in row_answers(
                task, [*tasks[place + 1 :], *tasks[:place]][:OTHER_ROWS]
            )
        ]
        with compared_together():
            for task, known_result in known:
                if plain_number(task.hidden["answer"]) is None:  # else no process is needed
                    self.score(task, known_result.result)
        return iter(known)

    @property
    def _rules(self) -> ScoringRules:
        return ScoringRules(
            literal=self._literal,
            lenient=self.config.lenient,
            tool_error_penalty=self.config.tool_error_penalty,
            partial_credit=self.config.partial_credit,
        )

    @property
    def _literal(self) -> bool | None:
        return None if self.config.literal == "auto" else bool(self.config.literal)

    def task_from_row(self, row: Json) -> Task:
        if procedural.is_entry(row):
            return _generated_task(id_of(row), *procedural.entry_from_row(row))
        first = self.config.first_option or 0
        problem = read_problem(row, columns=self.config.columns, first=lambda: first)
        return _task(id_of(row), problem)

    def task_from_question(self, request: Environment.Question) -> Task:
        if not request.question.strip():
            raise InputError("The question is empty.")
        answer = request.answer if request.answer is not None else "0"
        kind: Kind = "number" if is_number_literal(answer) else "expression"
        problem = Problem(request.question.strip(), answer, kind, "asked")
        if reason := why_unusable(problem):
            raise InputError(f"The answer cannot be compared: {reason}.")
        name = hashlib.sha256(request.question.encode()).hexdigest()[:12]
        return _task(f"asked-{name}", problem)

    def final_answer(self, result: Result) -> str:
        output = result.output if isinstance(result.output, dict) else {}
        text = str(output.get("text") or "")
        return str(output.get("answer") or last_boxed(text) or visible_text(text) or "")

    def response_from_row(self, response: str, messages: list[Message]) -> Result:
        words = last_answer(messages)
        output = {"answer": words.finish if messages else None, "text": response}
        return Result(output=output, messages=messages)

    def _tasks_of(self, name: DataSetName, split: Split) -> Iterator[Task]:
        seed = self.config.seed
        if name == "procedural":
            for entry_id, entry in procedural.entries(self.config.procedural, split, seed):
                generator = entry["metadata"]["source_dataset"]
                yield _generated_task(f"{name}-{entry_id}", generator, entry)
            return
        if name in ("arithmetic", "sorting"):
            problems = (
                procedural.sorting_problems(split, seed)
                if name == "sorting"
                else procedural.arithmetic_problems(self.config.max_operand, split, seed)
            )
            yield from (_task(task_id, problem) for task_id, problem in problems)
            return
        path = self.config.data_path
        columns = self.config.columns
        rows, named = DATA.rows(name, path, split, seed), name_of(name, path)

        def read(row: Row, first: FirstOption) -> Problem:
            return read_problem(row, named, columns, first)

        first = first_option(self.config.first_option, path, split, read)

        def task(row: Row, numbered: NumberedRow) -> Task:
            problem = read(row, first)
            for cause in doubts(problem, row):
                doubt(cause)
            if why := why_unusable(problem):
                raise InputError(why)
            return _task(numbered.task_id(named), problem)

        yield from self.rows.usable(path.name if path else name, made(rows, task))


def _task(task_id: str, problem: Problem) -> Task:
    return Task(
        task_id,
        {
            "question": problem.question,
            "options": problem.options,
            "data_set": problem.data_set,
        },
        {"answer": problem.answer, "kind": problem.kind, "expression": problem.expression},
    )


def _generated_task(task_id: str, generator: str, entry: Json) -> Task:
    return Task(
        task_id,
        {"question": entry["question"], "options": [], "data_set": "procedural"},
        {
            "answer": entry["answer"],
            "kind": "procedural",
            "generator": generator,
            "entry": {name: value for name, value in entry.items() if name != "question"},
        },
    )
