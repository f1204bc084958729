"""The environment `scenarios`: pieces of work in a workspace, by the text protocol, with traces.

`public` holds the prompt, the workspace's `files`, the `checks` that run at the end, and facts for
the trace; the model sees the prompt and the files that it opens. The reward is the share of the
checks that pass; without checks there is none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from envserver_environments.rows import copied
from envserver_records.tasks import Json
from envserver_tools.protocol import Window, trace_path
from pydantic import Field, PositiveFloat, PositiveInt

from envserver import (
    Environment,
    HarnessTask,
    InputError,
    Message,
    PublicTask,
    Result,
    Rollout,
    Score,
    Split,
    Task,
)

from .agent import SPEC, checks_of_patch, counter, files_of, harness_task, named, work
from .loading import SAMPLE, Scenario, read_scenario


class Scenarios(Environment):
    """Do a piece of work in a small workspace, by THOUGHT, TOOL_CALL and FINAL."""

    name = "scenarios"
    sandbox = SPEC

    class Config(Environment.Config):
        """Selects the scenarios, and limits the runs."""

        scenario: list[Path] = []
        """Scenario folders or YAML files; unset: the built-in sample."""
        label: str = "gold"
        """Label of the scenario's prompt to use."""
        max_turns: PositiveInt = 30
        """Maximum model calls per run."""
        worker_timeout: PositiveFloat = 900.0
        """Wall-clock seconds per run."""
        max_retries: PositiveInt = 3
        """Consecutive unusable messages before a run ends."""
        command_seconds: PositiveInt = 30
        """Maximum seconds per command."""
        context_tokens: int | None = Field(default=None, ge=256)
        """Maximum tokens of prompt and answer together; the oldest turns are dropped from the
        prompt to stay below it. Unset: no limit."""
        answer_tokens: PositiveInt = 1024
        """Tokens of context_tokens reserved for the answer."""
        tokenizer: Path | None = None
        """tokenizer.json to count tokens with; unset: estimate 3.5 characters per token."""

    @classmethod
    def write_sample(cls, folder: Path) -> Mapping[str, Any]:
        files = copied(SAMPLE, folder, {"scenario": "mean_of_values.yaml"})
        return {"scenario": [files["scenario"]]}

    def tasks(self, split: Split) -> Iterator[Task]:
        paths = self.config.scenario or sorted(SAMPLE.glob("*.yaml"))
        for path in paths:
            yield self.task_from_row({"scenario": str(path), "seed": self.config.seed})

    def task_from_row(self, row: Json) -> Task:
        """`{"scenario": path, "label", "number", "seed", "model": {"name", "hf_id", "backend"}}`;
        all but the first may be left out."""
        if not isinstance(row.get("scenario"), str):
            raise InputError("The row names no scenario.", hint='{"scenario": "path/to/folder"}')
        scenario, tree = read_scenario(Path(row["scenario"]))
        label = str(row.get("label", self.config.label))
        number = int(row.get("number", 0))
        model = {"name": "", "hf_id": "", "backend": "", **(row.get("model") or {})}
        public = {
            "scenario": scenario.name,
            "prompt": scenario.asked(label),
            "files": files_of(tree),
            "checks": [check.model_dump() for check in scenario.checks],
            "model": model,
            "label": label,
            "number": number,
            "seed": int(row.get("seed", self.config.seed)),
            "path": trace_path({"model": model, "label": label}, number),
        }
        return Task(_task_id(scenario, row, number), public, {"solution": scenario.solution})

    async def rollout(self, task: PublicTask, run: Rollout) -> Json:
        return await work(
            task,
            run,
            max_retries=self.config.max_retries,
            command_seconds=self.config.command_seconds,
            window=self._window(),
        )

    def harness_task(self, task: PublicTask, run: Rollout) -> HarnessTask:
        return harness_task(task)

    async def score(self, task: Task, result: Result) -> Score:
        if not task.public["checks"]:
            return Score(reward=None)
        output = result.output if isinstance(result.output, dict) else {}
        checks: Any = output.get("checks")
        if "foreign_agent" in result.flags:
            checks = await checks_of_patch(task.public, output, self.sandboxes)
        passed = [
            bool(check.get("passed"))
            for check in (checks if isinstance(checks, list) else ())
            if isinstance(check, dict)
        ]
        parts = {f"check_{number}": float(score) for number, score in enumerate(passed, 1)}
        share = sum(passed) / len(task.public["checks"])
        return Score(reward=share, components=parts)

    def demonstration(self, task: Task) -> list[Message] | None:
        texts = task.hidden.get("solution") or []
        return [{"role": "assistant", "content": text} for text in texts] or None

    def final_answer(self, result: Result) -> str:
        output = result.output if isinstance(result.output, dict) else {}
        return str(output.get("answer") or "")

    def _window(self) -> Window | None:
        config = self.config
        if config.context_tokens is None:
            return None
        tokenizer = None
        if config.tokenizer is not None:
            from tokenizers import Tokenizer

            tokenizer = Tokenizer.from_file(str(config.tokenizer))
        return Window(counter(tokenizer), config.context_tokens, config.answer_tokens)


def _task_id(scenario: Scenario, row: Json, number: int) -> str:
    if "number" not in row:
        return named(scenario.name)
    return named(f"{scenario.name}-{row.get('label', '')}-{number:03d}")
