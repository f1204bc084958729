"""The settings: their names, meanings and defaults.

Each field's docstring is its help text. The same names work as flags (`--env.group_size 8`), YAML
keys and environment variables (`ENVSERVER_ENV__GROUP_SIZE`). `envserver.cli` reads them
and reports every mistake as a ConfigError that names the flag, variable or line.
"""

from __future__ import annotations

import ipaddress
import re
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal
from urllib.parse import urlsplit

from envserver_records.tracking import TrackerName
from pydantic import Field, SecretStr, field_validator, model_validator

from .runs import CurriculumConfig, HarnessConfig, JudgeConfig, RayConfig, TrackingConfig
from .section import (
    Amount,
    ApiKey,
    Count,
    EnvironmentConfig,
    FiniteAmount,
    Natural,
    Port,
    Positive,
    PositiveShare,
    Section,
    Share,
    check_url,
)
from .server import AlarmsConfig, DeliveryConfig, RetentionConfig, ServerConfig, TelemetryConfig

_NAME = re.compile(r"(\*\.)?[a-z0-9_]([a-z0-9._-]{0,252}[a-z0-9_])?", re.IGNORECASE)


class EnginesConfig(Section):
    """Engines besides those of `openai.base_url`: registered by POST /v1/engines, or discovered."""

    routing: Literal["prefix", "least"] = "prefix"
    """Engine of a new rollout: by a hash of its id (prefix), or the one with the fewest calls
    (least). All calls of a rollout go to one engine, which has its prefix cached."""
    max_version_lag: Natural = 0
    """Policy versions that the weights of an engine may be behind the published one; an engine
    further behind gets no calls until it is current."""
    file: Path | None = None
    """Watched file that lists engines: an address per line, or a JSON object with `url` and
    `version`."""
    poll_seconds: Positive = 5.0
    """Seconds between reads of `file`."""
    from_server: bool | None = None
    """Use the engines that the server calls (only `join`); unset: if `openai.base_url` is none."""
    allow: list[str] = []
    """Hosts at which engines may be registered: gpu1,*.gpu.local,10.0.0.0/8. Only these get
    `openai.api_key`. Unset: all except this machine (with access tokens) and the addresses of cloud
    services; none gets the key."""

    @field_validator("allow")
    @classmethod
    def _hosts(cls, value: list[str]) -> list[str]:
        for host in value:
            try:
                ipaddress.ip_network(host, strict=False)
            except ValueError:
                if _NAME.fullmatch(host) is None:
                    raise ValueError(
                        f"{host[:100]!r} is not a name, *.name, or a network such as 10.0.0.0/8"
                    ) from None
        return value


class PricesConfig(Section):
    """Prices of tokens; without any, no cost is recorded or shown."""

    prompt: FiniteAmount | None = None
    """Price of a million prompt tokens; needs `prices.completion`."""
    completion: FiniteAmount | None = None
    """Price of a million completion tokens."""
    currency: str = "USD"
    """Currency of all prices."""
    file: Path | None = None
    """YAML file `MODEL: {prompt: 0.15, completion: 0.6}`; unset: `prompt_price` and
    `completion_price` of the model's entry in `engine.models_file`."""

    @model_validator(mode="after")
    def _go_together(self) -> PricesConfig:
        if (self.prompt is None) != (self.completion is None):
            raise ValueError("prompt and completion go together")
        return self


Edit = Literal["exact", "appended", "whitespace", "calls"]


