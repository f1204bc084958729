"""The environment `swe`: repair a repository so that tests pass that the agent never sees. `public`
holds the problem and where the repository is, `hidden` the tests, which of them must pass, and the
gold patch."""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import logging
import random
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
from envserver_environments.rows import (
    DataEnvironment,
    NumberedRow,
    Row,
    RowsConfig,
    file_rows,
    hub_rows,
    id_of,
    made,
    name_of,
)
from envserver_records.extras import install_command
from envserver_records.tasks import Json
from envserver_tools.calling import visible_text
from pydantic import Field, PositiveFloat, PositiveInt

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
    SandboxError,
    Score,
    Service,
    Split,
    Task,
)

from .agent import CONFIRM, AgentKind, AgentOptions, patch_in, solve
from .grading import Container, HiddenTests, Verdict, grade
from .known import demonstrate, known_results, result_of
from .loading import HUBS, folder_rows, named, read_row, task_folders
from .prompts import task_prompt
from .repositories import (
    SPEC,
    ImageFiles,
    ImageRules,
    Images,
    Terminal,
    asked_task,
    base_tree,
    image_of,
    limits_of,
    workspace,
)
from .sample import sample_tasks, write_folder

DataSetName = Literal[
    "sample", "swe_bench", "swe_bench_lite", "swe_bench_verified", "swe_gym", "swe_smith", "r2e"
]


T = TypeVar("T")

_logger = logging.getLogger(__name__)


