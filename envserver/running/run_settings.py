"""The settings of each command, in addition to the shared ones (`config.Settings`).

The command line and the Python API use the same names; each field's docstring is its help text.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

from envserver_records.http_errors import server_urls
from envserver_records.tasks import Split
from pydantic import Field, SecretStr, field_validator

from ..runners.messages import NAME_PATTERN
from ..settings.config import (
    EngineConfig,
    EnvironmentSettings,
    Logged,
    LogLevel,
    MixSettings,
    OpenAIConfig,
    SandboxConfig,
    SandboxMachineConfig,
    Settings,
    StorePlace,
    WorkersConfig,
)
from ..settings.runs import Failures, HeldOutConfig, JudgeConfig, Truncated
from ..settings.section import Count, Finite, FiniteAmount, Natural, Positive, Share, check_url
from ..settings.server import (
    AlarmsConfig,
    DeliveryConfig,
    RetentionConfig,
    ServerConfig,
    TelemetryConfig,
)


class ServeSettings(MixSettings):
    for_training: ClassVar[bool] = True

    verbose: bool = False
    """Show samples of conversations: the best and the worst rollout of a group, now and then."""
    evaluate: HeldOutConfig = HeldOutConfig()


class ProcessSettings(MixSettings):
    """Settings of `process`."""

    resume: bool = False
    """Resume an existing output file: its groups are not made again."""
    overwrite: bool = False
    """Replace an existing output file."""
    verbose: bool = False
    """Show samples of conversations: the best and the worst rollout of the first three groups, and
    then of one group every ten seconds.
    """


class EvaluateSettings(MixSettings):
    """Settings of `evaluate`."""

    out: Path | None = None
    """Folder for groups and report; unset: runs/evaluate/<environment>-<time>."""
    resume: bool = False
    """Resume in an existing folder (--out): its groups are kept, its report is made again."""
    overwrite: bool = False
    """Replace the contents of an existing folder."""
    pass_at: Finite | None = None
    """Minimum reward of an attempt that passes; unset: that of a solved task, 1 in most
    environments."""
    failures: Failures = "drop"
    """How to count attempts lost to infrastructure failures: leave them out (drop), or as 0 (zero).
    """
    truncated: Truncated = "score"
    """How to count attempts in which the model was cut off: by their score (score), as 0 (zero), or
    leave them out (drop).
    """
    no_baselines: bool = False
    """Do not run the environment's baselines."""
    perturb: list[str] = Field(default=[])
    """Also ask each task in other words: typos, lower_case, spaces (doubled), sentences (the last
    one first). The report then says how steady the results are."""
    paraphrases: Path | None = None
    """JSONL of {"task_id", "question"}: other wordings of tasks, one or several for each."""
    shard: str = ""
    """2/4: only every fourth task, from the second on; `evaluate merge` makes one report of all
    four."""


class ScoreSettings(EnvironmentSettings):
    """Settings of `score`."""

    input: Path
    """JSONL file of rows to score."""
    out: Path
    """JSONL file for the scores; an existing file is replaced at the end."""
    processes: Count = 2
    """Number of rows scored in parallel, each in a process."""
    sandbox: SandboxConfig = SandboxConfig()
    judge: JudgeConfig = JudgeConfig()


class RescoreSettings(EnvironmentSettings):
    """Settings of `rescore`."""

    source: list[str] = Field(default_factory=list)
    """Files of `process` (plain, .gz, .zst), folders of them, a store, or a running server; may
    be given first, without the flag.
    """
    rubric: str | None = None
    """Class that scores instead of the environment: path/to/file.py:Class."""
    out: Path
    """JSONL file for the groups with their new scores."""
    resume: bool = False
    """Resume an existing file: groups that it contains are not scored again."""
    overwrite: bool = False
    """Replace an existing file."""
    skip_bad: bool = False
    """Skip and count lines that are not groups."""
    without_messages: bool = False
    """Score rollouts that were written without their conversations by their output alone."""
    processes: Count = 2
    """Number of rollouts scored in parallel, each in a process."""
    sandbox: SandboxConfig = SandboxConfig()
    judge: JudgeConfig = JudgeConfig()


class ReplaySettings(Settings):
    """Settings of `replay`."""

    source: list[str]
    """File of `process`, a folder of such files, a store, or a running server; may be given first.
    """
    rollout: str
    """Id of the rollout."""
    services: Literal["auto", "record", "live"] = "auto"
    """Where answers to the agent's service calls come from: the record, or the running services
    (live); auto: the record if calls were kept (`--tokens.keep_calls true` of `process`).
    """
    debug: bool = False
    """Run the agent in this process, stopped in pdb at its first line; without a time limit."""
    without_walls: bool = False
    """Let --debug run agents that execute the model's code in their own process: code that the
    model wrote then runs in this process.
    """


class VerifySettings(Logged):
    """Settings of `verify`."""

    source: str
    """JSONL file, or address of a running server (http://127.0.0.1:8000); may be given first."""
    openai: OpenAIConfig = OpenAIConfig()
    model: str | None = None
    """Model to start an engine for (a name in `engine.models_file`, a folder, a name on the hub),
    or "sim" for groups of the simulated engine; unset: the engine at `openai.base_url`.
    """
    engine: EngineConfig = EngineConfig()
    tolerance: FiniteAmount = 1e-4
    """Largest difference of a logprob that passes. In float32 on a CPU, vLLM returns exactly the
    same numbers for rows of up to about 480 tokens; longer rows differ by 1e-5 because sums are
    computed in another order. On a GPU kernels and batches differ: set what you accept as rounding,
    such as 0.05. With 0 only exactly equal logprobs pass. Their number is always shown.
    """
    policy_version: int | None = Field(default=None, ge=-1)
    """Policy version that the engine serves now: only rows sampled by it are compared. Unset: the
    newest version in the file, or the one published at the server.
    """
    digests: bool = True
    """Check that no group of the file was changed, removed or moved; false for an excerpt."""
    sample: str | None = None
    """Compare only a share of the rows (1% or 0.01), or a number of them (20); unset: all."""
    seed: int = 0
    """Seed of the sample of rows."""
    concurrency: Count = 1
    """Maximum number of requests to the engine at a time. More are faster, but results computed in
    one batch with others may differ in their last digits.
    """
    as_json: bool = False
    """Print the report as one JSON object."""
    log_level: LogLevel = "warning"


