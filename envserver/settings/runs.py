"""What a run may have besides its environment: evaluations, trackers, a curriculum, Ray, judges,
and a program in place of the agent.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any, Literal, cast

from envserver_records.tasks import Split
from pydantic import Field, SecretStr, field_validator, model_validator

from .section import (
    Amount,
    ApiKey,
    Count,
    Finite,
    FiniteAmount,
    Natural,
    Port,
    Positive,
    PositiveShare,
    Section,
    Share,
    check_url,
)

Failures = Literal["drop", "zero"]
"""Attempts lost by the server's or the engine's fault are left out, or count as 0."""
Truncated = Literal["score", "zero", "drop"]
"""Truncated attempts count their score, count as 0, or are left out."""


class HeldOutConfig(Section):
    """Evaluates a held-out split while trainers train; settings have the names of `evaluate`'s."""

    every: Count | None = None
    """Evaluate the first published policy version, and then the first at or after each multiple of
    this number; unset: only on request (POST /v1/evaluations)."""
    split: Split = "test"
    """Split of the tasks; not the one that is trained on."""
    total_steps: Count = 100
    """Maximum number of tasks of each environment; each gets one group."""
    group_size: Count | None = None
    """Attempts at each task; unset: as in training."""
    temperature: Amount | None = None
    """Sampling temperature; unset: as in training."""
    max_concurrent: Count = 16
    """Maximum rollouts of an evaluation in flight, beside those of training: its share of the
    engine."""
    hold_seconds: Amount = 0.0
    """Seconds that a trainer's pause for new weights may wait for the end of an evaluation, at most
    half of the pause's own `timeout_seconds`; 0: weights change during an evaluation, and its
    result says which versions sampled."""
    baselines: bool = False
    """Run the environments' baselines, too."""
    pass_at: Finite | None = None
    """Minimum reward of an attempt that passes; unset: that of a solved task."""
    failures: Failures = "drop"
    """How to count attempts lost to infrastructure failures: leave them out, or as 0 (zero)."""
    truncated: Truncated = "score"
    """How to count attempts in which the model was cut off: by their score, as 0, or not at all."""
    out: Path | None = None
    """Folder of the evaluations, each in its own; unset: evaluations, beside the store."""


class TrackingConfig(Section):
    """What trackers receive (`--track wandb,trackio,mlflow,tensorboard,jsonl`)."""

    project: str = "envserver"
    """Project, or experiment, at the tracker."""
    name: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")
    """Name of the run; unset: command, environment and time."""
    folder: Path = Path("runs/track")
    """Folder for files that have no other place: W&B offline, MLflow's database, TensorBoard,
    JSON lines."""
    seconds: Positive = 30.0
    """Seconds between writes of metrics; nothing is written without a new group."""
    close_seconds: Amount = 60.0
    """Seconds that the end of the run waits for trackers."""
    rollouts: Natural = 8
    """Rollouts in each addition to the table: the best and the worst of the latest groups."""
    rollouts_minutes: Amount = 5.0
    """Minutes between two additions to the table of rollouts."""