class TokensConfig(Section):
    """How calls are continued token by token, and which calls are trained."""

    stitch: bool = True
    """Continue a conversation from its recorded tokens instead of rendering it again."""
    tokenizer: Path | None = None
    """Folder of the model's tokenizer.json and chat template; unset: found by the model's name."""
    edits: list[Edit] = ["exact", "appended", "whitespace", "calls"]
    """Changes that an agent may make to an answer it sends back without losing its tokens."""
    think: Literal["template", "keep"] = "template"
    """If the chat template removes earlier reasoning: start a new sequence without it, as in
    deployment (template), or continue one sequence that keeps all of it (keep)."""
    train: list[str] = []
    """Flags whose calls are trained, overriding the default."""
    mask: list[str] = []
    """Flags whose calls become untrained context."""
    drop: list[str] = []
    """Flags that drop the rollout."""
    max_untrained_share: Share = 0.1
    """Largest share of the sampled tokens that flags may mask or drop. Above it, `serve` offers no
    further group with a larger share, and `process` ends with an error; 1: no limit."""
    untrained_window_groups: Count = 8
    """Number of latest groups over which this share is computed."""
    constraints: Literal["none", "forms", "all"] = "forms"
    """How agents may constrain what is sampled: not at all (none), by response_format, tool_choice
    and strict tools (forms), or also by logit_bias, structured_outputs and the like (all)."""
    strict_tools: Literal["drop", "keep"] = "drop"
    """`strict` of tools that an agent may call, which many SDKs send by default: drop it before a
    trained call, so that its tokens are the model's own; or keep it, and mask the call."""
    extra_fields: list[str] = []
    """Further request fields that agents may pass to the engine, unchecked."""
    max_media: Natural = 256
    """Maximum images, audio and videos in one request of an agent."""
    max_medium_mb: Positive = 20
    """Maximum size of each of them, in MB of 2**20 bytes."""
    max_media_mb: Positive = 40
    """Maximum size of all of them in one request together."""
    max_image_megapixels: Positive = 100
    """Maximum width times height of an image, in millions: the engine takes memory for each."""
    max_images_megapixels: Positive = 400
    """The same for all images of one request together."""
    audit_fraction: Share = 0.0
    """`serve`: share of the rollouts whose logprobs the engine computes again, as a check."""
    audit_tolerance: Amount = 0.05
    """Largest logprob difference that an audit accepts as rounding."""
    experts: bool = False
    """Record which experts of a mixture-of-experts model each token went through, for trainers that
    replay them. The engine must give them: vLLM with --enable-return-routed-experts."""
    keep_calls: bool = False
    """Store every call (tokens as differences) with the sequences of a trajectory."""


StorePlace = Annotated[str, Field(min_length=1)]
LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["auto", "console", "json"]
Mode = Literal["auto", "tokens", "completions", "chat", "opaque"]
Missing = Literal["shrink", "drop_group"]
Backend = Literal["auto", "vllm", "local"]
NO_ENGINE = "none"
"""`openai.base_url` of a server whose engines are registered or discovered."""


class OpenAIConfig(Section):
    """The engine: an OpenAI-compatible server, or several replicas of it."""

    base_url: str | list[str] = "http://localhost:9001/v1"
    """Address of the engine; several replicas: repeat the flag or separate with commas. none:
    engines are registered or discovered (`engines`)."""
    model_name: str = "default"
    """Name of the model on the engine; "default": the first one listed."""
    api_key: ApiKey = SecretStr("")
    """API key of the engine; never logged or written."""
    timeout: Positive = 1200.0
    """Timeout in seconds of one model call."""
    num_max_requests_at_once: Count = 512
    """Maximum calls in flight per replica; reduced while its metrics report waiting calls."""
    server_type: Literal["vllm", "openai"] = "vllm"
    """vllm: requests token ids and logprobs; openai: text only, unsuitable for RL."""
    mode: Mode = "auto"
    """Request mode; auto: the first supported of tokens, completions, chat, opaque."""
    default_template_kwargs: dict[str, Any] | None = None
    """Variables that the engine gives to every chat template (vLLM's
    `--default-chat-template-kwargs`); unset: found by comparing prompts."""

    @field_validator("base_url")
    @classmethod
    def _addresses(cls, value: str | list[str]) -> str | list[str]:
        parts = [value] if isinstance(value, str) else value
        urls = [url.strip().rstrip("/") for part in parts for url in part.split(",") if url.strip()]
        if urls == [NO_ENGINE]:
            return NO_ENGINE
        if not urls:
            raise ValueError("needs an address, such as http://localhost:9001/v1")
        for url in urls:
            check_url(url)
        if len(set(urls)) != len(urls):
            raise ValueError("the same address is given twice")
        return urls[0] if len(urls) == 1 else urls

    @property
    def base_urls(self) -> list[str]:
        """Addresses of all replicas, without trailing slash; none if engines come later."""
        if self.base_url == NO_ENGINE:
            return []
        return [self.base_url] if isinstance(self.base_url, str) else self.base_url


class EngineConfig(Section):
    """An engine that envserver starts itself: `models start NAME`, or `--model NAME` of other
    commands."""

    models_file: Path = Path("configs/models.yaml")
    """File that defines models by name."""
    backend: Backend | None = None
    """vllm, local, or auto (vLLM if it starts, otherwise local); unset: as in the model's entry."""
    port: Port = 0
    """Port of the engine; 0 picks a free one."""
    vllm_python: Path | None = None
    """Python interpreter that has vLLM; unset: the one that runs envserver."""
    vllm_args: list[str] = []
    """Extra arguments for vLLM's command line."""
    local_args: list[str] = []
    """Extra arguments for the local engine's command line."""
    start_seconds: Positive = 900.0
    """Start-up timeout of the engine, in seconds."""
    restarts: Natural = 5
    """Consecutive restarts of a crashing engine before giving up."""
    log: Path | None = None
    """Log file of the engine; unset: data/engine-NAME.log."""