class Swe(DataEnvironment):
    """Repair software repositories, with bash, with tools, or with tools in plain text."""

    name = "swe"
    sandbox = SPEC
    sandbox_images = True
    score_timeout_seconds = 700.0

    class Config(RowsConfig):
        """Selects the repositories, the agent, and the limits of the tests."""

        data_set: DataSetName = "sample"
        """Data set. sample: 20 built-in tasks."""
        mirror: Path | None = None
        """Folder with the git repositories of a data set: owner__name, or owner__name.git."""
        image_name: str = ""
        """Image of rows without one: sweb.eval.x86_64.{owner}_1776_{name} (of instance_id)."""
        image_repository: str = "/testbed"
        """Path of the repository in the image."""
        image_path: str = "/opt/miniconda3/envs/testbed/bin"
        """Folder put first in PATH in containers; it holds the Python that runs the tests."""
        agent: AgentKind = "bash"
        """bash: one command block per message; tools: tool calls; text: THOUGHT and TOOL_CALL."""
        command_seconds: int = Field(default=60, ge=1, le=590)
        """Maximum seconds per agent command."""
        test_seconds: float = Field(default=60.0, gt=0, le=590)
        """Maximum seconds for all tests of a task together."""
        max_format_errors: PositiveInt = 3
        """Consecutive unusable messages before an agent is stopped."""
        check_gold: bool = True
        """Drop rows whose gold patch fails its tests on this machine (not in the sample)."""
        plugins: list[str] = []
        """Module names of pytest plugins that the data set's tests need (`pytest_asyncio`)."""
        max_turns: PositiveInt = 40
        """Maximum model calls per rollout."""
        worker_timeout: PositiveFloat = 900.0
        """Wall-clock seconds per rollout, from start to result."""
        max_token_length: PositiveInt = 32768
        """Maximum training sequence length in tokens; groups with a longer one are dropped."""

    class Question(Environment.Question):
        """A problem of a repository on this machine, which itself is not changed."""

        repo: Path = Path()
        """Folder of the repository; unset: the current folder."""
        steps: PositiveInt = 40
        """Maximum model calls."""
        yolo: bool = False
        """Run commands without asking for confirmation."""

        def settings(self) -> Json:
            # A person needs time to answer.
            return {"max_turns": self.steps} | ({} if self.yolo else {"worker_timeout": 7200.0})

    def __init__(self, config: Config | None = None) -> None:
        super().__init__(config)
        rules = ImageRules(self.config.image_repository, self.config.image_path)
        self._images = Images(rules)
        self._tried: dict[tuple[str, str], Json | None] = {}

    @classmethod
    def write_sample(cls, folder: Path) -> Mapping[str, Any]:
        write_folder(next(iter(sample_tasks())), folder)
        return {"data_path": folder}

    def tasks(self, split: Split) -> Iterator[Task]:
        if importlib.util.find_spec("pytest") is None:
            raise ConfigError(
                "Patches are graded with pytest, which is not installed.",
                hint=install_command("swe"),
            )
        if self.config.data_set == "sample" and self.config.data_path is None:
            own = list(sample_tasks())
            random.Random(f"sample-{self.config.seed}-{split}").shuffle(own)
            yield from (task.task() for task in own)
            return
        name = name_of(self.config.data_set, self.config.data_path)
        yield from self.rows.usable(name, self._row_tasks(split))

    async def rollout(self, task: PublicTask, run: Rollout) -> Json:
        rules = AgentOptions(
            self.config.command_seconds,
            self.config.max_format_errors,
            self._images,
            confirm=bool(task.public.get("confirm")),
            keep_unfinished=bool(task.public.get("asked")),
        )
        return await solve(task, run, self.config.agent, rules)

    async def harness_task(self, task: PublicTask, run: Rollout) -> HarnessTask:
        if task.public.get("image"):
            raise ConfigError(
                "Repositories in images cannot be repaired by other programs (--agent).",
                hint="Use rows with a mirror or an archive.",
            )
        spec, commit = await asyncio.to_thread(workspace, task.public, self.config.command_seconds)
        return HarnessTask(
            instruction=task_prompt(task.public["problem"]),
            archive=spec.archive or b"",
            output=functools.partial(patch_in, commit),
        )

    async def score(self, task: Task, result: Result) -> Score:
        output = result.output if isinstance(result.output, dict) else {}
        patch = output.get("patch")
        if result.truncated or not isinstance(patch, str):
            return Score(reward=0.0, metrics={"truncated": float(result.truncated), "patch": 0.0})
        if patch.strip() and not {"hoisted", "plain"} & task.hidden.keys():
            task = await self._as_gold_passes(task) or task
        return _score(task, patch, await self._grade(task, patch))

    def demonstration(self, task: Task) -> list[Message]:
        return demonstrate(task, self.config.agent)

    def known_results(self, task: Task) -> Iterator[KnownResult]:
        files = self._files_now(task.public.get("image", ""))
        return known_results(task, None if files is None else files.tree)

    def task_from_question(self, request: Question) -> Task:
        if request.answer is not None:
            raise InputError("A repair is judged by tests, not by an answer.")
        return asked_task(request.question, request.repo, confirm=not request.yolo)

    def services(self) -> AbstractAsyncContextManager[Mapping[str, Service]]:
        return nullcontext({CONFIRM: Terminal().confirm})

    def task_from_row(self, row: Json) -> Task:
        return self._task(named(row, self.config.columns), id_of(row))

    def response_from_row(self, response: str, messages: list[Message]) -> Result:
        result = result_of(visible_text(response) or "")
        result.messages = messages
        return result

    async def _as_gold_passes(self, task: Task) -> Task | None:
        """The task, with what its gold patch needs to pass: whether its tests need their files or
        answers (`plain`), and which values can only be compared in the sandbox (`compared`). None:
        it does not pass at all."""
        gold = str(task.hidden["patch"])
        if (task.id, gold) not in self._tried:
            found = None
            for plain in (False, True):
                verdict = await self._grade(_with(task, {"plain": plain}), gold)
                if verdict.solved:
                    found = {"plain": plain, "compared": sorted(verdict.compared)}
                    break
            self._tried[task.id, gold] = found
        needs = self._tried[task.id, gold]
        return None if needs is None else _with(task, needs)

    async def _grade(self, task: Task, patch: str) -> Verdict:
        seconds = task.hidden.get("seconds", self.config.test_seconds)
        limits = limits_of(min(seconds, self.config.test_seconds))
        tests = msgspec.convert(task.hidden, HiddenTests)
        image = task.public.get("image", "")
        if not image:
            return await grade(base_tree(task.public), patch, tests, self.sandboxes, limits)
        files = await self._images.files(image, self.sandboxes.open)
        python = task.hidden.get("python", "python")
        container = Container(image, self._images.rules, files.built, python)
        tree = base_tree(task.public, files.tree)
        return await grade(tree, patch, tests, self.sandboxes, limits, container)

    def _task(self, row: Json, task_id: str) -> Task:
        has_files = self.config.mirror is not None or row.get("repo_archive")
        image = "" if has_files else image_of(row, self.config.image_name)
        files = self._files_now(image)
        found = None if files is None else (image, files.tree)
        return read_row(row, task_id, self.config.mirror, tuple(self.config.plugins), found)

    def _files_now(self, image: str) -> ImageFiles | None:
        if not image:
            return None
        return self._waited(lambda: self._images.files(image, self.sandboxes.open))

    def _waited(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Runs `work` in a thread: the caller may itself be in an event loop."""
        if not hasattr(self, "sandboxes"):
            raise ConfigError(
                "Images and gold patches need a sandbox, but none is available.",
                hint="check_gold=False leaves the latter out.",
            )
        with ThreadPoolExecutor(1, thread_name_prefix="swe") as thread:
            return thread.submit(lambda: asyncio.run(work())).result()

    def _row_tasks(self, split: Split) -> Iterator[tuple[str, Task | str]]:
        config = self.config
        name, seed = name_of(config.data_set, config.data_path), config.seed
        if config.data_path is not None:
            rows = _file_rows(config.data_path, split, seed)
        else:
            rows = hub_rows(HUBS[name], split, seed)
        seen: set[str] = set()

        def made_of(row: Row, numbered: NumberedRow) -> Task:
            row = named(row, config.columns)
            task_id = str(row.get("instance_id") or name)
            if task_id in seen or task_id == name:
                task_id = f"{task_id}-{numbered.number}"
            task = self._usable(row, task_id)
            seen.add(task_id)
            return task

        return made(rows, made_of)

    def _usable(self, row: Row, task_id: str) -> Task:
        task: Task | None = None
        try:
            task = given = self._task(row, task_id)
            if self.config.check_gold:
                task = self._waited(lambda: self._as_gold_passes(given))
        except SandboxError as error:
            if task is not None and "image" not in task.public:
                raise
            _logger.info("%s: its image cannot be used: %s", task_id, error.message)
            raise InputError(error.message.partition(":")[0]) from error
        if task is None:
            raise InputError("the gold patch does not pass its tests")
        if task.hidden.get("plain"):
            _logger.info("%s: its tests need their files or answers beside the code", task_id)
        return task


def _with(task: Task, needs: Json) -> Task:
    return msgspec.structs.replace(task, hidden={**task.hidden, **needs})


def _file_rows(path: Path, split: Split, seed: int) -> Iterator[NumberedRow]:
    folders = task_folders(path)
    if not folders:
        yield from file_rows(path, split, seed)
        return
    random.Random(f"folders-{seed}-{split}").shuffle(folders)
    yield from folder_rows(folders)


def _score(task: Task, patch: str, verdict: Verdict) -> Score:
    """Returns 1 for a patch that solves the task, else 0; metrics show how near it came."""
    metrics = {
        **{
            name: len(verdict.passed.intersection(ids)) / len(ids) if ids else 1.0
            for name in ("fail_to_pass", "pass_to_pass")
            for ids in [task.hidden[name]]
        },
        "patch": float(bool(patch.strip())),
        "patch_bytes": float(len(patch.encode("utf-8", "replace"))),
        "files_changed": float(verdict.changed),
        "changes_dropped": float(verdict.dropped),
        "test_seconds": verdict.seconds,
    }
    if verdict.plain:
        metrics["tests_plain"] = 1.0
    for kind, count in verdict.suspicions.items():
        metrics[f"suspicious_{kind}"] = float(count)
    for name in ("refused", "tampered", "killed_by"):
        if reason := getattr(verdict, name):
            metrics[f"{name}_{reason}"] = 1.0
    reward = float(verdict.solved)
    return Score(reward=reward, components={"solved": reward}, metrics=metrics)