class CurriculumConfig(Section):
    """Chooses the next task by how often each was solved."""

    sampler: Literal["uniform", "difficulty", "replay"] = "uniform"
    """uniform: the environment's own order; difficulty: repeats tasks that are neither too easy nor
    too hard; replay: gives a share of the groups to unsolved tasks."""
    discount: PositiveShare = 0.98
    """Weight of a result per policy version since it was made; lower values forget faster."""
    target: float = Field(default=0.5, gt=0, lt=1)
    """difficulty: success probability of the tasks that are preferred most."""
    sharpness: float = Field(default=2.0, gt=0, le=100)
    """difficulty: how fast the preference falls off; 2 with a target of 0.5 is p(1 - p)."""
    explore: PositiveShare = 0.2
    """difficulty: minimum share of the groups that follow the environment's own order."""
    replay_share: float = Field(default=0.25, ge=0, le=0.9)
    """replay: share of the groups for unsolved tasks, while there are any."""
    replay_order: Literal["oldest", "weighted"] = "oldest"
    """replay: oldest: the task not tried for longest; weighted: random, uncertain ones first."""
    unsolved_below: Share = 0.05
    """replay: a task with at most this mean reward counts as unsolved."""
    solved_above: float | None = Field(default=None, gt=0, lt=1)
    """Mostly skip tasks that are solved more often than this, with any sampler; unset: never."""
    solved_attempts: Count = 8
    """Scored rollouts required before a task can be skipped."""
    solved_share: PositiveShare = 0.1
    """Probability that such a task is not skipped."""
    unsolved_share: PositiveShare = 1.0
    """Probability that a task is not skipped although it was never solved lately (a mean reward of
    at most `unsolved_below` after `solved_attempts` rollouts), with any sampler; 1: never skip."""
    memory: int = Field(default=2048, ge=1, le=65536)
    """Tasks remembered per environment, to be repeated."""


class RayConfig(Section):
    """Runs the environments in actors on the nodes of a Ray cluster (docs/ray.md)."""

    address: str = ""
    """Ray cluster: auto (the one of this machine or job), or HOST:PORT; also `--ray ADDRESS`;
    unset: the environments run in this process."""
    runners: Count | None = None
    """Number of runners, each with its own workers; unset: between `ray.min` and `ray.max`,
    depending on the load."""
    min: Count = 1
    """Minimum number of runners."""
    max: Count | None = None
    """Maximum number of runners; unset: as many as fit in the cluster now."""
    cpus: Amount = 1.0
    """CPUs that Ray reserves for a runner."""
    resources: dict[str, float] = {}
    """Other resources that a runner needs, such as {"env": 1}."""
    labels: dict[str, str] = {}
    """Labels of the nodes for runners, such as {"zone": "a"} or {"zone": "!in(b)"}."""
    runtime_env: str = ""
    """Ray's runtime environment of the runners, as JSON or a file (YAML, JSON): working_dir,
    env_vars, pip, py_modules. A relative --env FILE is then looked for in its working_dir."""
    url: str = ""
    """Address at which the nodes reach this server; unset: this machine's in the cluster."""
    token: SecretStr = SecretStr("")
    """Access token of the runners, with the role `environment`, if the server requires tokens."""
    place_seconds: Amount = 5.0
    """Seconds to wait for a node that fits a runner; set it higher if the cluster adds its nodes on
    demand."""
    idle_seconds: Amount = 60.0
    """Seconds that fewer runners must suffice before one is stopped."""

    @field_validator("runtime_env")
    @classmethod
    def _is_readable(cls, value: str) -> str:
        _runtime_env(value)
        return value

    @field_validator("address")
    @classmethod
    def _is_no_client(cls, value: str) -> str:
        if value.startswith("ray://"):
            raise ValueError("Ray Client is not supported: run on a node, or with `ray job submit`")
        return value

    @field_validator("url")
    @classmethod
    def _is_url(cls, value: str) -> str:
        if value:
            check_url(value, "http://host:8000")
        return value.rstrip("/")

    @model_validator(mode="after")
    def _bounds_fit(self) -> RayConfig:
        if self.max is not None and self.max < self.min:
            raise ValueError("ray.max is smaller than ray.min")
        return self

    @property
    def environment_of_runners(self) -> dict[str, Any]:
        """Ray's runtime environment; empty: that of the nodes."""
        return _runtime_env(self.runtime_env)

    def wants(self) -> str:
        """Returns what a runner needs, as text."""
        needs = {"CPU": self.cpus, **self.resources}
        text = ", ".join(f"{name} {amount:g}" for name, amount in needs.items() if amount)
        labels = ", ".join(f"{name}={value}" for name, value in self.labels.items())
        return f"{text or 'nothing'}{f' and the label {labels}' if labels else ''}"


