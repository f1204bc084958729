"""Task folders of Harbor: the agent has bash in a workspace; the task's tests judge what it left.

`public` holds the instruction, the workspace's files (or the image that has them), variables and
time; `hidden` the tests and the solution. The rollout's output is the files that changed. The tests
are put beside these in a new sandbox, after the agent has ended.
"""

from __future__ import annotations

import base64
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, ClassVar

from envserver_environments.demonstrations import call_message, text_message
from envserver_environments.swe.trees import Tree, tar_of, tree_of_tar
from envserver_records.tasks import Json
from envserver_tools.loop import chat_with_tools
from envserver_tools.sandboxed import PRELOAD, sandbox_tools
from msgspec import structs
from pydantic import Field, PositiveFloat, PositiveInt

from envserver import (
    ConfigError,
    Environment,
    HarnessTask,
    InputError,
    LimitReached,
    Message,
    NotFoundError,
    PublicTask,
    Result,
    Rollout,
    Sandbox,
    SandboxLimits,
    SandboxSpec,
    Score,
    Split,
    Task,
)

from .grading import (
    MOST_BYTES,
    HarborTask,
    changed,
    changes_in,
    fetches,
    grade,
    read_task,
    task_folders,
)

SPEC = SandboxSpec(
    preload=(*PRELOAD, "tarfile", "hashlib"),
    limits=SandboxLimits(
        wall_seconds=600.0,
        cpu_seconds=1200.0,
        memory_mb=2048,
        disk_mb=512,
        inodes=40_000,
        processes=128,
        open_files=1024,
        output_kb=4096,
        input_kb=8192,
    ),
)
SYSTEM = (
    "You work in a Linux machine without network. Your working directory is /work. Solve the task "
    "with the tool `bash`; write a message without a tool call when you are done."
)
_READ = """
import sys, tarfile
with tarfile.open("/work/image.tar", "w:gz", compresslevel=1) as tar:
    tar.add(sys.argv[1], arcname=".")
"""
Open = Callable[[SandboxSpec], AbstractAsyncContextManager[Sandbox]]

_logger = logging.getLogger(__name__)