class RunSettings(Settings):
    out: Path | None = None
    """File for the trajectory (also -o); unset: runs/ENVIRONMENT_TASK.traj.json."""
    include_tokens: bool = False
    """Include the training rows (tokens, masks, logprobs)."""
    task: str | None = None
    """Id of a task of the environment to run instead of a question; its reward is shown."""
    debug: bool = False
    """Run the environment in this process: `breakpoint()` works in `tasks`, `prepare_scoring`,
    `rollout` and `score`, and the traceback of an error is the environment's. No time limit."""
    without_walls: bool = False
    """Let --debug run agents that execute the model's code in their own process: code that the
    model wrote then runs in this process.
    """
    watch: bool = False
    """Run again whenever a file of the environment changes, until Ctrl-C."""
    interactive: bool = False
    """Act as the model: you type its answers and tool calls."""
    verbose: bool = False
    """Show the conversation."""


class CheckSettings(EnvironmentSettings):
    tasks: Count = 50
    """Number of tasks to check with all known and absurd results; all if there are fewer."""
    rows: Natural | None = None
    """Number of rows to check: their gold and near answers, questions and lengths; unset: all of
    your own data (--env.data_path, or --env with rows), up to 100,000, else none beyond `tasks`."""
    plays: Natural = 10
    """Number of tasks to run with each wrong model; 0: none, not even with demonstrations."""
    processes: Count = 2
    """Number of results scored in parallel, each in its own process."""
    evaluation_set: str = ""
    """File, folder or hub:owner/name of an evaluation set, which the environment reads like
    --env.data_path: the rows' questions are looked for in it."""
    evaluation_split: Split = "test"
    """Split of the evaluation set."""
    tokenizer: str = ""
    """Folder or hub name of the model's tokenizer; unset: lengths in tokens are an estimate."""
    context_tokens: Count | None = None
    """The engine's context window in tokens, which lengths are compared with."""
    as_json: bool = False
    """Print the report as one JSON object."""
    markdown: bool = False
    """Print the report as one page in Markdown."""
    card: bool = False
    """Print only the score card in Markdown, for the README of the environment."""
    sandbox: SandboxConfig = SandboxConfig()
    workers: WorkersConfig = WorkersConfig()
    judge: JudgeConfig = JudgeConfig()


class JoinSettings(Settings):
    for_training: ClassVar[bool] = True

    url: str = ""
    """URL of the server: http://host:8000; several equal servers: separate with commas. Can be
    given as the first argument."""
    token: SecretStr = SecretStr("")
    """Access token for the server, with the role `environment`."""
    ca_certs: Path | None = None
    """CA certificates (PEM) that verify the server, for https; unset: those of this machine."""
    certfile: Path | None = None
    """Client certificate with its key (PEM), if the server requires one."""
    dealt: bool = False
    """Run the groups that the server assigns one by one (`process --ray`), not an own stream."""
    name: str | None = Field(default=None, pattern=NAME_PATTERN)
    """Name of this runner, unique on the server; unset: environment@host, with -2, -3, ... for
    others in the same folder."""
    instance: SecretStr = SecretStr("")
    """Secret of this runner, if something other than its folder stores it (ENVSERVER_INSTANCE):
    with the same name and secret it takes its name over at once, on whatever machine it starts
    again; at least 16 characters. Unset: made here, and kept in `joined_folder`."""
    joined_folder: Path = Path("data/joined")
    """Folder where the runners of this machine keep their identity, to continue after a restart."""
    weight: Positive = 1.0
    """Share of the groups, relative to the weights of the server's other environments."""
    minimum_share: Share = 0.0
    """Minimum share of all groups, whatever the weights."""

    @field_validator("instance")
    @classmethod
    def _is_no_guess(cls, value: SecretStr) -> SecretStr:
        if value and not 16 <= len(value.get_secret_value()) <= 128:
            raise ValueError("must have 16 to 128 characters")
        return value

    @field_validator("url")
    @classmethod
    def _address(cls, value: str) -> str:
        urls = [url.rstrip("/") for url in server_urls(value)] if value else []
        for url in urls:
            check_url(url, "http://host:8000")
        return ",".join(urls)


class SandboxesServeSettings(Logged):
    server: ServerConfig = ServerConfig(port=8100)
    sandbox: SandboxMachineConfig = SandboxMachineConfig()


class RunApiSettings(Logged):
    server: ServerConfig = ServerConfig()
    store: StorePlace = "data/envserver.db"
    """Where groups are stored: a file (SQLite) or a database URL."""
    store_shared: bool = False
    """Share a PostgreSQL store with other servers: one leads, the others pass requests on to it and
    take over when it ends. Also --store.shared."""
    telemetry: TelemetryConfig = TelemetryConfig()
    alarms: AlarmsConfig = AlarmsConfig()
    retention: RetentionConfig = RetentionConfig()
    rollouts: DeliveryConfig = DeliveryConfig()