class SimConfig(Section):
    """The simulated engine (`--model sim`), for tests, load and demos; not a language model."""

    seed: int = 0
    """Seed; the same seed and requests give the same answers."""
    context_tokens: int = Field(default=131_072, ge=1024, le=262_144)
    """Maximum tokens of a prompt and its answer together; coding programs begin with 13,000 to
    40,000."""
    solve_probability: Share = 0.6
    """Probability that a rollout solves its task."""
    openers: bool = True
    """Put up to three meaningless sentences before an answer, unless the environment declares that
    its demonstrations are replayed exactly."""
    refusal_rate: Share = 0.0
    """Probability that an answer is a refusal."""
    repetition_rate: Share = 0.0
    """Probability that an answer repeats itself until the limit of the request."""
    malformed_call_rate: Share = 0.0
    """Probability that a tool call is malformed: cut off, of an unknown tool, or with arguments
    that the tool does not take."""
    broken_json_rate: Share = 0.0
    """Probability that an answer in JSON is not valid JSON."""
    transcript: Path | None = None
    """File of recorded conversations whose answers are replayed, instead of demonstrations:
    a file of `process` or `run`, or JSONL with `messages`. The settings above do not apply then."""
    latency_seconds: Amount = 0.02
    """Seconds until the first token."""
    seconds_per_token: Amount = 0.0
    """Seconds per token."""
    error_rate: Share = 0.0
    """Probability that a call returns HTTP 500."""
    truncate_rate: Share = 0.0
    """Probability that an answer is truncated (finish reason length)."""
    disconnect_rate: Share = 0.0
    """Probability that the connection breaks in the middle of an answer (over HTTP)."""


class SamplingConfig(Section):
    """Sampling of every call, whatever the agent requests."""

    temperature: Amount = 1.0
    """Sampling temperature."""
    top_p: PositiveShare = 1.0
    """Nucleus sampling; 1: off."""
    max_tokens: Count = 1024
    """Maximum length of one answer, in tokens; an agent may request less."""


class WorkersConfig(Section):
    """The isolated processes that agents run in."""

    processes: Count = 2
    """Number of processes that environments with isolation `pooled` share."""
    rollouts_per_process: Count = 32
    """Concurrent rollouts per `pooled` process."""
    dedicated: Count = 8
    """Concurrent rollouts with isolation `dedicated`, each in its own process."""
    heartbeat_seconds: Positive = 1.0
    """Kill and replace a worker that sends no heartbeat for this many seconds."""
    memory_mb: int = Field(default=2048, ge=64)
    """Memory limit of a sandboxed worker and its child processes, in MB. If the kernel kills
    another worker for lack of memory, it is at fault if it held more, else the machine."""
    disk_mb: Count = 256
    """Disk limit of a sandboxed worker, in MB."""
    kill_grace_seconds: Amount = 2.0
    """Seconds between cancelling a rollout at its deadline and killing its process tree."""
    max_connections: int = Field(default=64, ge=2)
    """Maximum connections of one rollout to the proxy; then the longest unused one is closed."""
    max_request_mb: float = Field(default=128, ge=1)
    """Megabytes of requests of one rollout that the proxy holds at a time; then HTTP 429."""
    max_requests_per_second: Positive = 100
    """Average requests of one rollout to the proxy per second, ten seconds' worth at once; further
    ones wait for a moment, then get HTTP 429."""
    max_recorded_mb: float = Field(default=64, ge=1)
    """Megabytes that the requests of one rollout may take in its record, in which repeated content
    counts once; all rollouts together may have 32 times as much. More is refused (limit record)."""
    max_egress_requests: Natural = 200
    """Maximum requests of one rollout to hosts that its environment lists (`egress`)."""
    max_egress_mb: Amount = 64
    """Megabytes to and from such hosts, all requests of one rollout together."""


class LocalSandboxConfig(Section):
    """The sandboxes of this machine."""

    backend: Literal["auto", "bubblewrap", "namespace", "landlock", "docker", "unsafe-local"] = (
        "auto"
    )
    """auto: the first of bubblewrap, namespace, landlock that works here (`envserver doctor`)."""
    concurrent: Count = 32
    """Maximum concurrent sandboxes; further requests wait."""
    warm: int = Field(default=2, ge=2)
    """Maximum sandboxes kept ready for each list of preloaded modules: 2, up to this number while
    more are requested at once, but never more than half of `concurrent`."""
    docker_image: str = ""
    """Default image of the backend `docker`; it needs python3, bash and git."""
    docker_pull: Literal["never", "missing"] = "never"
    """Whether images that the container engine lacks are pulled (missing) or refused (never)."""
    docker_warm: Natural = 2
    """Containers kept started in advance for each image (and limits) in use; 0: none. All images
    together have at most `concurrent`."""
    docker_starts: Count = 4
    """Maximum containers being started at the same time."""
    docker_starts_per_second: Positive = 10.0
    """Maximum container starts per second."""


