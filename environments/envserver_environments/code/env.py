"""The environment `code`: write a Python function or program. `public` holds what the model may see
and the tests of its tools; `hidden` the other half of the tests, the reference and its answer in
full."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

from envserver_environments.rows import (
    DataEnvironment,
    NumberedRow,
    Row,
    RowsConfig,
    id_of,
    made,
    name_of,
)
from envserver_records.tasks import Json
from pydantic import Field, field_validator

from envserver import (
    ConfigError,
    Environment,
    HarnessTask,
    InputError,
    KnownResult,
    Message,
    PublicTask,
    Result,
    Rollout,
    Sandbox,
    Score,
    Split,
    Task,
)

from .agent import Mode, solve
from .data_sets import (
    DATA,
    MAX_INSTRUCTION_CHARACTERS,
    Problem,
    a_constant_passes,
    normalised,
    read_problem,
)
from .extraction import MAX_CODE_CHARACTERS
from .hoisting import NotHoistable, hoisted
from .known import demonstrate, known_results
from .prompts import SOLUTION, ShowTests, question
from .running import SPEC
from .scoring import References, ScoringRules, checked, score_rollout

DataSetName = Literal["sample", "opc", "mbpp", "mbpp_plus", "humaneval", "humaneval_plus", "pairs"]


_logger = logging.getLogger(__name__)


class Code(DataEnvironment):
    """Write Python functions and programs that pass tests, in one answer or with tools."""

    name = "code"
    sample_files = {"data_path": "sample.jsonl"}
    sandbox = SPEC

    class Config(RowsConfig):
        """Selects the tasks, the way of solving them, and the scoring."""

        data_set: DataSetName = "sample"
        """Data set. sample: 40 built-in tasks; pairs: rows of any kind in data_path."""
        mode: Mode = "single"
        """single: one answer; tools: run_tests, python and submit."""
        show_tests: ShowTests = "0"
        """Number of visible tests shown in the prompt: 0, 1 or all."""
        partial_credit: bool = False
        """Reward the share of tests that pass, instead of 1 if all pass and 0 otherwise."""
        fuzz: int = Field(default=6, ge=0, le=100)
        """Number of calls with mutated arguments that compare a program with the reference."""
        check_references: bool = True
        """Drop rows whose reference solution is missing or fails its tests (not in the sample)."""

        @field_validator("show_tests", mode="before")
        @classmethod
        def _as_text(cls, value: object) -> object:
            return str(value) if isinstance(value, int) else value

    class Question(Environment.Question):
        """A description of the program to write, and its tests."""

        entry_point: str = ""
        """Name of the function to write; unset: a program that reads stdin and prints."""
        tests: Path | None = None
        """File with one assert per line that the function must pass; half of them are hidden."""

        def is_scored(self) -> bool:
            return self.tests is not None

    def __init__(self, config: Config | None = None) -> None:
        super().__init__(config)
        self.tests_left_out = 0
        self._references = References()

    def tasks(self, split: Split) -> Iterator[Task]:
        self.tests_left_out = 0
        config = self.config
        rows = DATA.rows(config.data_set, config.data_path, split, config.seed)
        found = self.rows.tasks(self._name, self._read_tasks(rows))
        if self._name != "sample" and config.check_references:
            found = self._with_good_references(found)
        yield from self.rows.reported(self._name, found)
        if self.tests_left_out:
            _logger.warning("%s: %d tests left out", self._name, self.tests_left_out)

    async def rollout(self, task: PublicTask, run: Rollout) -> Json:
        return await solve(task, run, self.config.mode, self.config.show_tests)

    def harness_task(self, task: PublicTask, run: Rollout) -> HarnessTask:
        async def program(workspace: Sandbox, words: str) -> Json:
            try:
                code = await workspace.read(SOLUTION, 4 * MAX_CODE_CHARACTERS)
            except InputError:
                return {"code": None, "text": words}
            return {"code": code.decode("utf-8", "replace"), "text": words}

        instruction = question(task.public, "harness", self.config.show_tests)
        return HarnessTask(instruction=instruction, output=program)

    async def score(self, task: Task, result: Result) -> Score:
        rules = ScoringRules(partial_credit=self.config.partial_credit, fuzz=self.config.fuzz)
        return await score_rollout(task, result, rules, self.sandboxes, self._references)

    def demonstration(self, task: Task) -> list[Message] | None:
        return demonstrate(task, self.config.mode)

    def known_results(self, task: Task) -> Iterator[KnownResult]:
        return known_results(task, partial_credit=self.config.partial_credit)

    def task_from_row(self, row: Json) -> Task:
        return _task(id_of(row), read_problem(row, columns=self.config.columns))

    def task_from_question(self, request: Question) -> Task:
        name = hashlib.sha256(request.question.encode()).hexdigest()[:12]
        if not request.question.strip():
            raise InputError("The question is empty.")
        if request.answer is not None:
            raise InputError("A program is judged by tests, not by an answer: give --tests.")
        tests = _asserts(request.tests, request.entry_point) if request.tests else ()
        half = len(tests) // 2
        problem = Problem(
            "asked", request.question.strip(), request.entry_point, tests, visible=half
        )
        return _task(f"asked-{name}", problem)

    def response_from_row(self, response: str, messages: list[Message]) -> Result:
        return Result(output={"code": None, "text": response}, messages=messages)

    @property
    def _name(self) -> str:
        return name_of(self.config.data_set, self.config.data_path)

    def _read_tasks(self, rows: Iterator[NumberedRow]) -> Iterator[tuple[str, Task | str]]:
        """Leaves out rows that cannot be judged, or whose instruction came before."""
        seen: set[bytes] = set()

        def task(row: Row, numbered: NumberedRow) -> Task:
            problem = _usable(row, self._name, self.config.columns)
            key = hashlib.blake2b(normalised(problem.instruction).encode(), digest_size=8).digest()
            if key in seen:
                raise InputError("The instruction was there before.")
            seen.add(key)
            self.tests_left_out += problem.left_out
            return _task(numbered.task_id(self._name), problem)

        return made(rows, task)

    def _with_good_references(self, tasks: Iterator[Task]) -> Iterator[Task]:
        if not hasattr(self, "sandboxes"):
            raise ConfigError(
                "References run in a sandbox, but none is available.",
                hint="check_references=False leaves that out.",
            )
        for task, reason in checked(tasks, self.sandboxes):
            if reason is None:
                yield task
            else:
                self.rows.drop(self._name, reason, task.id)


def _asserts(path: Path, entry_point: str) -> tuple[str, ...]:
    if not entry_point:
        raise InputError("Tests need the name of the function.", hint="Give --entry_point.")
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read: {error}.") from None
    tests = tuple(line.strip() for line in lines if line.strip())
    for number, test in enumerate(tests, 1):
        try:
            hoisted(test, entry_point)
        except NotHoistable as error:
            raise InputError(f"{path}:{number}: {error}.") from None
    if not tests:
        raise InputError(f"{path} holds no test.")
    return tests


def _usable(row: Row, data_set: str, columns: Mapping[str, str]) -> Problem:
    problem = read_problem(row, data_set, columns)
    if len(problem.instruction) > MAX_INSTRUCTION_CHARACTERS:
        raise InputError("The instruction is too long.")
    if len(problem.tests) < 2:
        raise InputError("The row has fewer than two tests.")
    if a_constant_passes(problem):
        raise InputError("A program that always gives the same passes its tests.")
    return problem


def _task(task_id: str, problem: Problem) -> Task:
    return Task(
        task_id,
        {
            "instruction": problem.instruction,
            "entry_point": problem.entry_point,
            "preamble": problem.preamble,
            "tests": list(problem.tests[: problem.visible]),
            "data_set": problem.data_set,
            "seconds": problem.seconds,
        },
        {
            "tests": list(problem.tests[problem.visible :]),
            "code": problem.code,
            "output": problem.output,
        },
    )
