"""Environments made of Inspect tasks: `inspect:inspect_evals/NAME`, `inspect:path/file.py@NAME`. A
sample is a task, an epoch a rollout, the dictionary of scores a reward; see README.md."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any, ClassVar, Literal

from pydantic import ValidationError

from envserver import (
    AgentRole,
    ConfigError,
    Environment,
    Message,
    PublicTask,
    Result,
    Rollout,
    SandboxSpec,
    Score,
    Split,
    Task,
)

from . import running, scoring
from . import values as loading
from .running import Outcome, run_sample
from .values import as_score

GRADER = "grader"


class InspectTask(Environment):
    """A task of Inspect."""

    isolation = "dedicated"
    sandbox_images = True
    demonstrations_solve = False
    preload = ("envserver_integrations.inspect.warm",)
    spec: ClassVar[str]

    class Config(Environment.Config):
        args: dict[str, Any] = {}
        """Arguments of the task's function, as JSON: {"difficulty": "hard"}."""
        scoring: Literal["auto", "scorer", "rollout"] = "auto"
        """Where scorers run. rollout: in the worker, with the sandbox and the target; scorer: in
        envserver's scorer process; auto: rollout for tasks with a sandbox."""
        weights: dict[str, float] = {}
        """Weights of SCORER or SCORER/KEY, as JSON; the reward is their weighted mean. Needed for
        tasks with several scorers."""
        lowest_value: float = 0.0
        """The scorers' value that becomes a reward of 0."""
        highest_value: float = 1.0
        """The scorers' value that becomes a reward of 1."""
        roles: list[str] | None = None
        """Model roles of the task besides the solver's: each is an untrained agent
        (`--env.agents.NAME.*`). Unset: those that the task names, and `grader` if a
        model_graded scorer runs in the rollout."""
        image: str = ""
        """Container image for the task's sandbox (backend docker); unset: the one that it names."""
        ignore_image: bool = False
        """Run a task that names an image in the server's sandbox, without the image."""

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self.sandbox = SandboxSpec(limits=running.LIMITS) if self._has_sandbox else None
        self._check()

    @cached_property
    def _task(self) -> Any:
        return loading.load(self.spec, self.config.args)

    @cached_property
    def _samples(self) -> dict[str, Any]:
        return loading.samples_by_id(self._task)

    @property
    def _has_sandbox(self) -> bool:
        samples = self._samples.values()
        return self._task.sandbox is not None or any(
            sample.sandbox is not None for sample in samples
        )

    @property
    def _scored_here(self) -> bool:
        if self.config.scoring == "auto":
            return self._has_sandbox
        return bool(self.config.scoring == "rollout")

    def _check(self) -> None:
        names = list(scoring.named_scorers(self._task))
        weights: dict[str, float] = self.config.weights
        if not names:
            raise ConfigError(f"inspect:{self.spec} has no scorer, so it gives no reward.")
        unknown = [name for name in weights if name.split("/")[0] not in names]
        if unknown or (len(names) > 1 and not weights):
            raise ConfigError(
                f"--env.weights must name scorers of the task: {', '.join(names)}.",
                hint=f"--env.weights {json.dumps({names[0]: 1.0})!r}",
            )
        if weights and (min(weights.values()) < 0 or not sum(weights.values())):
            raise ConfigError("--env.weights must be positive.")
        if self.config.lowest_value >= self.config.highest_value:
            raise ConfigError("--env.lowest_value must be less than --env.highest_value.")
        if self._has_sandbox and not self._scored_here:
            raise ConfigError(
                "A task with a sandbox is scored in the rollout, where the sandbox is.",
                hint="--env.scoring rollout",
            )

    def _roles(self) -> list[str]:
        if self.config.roles is not None:
            return list(self.config.roles)
        names = list(self._task.model_roles or {})
        graded = any(name.startswith("model_graded") for name in scoring.named_scorers(self._task))
        return list(dict.fromkeys([*names, *([GRADER] if graded and self._scored_here else [])]))

    def agents(self) -> Mapping[str, AgentRole]:
        roles = {role: AgentRole(trained=False) for role in self._roles()}
        return {"agent": AgentRole(), **roles} if roles else {}

    def tasks(self, split: Split) -> Iterator[Task]:
        for name, sample in self._samples.items():
            public = loading.public_part(sample)
            if self._has_sandbox and (image := self._image_of(sample)):
                public["image"] = image
            yield Task(name, public, loading.hidden_part(sample))

    def _image_of(self, sample: Any) -> str | None:
        image, ignored = self.config.image, self.config.ignore_image
        return running.image_of(self._task, sample, image, ignored)

    def rollout(self, task: PublicTask, run: Rollout) -> Any:
        """Runs in a thread, with an event loop for code of others that may block it."""
        sample = self._samples.get(task.id)
        if sample is None or loading.fingerprint(sample) != task.public["fingerprint"]:
            raise ConfigError(
                f"The worker's data set has another sample {task.id!r} than the server's.",
                hint="The task must construct the same samples each time: give its shuffle a seed.",
            )
        outcome = run_sample(
            self._task,
            sample,
            run,
            scored=self._scored_here,
            image=self._image_of(sample) if self._has_sandbox else None,
            roles=self._roles(),
        )
        return asyncio.run(outcome).as_json()

    def prepare_scoring(self) -> None:
        self._check()

    async def score(self, task: Task, result: Result) -> Score:
        outcome = _outcome(result.output)
        if outcome is not None and outcome.error and result.limit is None:
            return Score(error=outcome.error)
        if self._scored_here:
            values = outcome.values if outcome is not None else {}
            if set(values) == set(scoring.named_scorers(self._task)):
                return self._reward(values)
            if outcome is not None and result.limit is not None:
                return Score(error="A limit ended the rollout before its scorers had finished.")
            return Score(reward=0.0)
        state = outcome.state if outcome is not None else None
        state = state or await scoring.state_of_result(result)
        if state is None:
            return Score(reward=0.0)
        sample = self._sample_of(task)
        values = await scoring.score_state(self._task, sample, task.hidden, state, self.judge)
        return self._reward(values)

    def _reward(self, values: Mapping[str, Any]) -> Score:
        bounds = (self.config.lowest_value, self.config.highest_value)
        return as_score(values, self.config.weights, bounds)

    def _sample_of(self, task: Task) -> Any:
        sample = self._samples.get(task.id)
        if sample is None:
            raise ConfigError(f"The task has no sample {task.id!r}.")
        return sample

    def demonstration(self, task: Task) -> list[Message] | None:
        target = task.hidden["target"]
        text = target if isinstance(target, str) else ", ".join(target)
        answer = f"ANSWER: {text}" if "choices" in task.public else text
        return [{"role": "assistant", "content": answer}]

    def final_answer(self, result: Result) -> str:
        outcome = _outcome(result.output)
        if outcome is None or outcome.state is None:
            return super().final_answer(result)
        return str(outcome.state.output.completion)


def _outcome(output: Any) -> Outcome | None:
    try:
        return Outcome.model_validate(output)
    except ValidationError:
        return None


def environment_of(spec: str) -> type[Environment]:
    doc = loading.check_exists(spec)
    name = re.sub(r"\W+", "_", re.split(r"[/@]", spec)[-1].removesuffix(".py")).lower()
    return type(
        "InspectTask",
        (InspectTask,),
        {"spec": spec, "name": name, "__doc__": doc or f"The Inspect task {spec}."},
    )