class SandboxConfig(LocalSandboxConfig):
    """The sandboxes that run programs written by a model: `--sandbox.*`."""

    remote: str = ""
    """URLs of machines that run `envserver sandboxes serve`, separated by commas: programs run
    there instead of here, on the machine with the most free capacity."""
    remote_token: SecretStr = SecretStr("")
    """Access token of these machines, with the role `environment`; never logged or written."""
    remote_token_file: Path | None = None
    """File that holds this token, instead."""
    remote_ca_certs: Path | None = None
    """CA certificates (PEM) that verify these machines, for https; unset: those of this machine."""
    remote_certfile: Path | None = None
    """Client certificate with its key (PEM), if these machines require one."""

    maker: str | None = Field(default=None, pattern=r"^.+:\w+$")
    """Class that makes the sandboxes instead, for example in a cloud: package.module:Class or
    path/to/file.py:Class (docs/sandboxes.md)."""

    @model_validator(mode="after")
    def _one_source(self) -> SandboxConfig:
        if self.remote and self.maker:
            raise ValueError("sandboxes come from `remote` or from `maker`, not from both")
        return self

    @property
    def remote_urls(self) -> tuple[str, ...]:
        """The machines in `remote`."""
        return tuple(self.remote.split(",")) if self.remote else ()

    @field_validator("remote")
    @classmethod
    def _addresses(cls, value: str) -> str:
        urls = [url.strip().rstrip("/") for url in value.split(",") if url.strip()]
        for url in urls:
            check_url(url, "http://host:8100")
            if urlsplit(url).username:
                raise ValueError("an address must not have a user name")
        return ",".join(dict.fromkeys(urls))


class SandboxMachineConfig(LocalSandboxConfig):
    """The sandboxes that a machine makes for others: `--sandbox.*` of `sandboxes serve`."""

    concurrent: Count = 64
    """Maximum concurrent sandboxes of all clients together; further requests wait in order."""
    warm: int = Field(default=16, ge=2)
    """Maximum sandboxes kept ready for each list of preloaded modules: 2, up to this number while
    more are requested at once, but never more than half of `concurrent`."""
    room: Count | None = None
    """Maximum programs that run at a time, further ones wait in order; unset: one in each sandbox.
    Interactive programs, such as MCP servers, do not count."""
    max_memory_mb: Count = 8192
    """Largest memory limit, in MB, that a client may request; larger requests are refused, as
    with the other limits."""
    max_disk_mb: Count = 4096
    """Largest disk limit, in MB, that a client may request."""
    max_processes: Count = 1024
    """Largest number of processes that a client may request."""
    max_wall_seconds: Positive = 3600.0
    """Longest time of one program, in seconds, that a client may request."""
    max_cpu_seconds: Positive = 3600.0
    """Most CPU time of one program, in seconds, that a client may request."""