class Harbor(Environment):
    """Solve tasks of Harbor's format in a sandbox, judged by their tests."""

    folder: ClassVar[Path]
    sandbox = SPEC
    sandbox_images = True
    score_timeout_seconds = 700.0

    class Config(Environment.Config):
        images: bool = True
        """Run tasks in the images that they name, with the backend docker. Off: in a sandbox of
        this machine, those tasks whose Dockerfile only has FROM, WORKDIR, ENV and COPY."""
        image_name: str = ""
        """Image of tasks that name none; {name} is the task's folder."""
        fetching_tests: bool = False
        """Keep tasks whose test.sh fetches packages, though sandboxes have no network: for images
        in which these are installed."""
        command_seconds: int = Field(default=120, ge=1, le=590)
        """Maximum seconds per command of the agent."""
        test_seconds: float = Field(default=590.0, gt=0, le=590)
        """Maximum seconds of the tests; a task may ask for less."""
        max_turns: PositiveInt = 50
        """Maximum model calls per rollout."""
        worker_timeout: PositiveFloat = 900.0
        """Wall-clock seconds per rollout."""
        max_token_length: PositiveInt = 65_536
        """Maximum training sequence length in tokens; groups with a longer one are dropped."""

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self.dropped: Counter[str] = Counter()

    def tasks(self, split: Split) -> Iterator[Task]:
        usable = 0
        for folder in task_folders(self.folder):
            try:
                task = self._task(read_task(folder))
            except InputError as error:
                self.dropped[error.message] += 1
                _logger.warning("%s", error.message)
                continue
            usable += 1
            yield task
        if not usable:
            raise ConfigError(
                f"No task of {self.folder} can be run here: {'; '.join(self.dropped)}",
                hint="--env.images false runs tasks without an image, where they allow it.",
            )

    async def rollout(self, task: PublicTask, run: Rollout) -> Json:
        base = await _base(task.public, run.open_sandbox)
        async with run.open_sandbox(_spec(task.public, base)) as sandbox:
            history = [
                {"role": "system", "content": SYSTEM},
                {"role": "user", "content": task.public["instruction"]},
            ]
            seconds = self.config.command_seconds
            tools = sandbox_tools(sandbox, names=["bash"], command_seconds=seconds)
            with contextlib.suppress(LimitReached):  # what is there is judged
                await chat_with_tools(run, history, tools)
            return await changes_in(sandbox, base)

    def harness_task(self, task: PublicTask, run: Rollout) -> HarnessTask:
        if task.public["image"]:
            raise ConfigError(
                "Tasks in images cannot be solved by other programs (--agent).",
                hint="--env.images false runs tasks without an image, where they allow it.",
            )
        base = _unpacked(task.public["files"])

        async def files(workspace: Sandbox, words: str) -> Json:
            return await changes_in(workspace, base)

        instruction = task.public["instruction"]
        return HarnessTask(instruction=instruction, archive=tar_of(base), output=files)

    async def score(self, task: Task, result: Result) -> Score:
        base = await _base(task.public, self.sandboxes.open)
        workspace = changed(base, result.output)
        if workspace is None:  # a limit ended it, or it left too much
            return Score(reward=0.0, metrics={"no_workspace": 1.0})
        spec = _spec(task.public, {})
        limits = structs.replace(spec.limits, wall_seconds=task.hidden["seconds"])
        env = {**spec.env, **task.hidden["env"]}
        spec = structs.replace(spec, limits=limits, env=env)
        return await grade(workspace, _unpacked(task.hidden["tests"]), self.sandboxes, spec)

    def demonstration(self, task: Task) -> list[Message] | None:
        solution = task.hidden["solution"]
        if not solution:
            return None
        return [call_message("bash", command=solution), text_message("It is done.")]

    def _task(self, task: HarborTask) -> Task:
        image = task.image or self.config.image_name.format(name=task.name)
        if not self.config.images:
            if task.needs_image:
                raise InputError(f"{task.name} needs an image: {task.needs_image}.")
            image = ""
        elif not image:
            raise InputError(f"{task.name} names no docker_image (Dockerfiles are not built).")
        if not self.config.fetching_tests and (command := fetches(task.tests)):
            raise InputError(f"{task.name}: its tests need a network ({command}).")
        public = {
            "instruction": task.instruction,
            "image": image,
            "workdir": task.workdir,
            "files": "" if image else _packed(task.tree),
            "env": task.env,
        }
        script = task.solution.get("solve.sh")
        hidden = {
            "tests": _packed(task.tests),
            "env": task.test_env,
            "seconds": min(task.test_seconds, self.config.test_seconds),
            "solution": script.data.decode("utf-8", "replace") if script else "",
        }
        return Task(task.name, public, hidden)


def harbor_environment(folder: Path) -> type[Environment]:
    if not task_folders(folder):
        raise NotFoundError(f"There is no task.toml in {folder}, nor in a folder in it.")
    facts = {"folder": folder, "name": "harbor", "__doc__": Harbor.__doc__}
    return type("Harbor", (Harbor,), facts)


async def _base(public: Json, open_sandbox: Open) -> Tree:
    """The files that the workspace begins with; those of an image are read in a container in which
    nothing of an agent has run."""
    if not public["image"]:
        return _unpacked(public["files"])
    spec = structs.replace(SPEC, image=public["image"])
    async with open_sandbox(spec) as sandbox:
        ran = await sandbox.run_python(_READ, argv=[public["workdir"]])
        data = await sandbox.read("/work/image.tar", MOST_BYTES + 1) if ran.ok else b""
    if not data or len(data) > MOST_BYTES:
        raise InputError(f"{public['workdir']} of the image cannot be read, or is too large.")
    return tree_of_tar(data)


def _spec(public: Json, base: Tree) -> SandboxSpec:
    hides = (public["workdir"],) if public["image"] else ()
    return structs.replace(
        SPEC,
        archive=tar_of(base) if base else None,
        env={name: value for name, value in public["env"].items() if name != "PATH"},
        image=public["image"],
        image_hides=hides,
    )


def _packed(tree: Tree) -> str:
    return base64.b64encode(tar_of(tree)).decode()


def _unpacked(text: str) -> Tree:
    return tree_of_tar(base64.b64decode(text)) if text else {}