def _runtime_env(value: str) -> dict[str, Any]:
    if not value:
        return {}
    import yaml

    try:
        text = value if value.lstrip().startswith("{") else Path(value).read_text("utf-8")
        read = json.loads(text) if text.lstrip().startswith("{") else yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ValueError(f"is neither JSON nor a readable file: {error}") from None
    if not isinstance(read, dict):
        raise ValueError("must be a mapping, such as {working_dir: .}")
    return cast(dict[str, Any], read)


class HarnessConfig(Section):
    """The external agent that replaces the environment's own rollout."""

    name: str | None = None
    """An installed program: claude-code, codex, opencode, mini-swe-agent or smolagents (`envserver
    agents list`); unset: the environment's own agent."""
    command: str | None = None
    """Command line of any other program; {instruction_file}, {instruction}, {base_url}, {api_key},
    {model} and {mcp_url} are replaced, and OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL and
    ANTHROPIC_API_KEY are set."""
    url: str | None = None
    """Address of an agent that is already running: it gets each task by POST and answers with its
    output."""
    base_url: str | None = None
    """With agent.url, where the agent reaches agent.port of this machine (the end of a tunnel):
    http://127.0.0.1:9200; unset: it is on this machine."""
    port: Port = 0
    """Loopback port at which agents call the model, for a tunnel; 0: any free one."""
    folder: Path | None = None
    """Folder of a program of yours, shown to it as {folder}; for an installed program, the folder
    of all installed ones."""
    arguments: list[str] = []
    """Further arguments of the program's command line."""
    output_kb: int = Field(default=64, ge=1, le=1024)
    """Kilobytes of what the program prints that are kept with the rollout: its beginning and its
    end."""

    @model_validator(mode="after")
    def _is_one(self) -> HarnessConfig:
        if sum(way is not None for way in (self.name, self.command, self.url)) > 1:
            raise ValueError("give one of agent.name, agent.command and agent.url")
        if self.base_url is not None and not (self.url and self.port):
            raise ValueError("agent.base_url needs agent.url and agent.port")
        return self

    @field_validator("command")
    @classmethod
    def _has_words(cls, command: str | None) -> str | None:
        try:
            if command is not None and not shlex.split(command):
                raise ValueError("is empty")
        except ValueError as error:
            raise ValueError(f"is not a command line: {error}") from None
        return command

    @property
    def is_set(self) -> bool:
        """Returns whether there is an external agent."""
        return any(way is not None for way in (self.name, self.command, self.url))


class JudgeConfig(Section):
    """The model that `score` and `score_group` may call (`self.judge`)."""

    base_url: str | None = None
    """Address of the judge's engine, an OpenAI-compatible server; unset: no judge."""
    model_name: str = "default"
    """Name of the judge's model there; "default": the first one listed."""
    api_key: ApiKey = SecretStr("")
    """API key of the judge's engine; it stays in the server: never logged, written or sent to a
    scorer."""
    timeout: Positive = 120.0
    """Timeout in seconds of one answer, including retries after failures."""
    temperature: Amount = 0.0
    """Sampling temperature."""
    max_tokens: Count = 1024
    """Maximum length of one answer, in tokens."""
    max_concurrent: Count = 16
    """Maximum calls in flight; further ones wait."""
    cache: Path | None = None
    """SQLite file of answers by content, shared by all commands that name it; unset: judge.db in
    the folder of the output, the store or the first source."""
    cache_mb: Count = 1024
    """Size of that file at which the oldest tenth of its answers is dropped, in MB."""
    prompt_price: FiniteAmount | None = None
    """Price of a million prompt tokens; needs `judge.completion_price`."""
    completion_price: FiniteAmount | None = None
    """Price of a million completion tokens."""
    currency: str = "USD"
    """Currency of both prices."""

    @model_validator(mode="after")
    def _prices_go_together(self) -> JudgeConfig:
        if (self.prompt_price is None) != (self.completion_price is None):
            raise ValueError("prompt_price and completion_price go together")
        return self
