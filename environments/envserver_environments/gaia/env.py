"""The environment `gaia`: questions whose answers are found in files, by code, or on the web.

`public` holds the question and its file (`data` in base64, under a neutral name); `hidden` the
rest. An agent sees not even the author's id, which search engines know.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
from collections.abc import Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Literal

from envserver_environments.rows import DataEnvironment, RowsConfig, id_of
from envserver_records.tasks import Json
from envserver_tools.documents import document_tools, preload
from envserver_tools.sandboxed import folder_tools
from envserver_tools.web import WebSettings, remote_tools, services_of
from pydantic import (
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

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
    Service,
    Split,
    Task,
    Tool,
)

from .agents import AgentOptions, Kind, Prompts, solve
from .agents.prompts import ANSWER_RULES, FINAL_ANSWER, question
from .interpreter.process import COMPANION
from .known import demonstrate, known_results
from .loading import (
    DEFAULT_COPY,
    LEVELS,
    OWN,
    GaiaQuestion,
    is_official,
    read_copy,
    read_row,
)
from .scoring import Contaminated, Unfinished, Weights, judge

_MB = 2**20
_SUFFIX = re.compile(r"\.[a-z0-9]{1,8}")

preload()  # a worker without internet access needs it in advance


class Gaia(DataEnvironment):
    """Answer questions with files, code and tools, as smolagents' agents or in a plain loop."""

    name = "gaia"
    sample_files = {"data_path": ""}
    checks_rows = True
    isolation = "sandboxed"
    preload = ()  # its agents speak HTTP themselves
    companion = COMPANION

    class Config(RowsConfig):
        """Selects the tasks, the agent, its tools, and the scoring."""

        data_set: Literal["sample", "gaia"] = "sample"
        """Data set. sample: 30 built-in tasks; gaia: the local copy in data/gaia or data_path."""
        data_path: Path | None = None
        """Folder of GAIA, or of tasks in its format (metadata.jsonl or .parquet, and files)."""
        levels: list[int] = list(LEVELS)
        """Difficulty levels to use: 1, 2, 3."""
        text_only: bool = False
        """Skip tasks that come with a file."""
        max_file_mb: float = Field(default=16.0, gt=0, le=64)
        """Skip tasks whose file is larger, in megabytes."""
        train_on_gaia: bool = False
        """Use GAIA's own tasks for the split train; its authors ask you not to."""
        agent: Kind = "code"
        """code: smolagents' CodeAgent; tools: its ToolCallingAgent; plain: a built-in loop."""
        prompts: Prompts = "own"
        """Prompts of the agents code and tools. own: short ones; smolagents: the templates of the
        installed smolagents, for the system prompt and for plans."""
        max_steps: PositiveInt = 12
        """Maximum number of agent steps; planning steps are not counted."""
        planning_interval: PositiveInt | None = None
        """Plan before the first step and then every N steps; unset: never."""
        extra_imports: list[str] = []
        """Modules imported before the first step."""
        documents: bool = True
        """Offer the tools read_document and find_in_document."""
        files: bool = False
        """Offer the tools read_file, write_file and append_to_file, in the agent's folder."""
        web: Literal["none", "live", "record", "replay"] = "none"
        """Offer web_search, visit_page and find_in_page. live: record nothing; record: fetch what
        web_folder lacks and keep it there; replay: serve only what web_folder holds."""
        web_folder: Path = Path("data/web")
        """Folder of the recorded web."""
        web_epoch: str = "1"
        """Name of the recording in web_folder."""
        web_provider: Literal["tavily", "duckduckgo"] = "tavily"
        """Search provider. tavily reads the server's environment variable TAVILY_API_KEY."""
        web_provider_url: str = ""
        """URL of your own gateway to the search provider; unset: the provider's. Put no keys here:
        agent processes can read it."""
        web_depth: Literal["basic", "advanced"] = "basic"
        """Depth of Tavily's searches. advanced: better excerpts, for twice the credits."""
        web_reader: Literal["own", "tavily"] = "own"
        """Page reader. own: the server itself; tavily: Tavily's extraction."""
        web_allow_private: bool = False
        """Let agents read pages in the server's private network."""
        web_leaks: Literal["hide", "show"] = "hide"
        """Hide or show pages that repeat the question and sites that host benchmarks. Hidden pages
        look as if they did not exist; a flag records both cases."""
        contaminated: Contaminated = "drop"
        """Rollouts that saw a leaked answer anyway. drop: leave them out of training; otherwise
        reward 0, or score them like all others."""
        agent_seconds: PositiveFloat | None = None
        """Seconds until an agent stops; unset: shortly before worker_timeout."""
        step_seconds: PositiveFloat = 60.0
        """Maximum seconds for the code of one step."""
        verbosity: int = Field(default=-1, ge=-1, le=2)
        """Level of smolagents' log on stderr: -1 nothing, 0 errors, 1 steps, 2 all."""
        unfinished: Unfinished = "score"
        """Rollouts without an answer: score them 0, or leave them out of training."""
        rubric: Weights = Weights()
        max_turns: NonNegativeInt = 0
        """Maximum model calls per rollout; 0: as many as steps and plans need."""
        max_completion_tokens: PositiveInt = 16384
        """Maximum tokens sampled per rollout, over all calls."""
        max_token_length: PositiveInt = 32768
        """Maximum training sequence length in tokens; groups with a longer one are dropped."""

        @field_validator("levels", mode="before")
        @classmethod
        def _several(cls, value: object) -> object:
            parts = value.split(",") if isinstance(value, str) else value
            return [parts] if isinstance(parts, int) else parts

        @field_validator("levels")
        @classmethod
        def _known(cls, value: list[int]) -> list[int]:
            if not value or not set(value) <= set(LEVELS):
                raise ValueError("must be of 1, 2 and 3")
            return value

        @model_validator(mode="after")
        def _templates(self) -> Gaia.Config:
            if self.prompts == "smolagents" and self.agent == "plain":
                raise ValueError("prompts smolagents: the agent must be code or tools, not plain")
            return self

        @model_validator(mode="after")
        def _calls(self) -> Gaia.Config:
            if self.max_turns == 0:
                plans = (
                    -(-self.max_steps // self.planning_interval) if self.planning_interval else 0
                )
                self.max_turns = self.max_steps + plans
            return self

    class Question(Environment.Question):
        """A question, and a file that belongs to it."""

        file: Path | None = None
        """The file."""

    def tasks(self, split: Split) -> Iterator[Task]:
        read = ((place, self._read(item)) for place, item in self._items(split))
        return self.rows.usable("gaia", read)

    async def rollout(self, task: PublicTask, run: Rollout) -> Json:
        config, folder = self.config, Path.cwd()
        names = await asyncio.to_thread(_write_files, task.public["files"], folder)
        rules = AgentOptions(
            agent=config.agent,
            max_steps=config.max_steps,
            planning_interval=config.planning_interval,
            extra_imports=tuple(config.extra_imports),
            token_budget=config.max_completion_tokens,
            seconds=config.agent_seconds,
            step_seconds=config.step_seconds,
            verbosity=config.verbosity,
            prompts=config.prompts,
        )
        tools = list(document_tools(folder).values()) if config.documents else []
        tools += folder_tools().values() if config.files else []
        tools += self._web_tools(run)
        shown = PublicTask("task", {"question": task.public["question"], "files": names})
        return await solve(shown, run, rules, tools)

    def harness_task(self, task: PublicTask, run: Rollout) -> HarnessTask:
        async def answer(workspace: Sandbox, words: str) -> Json:
            return {"answer": words or None, "state": "answered", "steps": []}

        files = {file["name"]: base64.b64decode(file["data"]) for file in task.public["files"]}
        shown = {"question": task.public["question"], "files": [*files]}
        return HarnessTask(
            instruction=f"{question(shown)}\n\n{ANSWER_RULES}\n\n{FINAL_ANSWER}",
            files=files,
            tools=self._web_tools(run) or None,
            output=answer,
        )

    def score(self, task: Task, result: Result) -> Score:
        return judge(task, result, self.config)

    def services(self) -> AbstractAsyncContextManager[Mapping[str, Service]]:
        config = self.config
        if config.web == "none":
            return super().services()
        settings = WebSettings(
            mode=config.web,
            folder=None if config.web == "live" else config.web_folder,
            epoch=config.web_epoch,
            provider=config.web_provider,
            provider_url=config.web_provider_url,
            depth=config.web_depth,
            reader=config.web_reader,
            allow_private=config.web_allow_private,
            leaks=config.web_leaks,
        )
        return services_of(settings)

    def demonstration(self, task: Task) -> list[Message]:
        return demonstrate(task, self.config.agent, self.config.planning_interval)

    def known_results(self, task: Task) -> Iterator[KnownResult]:
        return known_results(task, self.config)

    def task_from_row(self, row: Json) -> Task:
        plain = {**row, "file_name": "", "task_id": id_of(row)}
        item = read_row({"Question": "?", **plain}, OWN, OWN, self.config.columns)
        return _task(item, 0)

    def task_from_question(self, posed: Question) -> Task:
        if not posed.question.strip():
            raise InputError("The question is empty.")
        item = GaiaQuestion(
            task_id="asked",
            question=posed.question.strip(),
            level=1,
            answer=posed.answer or "?",
            attachment=posed.file,
            solution=None,
        )
        return _task(item, int(self.config.max_file_mb * _MB))

    def response_from_row(self, response: str, messages: list[Message]) -> Result:
        return Result(output={"answer": response, "state": "answered", "steps": []})

    def _web_tools(self, run: Rollout) -> list[Tool]:
        return [] if self.config.web == "none" else [*remote_tools(run.call_tool).values()]

    def _read(self, item: GaiaQuestion | str) -> Task | str:
        if isinstance(item, str):
            return item
        if item.level not in self.config.levels:
            return "its level is not among --env.levels"
        if self.config.text_only and item.attachment is not None:
            return "it has a file (--env.text_only)"
        try:
            return _task(item, int(self.config.max_file_mb * _MB))
        except InputError as error:
            return error.message

    def _items(self, split: Split) -> Iterator[tuple[str, GaiaQuestion | str]]:
        config = self.config
        copy = config.data_path or (OWN if config.data_set == "sample" else DEFAULT_COPY)
        if is_official(copy):
            if split == "test":
                raise ConfigError(
                    "The answers of GAIA's test split are not public: it cannot be scored.",
                    hint="--env.split validation",
                )
            if split == "train" and not config.train_on_gaia:
                raise ConfigError(
                    "GAIA's authors ask not to train on its tasks.",
                    hint="--env.split validation evaluates; --env.train_on_gaia true trains "
                    "anyway; for training, use data_set sample or your own data_path.",
                )
            split = "validation"
        return read_copy(copy, split, config.seed, config.columns)


def _task(item: GaiaQuestion, most_bytes: int) -> Task:
    files = []
    if item.attachment is not None:
        suffix = item.attachment.suffix.lower()
        name = f"attachment{suffix if _SUFFIX.fullmatch(suffix) else ''}"
        files.append({"name": name, "data": _encoded(item.attachment, most_bytes)})
    key = f"{item.task_id}\0{item.question}".encode()
    return Task(
        f"gaia-{hashlib.blake2b(key, digest_size=8).hexdigest()}",
        {"question": item.question, "files": files},
        {
            "answer": item.answer,
            "level": item.level,
            "task_id": item.task_id,
            "solution": item.solution,
        },
    )


def _encoded(file: Path, most_bytes: int) -> str:
    try:
        if file.stat().st_size > most_bytes:
            raise InputError("its file is too large")
        return base64.b64encode(file.read_bytes()).decode("ascii")
    except OSError as error:
        raise InputError("its file cannot be read") from error


def _write_files(files: list[dict[str, str]], folder: Path) -> list[str]:
    for file in files:
        (folder / Path(file["name"]).name).write_bytes(base64.b64decode(file["data"]))
    return [file["name"] for file in files]