class RolloutsConfig(DeliveryConfig):
    """Scheduling of rollouts: concurrency, retries, groups and staleness."""

    max_concurrent: Count = 64
    """Maximum rollouts in flight."""
    max_attempts: Count = 3
    """Attempts per rollout if failures are not the model's fault."""
    worker_deaths: Count | None = 2
    """Attempts in which a rollout ends or blocks its worker, alone in it and after the model's
    first answer, until it is scored as it is (limit `crash`); at most `max_attempts`. null: it is
    retried, then lost. A sandboxed rollout is scored the first time."""
    min_group_size: Count | None = None
    """Minimum size of a delivered group when rollouts were lost; unset: only complete groups."""
    failed_in_group: Missing = "shrink"
    """If a rollout fails for good, not by the model's fault: shrink the group without it (down to
    `min_group_size`) or drop the group. Failures that are the model's fault are always scored."""
    late_in_group: Missing = "shrink"
    """The same for stragglers and stale rollouts; groups without them favour short rollouts."""
    stragglers: Literal["cancel", "wait"] = "cancel"
    """At the end of the group's time: cancel unfinished rollouts, or wait for all of them."""
    group_timeout_seconds: Positive = 1800.0
    """Seconds from a group's first rollout until its stragglers are cancelled."""
    straggler_grace_seconds: Amount | None = None
    """Seconds for the rest of a group once `min_group_size` are scored; unset: all of its time."""
    too_long: Literal["end", "drop_group"] = "end"
    """At `env.max_token_length`: cut answers to what fits, end the rollout when nothing does (limit
    `context`) and score it; or let it go on and drop its group."""
    max_staleness: Natural | None = None
    """Maximum policy versions between a running rollout's first token and now; unset: no limit."""
    stale_rollouts: Literal["cancel", "finish"] = "cancel"
    """What to do with staler rollouts when a version is published: cancel or let them finish."""
    stop_after_failed_groups: Count = 8
    """Consecutive failed groups before `process` stops with an error (`serve` waits instead); it
    also stops when that many first groups are all too long."""
    stop_after_dropped_groups: Count = 200
    """Consecutive filtered or failed groups before `process` stops with an error."""
    scorer_processes: Count = 1
    """Number of scorer processes; with a judge at least 8, each of which may wait for an answer."""

    @model_validator(mode="after")
    def _grace_needs_a_least_size(self) -> RolloutsConfig:
        if self.straggler_grace_seconds is None:
            return self
        if self.min_group_size is None or self.stragglers == "wait":
            raise ValueError(
                "straggler_grace_seconds works only for groups that may shrink: "
                'set min_group_size, and stragglers "cancel"'
            )
        return self


class Logged(Section):
    """Settings of a command that shows log lines."""

    log_level: LogLevel = "info"
    """Minimum log level."""
    log_format: LogFormat = "auto"
    """Format of log lines; auto: console. json is for log collectors."""


class EnvironmentSettings(Logged):
    """Settings of every command with an environment; `env` gets the type of its Config."""

    environment: str | None = None
    """Name of a built-in or installed environment, path/to/file.py[:Class], a folder, or rows:
    rows.jsonl, hub:owner/name."""
    env: EnvironmentConfig = EnvironmentConfig()


class Settings(EnvironmentSettings):
    """All settings of a command that makes rollouts."""

    for_training: ClassVar[bool] = False
    """Whether trainers get the groups. If so, `temperature` and `top_p` of a model's entry do not
    apply, and what a trainer cannot compute is refused."""
    openai: OpenAIConfig = OpenAIConfig()
    model: str | None = None
    """Model to start an engine for (a name in `engine.models_file`, a folder, or a name on the
    hub), or "sim" for the simulated engine; unset: use the engine at `openai.base_url`."""
    engine: EngineConfig = EngineConfig()
    engines: EnginesConfig = EnginesConfig()
    sim: SimConfig = SimConfig()
    sampling: SamplingConfig = SamplingConfig()
    tokens: TokensConfig = TokensConfig()
    workers: WorkersConfig = WorkersConfig()
    sandbox: SandboxConfig = SandboxConfig()
    agent: HarnessConfig = HarnessConfig()
    judge: JudgeConfig = JudgeConfig()
    prices: PricesConfig = PricesConfig()
    rollouts: RolloutsConfig = RolloutsConfig()
    curriculum: CurriculumConfig = CurriculumConfig()
    server: ServerConfig = ServerConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
    alarms: AlarmsConfig = AlarmsConfig()
    retention: RetentionConfig = RetentionConfig()
    store: StorePlace = "data/envserver.db"
    """Where groups are stored: a file (SQLite) or a database URL."""
    store_shared: bool = False
    """Share a PostgreSQL store with other servers: one leads, the others pass requests on to it and
    take over when it ends. Also --store.shared."""


class MixEntry(Section):
    """One of several environments of a run."""

    name: str
    """Name of a built-in or installed environment, or path/to/file.py[:Class], or a folder."""
    weight: Positive = 1.0
    """Weight of this environment: its share of the groups relative to the others."""
    minimum_share: Share = 0.0
    """Minimum share of all groups, whatever the weights."""
    env: dict[str, Any] = {}
    """Settings of this environment; they override `env` of the file."""

    @model_validator(mode="before")
    @classmethod
    def _named(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value


class MixSettings(Settings):
    """Settings of a command that can run several environments at once."""

    environments: list[MixEntry] = []
    """Several environments at once; in a file: name, weight, minimum_share and env of each; as a
    flag: `--env math=2,code=1`."""
    total_groups: Count | None = None
    """Groups of all environments together before stopping; unset: `env.total_steps`, or each ends
    by itself."""
    track: list[TrackerName] = []
    """Trackers that get metrics and sample rollouts: wandb,trackio,mlflow,tensorboard,jsonl."""
    tracking: TrackingConfig = TrackingConfig()
    ray: RayConfig = RayConfig()
