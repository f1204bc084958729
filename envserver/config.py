"""The tree of settings: what a person may set, its meaning and its default.

Each field's docstring is its help text. The same names serve flags (`--env.group_size 8`), YAML
files and environment variables (`ENVSERVER_ENV__GROUP_SIZE`); `envserver.cli.settings` reads those
and turns every mistake into a ConfigError that names flag, variable or line.
"""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from envserver_records.records import Split
from pydantic import (
    AfterValidator,
    BaseModel,
    Field,
    SecretStr,
    ValidationInfo,
    field_validator,
    model_validator,
)

from .curriculum_config import SECTION, CurriculumConfig
from .delivery_config import DeliveryConfig

StorePlace = Annotated[str, Field(min_length=1)]
LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["auto", "console", "json"]
Edit = Literal["exact", "appended", "whitespace", "calls"]
Mode = Literal["auto", "tokens", "completions", "chat", "opaque"]
Missing = Literal["shrink", "drop_group"]
Backend = Literal["auto", "vllm", "local"]


def is_loopback(host: str) -> bool:
    """Whether only this machine can connect to `host`."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _loopback(host: str) -> str:
    if not is_loopback(host):
        raise ValueError(
            "must be a loopback address (127.0.0.1, ::1 or localhost) where no access tokens are "
            "asked for (server.tokens_file), so that nobody else may reach the server"
        )
    return host


LoopbackHost = Annotated[str, AfterValidator(_loopback)]


class Section(BaseModel):
    """Base of every part of the tree: unknown names are errors, docstrings are descriptions."""

    model_config = SECTION


class AgentConfig(Section):
    """One of several agents of a rollout: `--env.agents.NAME.*`; unset: as the run has it."""

    model_name: str | None = None
    """Name of its model, on the rollouts' own engine or at `base_url`; "default": the first."""
    base_url: str | None = None
    """Address of an engine of its own: an OpenAI-compatible server."""
    api_key: SecretStr = SecretStr("")
    """Key of its own engine; never logged, written or told to a worker."""
    server_type: Literal["vllm", "openai"] = "vllm"
    """vllm: its own engine gives token ids and logprobs; openai: text only."""
    timeout: float = Field(default=1200.0, gt=0)
    """Seconds for one call of its own engine."""
    temperature: float | None = Field(default=None, ge=0)
    """Sampling temperature of its calls."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """Nucleus sampling of its calls; 1: off."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Its longest single answer in tokens."""
    trained: bool | None = None
    """Whether its tokens are trained; unset: as the environment declares it."""

    @field_validator("base_url")
    @classmethod
    def _address(cls, value: str | None) -> str | None:
        if value is not None:
            value = value.strip().rstrip("/")
            _check_url(value)
        return value


class EnvironmentConfig(Section):
    """Base of every environment's `Config`; its fields are `--env.*`."""

    group_size: int = Field(default=4, ge=1)
    """Rollouts of one task that are compared with each other."""
    total_steps: int | None = Field(default=None, ge=1)
    """Groups before stopping; unset: every task once in `process`, no end in `serve`."""
    split: Split = "train"
    """Which tasks: train, validation or test."""
    seed: int = 0
    """Seed of everything random in the choice and order of tasks."""
    data_path_to_save_groups: Path | None = None
    """JSONL file for the groups; unset: data/<environment>.jsonl."""
    include_messages: bool = True
    """Write the conversations beside the tokens."""
    include_actions: bool = False
    """Write the readable actions of agents beside the tokens."""
    ensure_scores_are_not_same: bool | None = None
    """Drop groups whose rewards are all equal; unset: yes in `serve`, no in `process`."""
    max_token_length: int = Field(default=8192, ge=1)
    """Longest training sequence in tokens; a group with a longer one is dropped and counted."""
    max_turns: int = Field(default=8, ge=1)
    """Model calls per rollout (of each of its agents, where it has several)."""
    max_completion_tokens: int | None = Field(default=None, ge=1)
    """Tokens sampled per rollout, over all calls that are trained; unset: no such limit."""
    worker_timeout: float = Field(default=240.0, gt=0)
    """Seconds of wall clock per rollout, from start to result."""
    score_range: Literal["unit", "pm1"] = "unit"
    """Rewards in Atropos groups as [0, 1] (unit) or mapped to [-1, 1] (pm1)."""
    agents: dict[str, AgentConfig] = {}
    """Models, engines and sampling of single agents, where a rollout has several."""


class OpenAIConfig(Section):
    """The engine: an OpenAI-compatible server, or several replicas of one."""

    base_url: str | list[str] = "http://localhost:9001/v1"
    """Address or addresses (repeat the flag, or separate with commas) of the engine."""
    model_name: str = "default"
    """Name of the model as the engine serves it; "default": the first that it lists."""
    api_key: SecretStr = SecretStr("")
    """Key of the engine; never logged or written."""
    timeout: float = Field(default=1200.0, gt=0)
    """Seconds for one model call."""
    num_max_requests_at_once: int = Field(default=512, ge=1)
    """Most calls in flight per replica; fewer while its metrics say that calls wait there."""
    server_type: Literal["vllm", "openai"] = "vllm"
    """vllm: ask for token ids and logprobs; openai: text only, not fit for RL."""
    mode: Mode = "auto"
    """How the engine is asked; auto: the first of tokens, completions, chat, opaque that it can."""

    @field_validator("base_url")
    @classmethod
    def _addresses(cls, value: str | list[str]) -> str | list[str]:
        parts = [value] if isinstance(value, str) else value
        urls = [url.strip().rstrip("/") for part in parts for url in part.split(",") if url.strip()]
        if not urls:
            raise ValueError("an address is needed, such as http://localhost:9001/v1")
        for url in urls:
            _check_url(url)
        if len(set(urls)) != len(urls):
            raise ValueError("the same address twice")
        return urls[0] if len(urls) == 1 else urls

    @property
    def base_urls(self) -> list[str]:
        """Every replica's address, without a trailing slash; at least one."""
        return [self.base_url] if isinstance(self.base_url, str) else self.base_url


def _check_url(url: str) -> None:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("an address must look like http://host:port/v1")
    try:
        _ = parts.port
    except ValueError as error:
        raise ValueError("the port must be a number from 0 to 65535") from error
    if parts.query or parts.fragment:
        raise ValueError("an address must not have a query or a fragment")


class EngineConfig(Section):
    """An engine that is started here: `models start NAME`, and `--model NAME` elsewhere."""

    models_file: Path = Path("configs/models.yaml")
    """Where models have their names."""
    backend: Backend | None = None
    """vllm, local, or auto: vLLM where it is installed and comes up, else local; unset: as the
    model's entry says."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port of the engine; 0 takes a free one."""
    vllm_python: Path | None = None
    """The Python that has vLLM; unset: the one that envserver runs in."""
    vllm_args: list[str] = []
    """Further words for vLLM's command line."""
    local_args: list[str] = []
    """Further words for the local engine's command line."""
    start_seconds: float = Field(default=900.0, gt=0)
    """For the engine to answer; then it is given up."""
    restarts: int = Field(default=5, ge=0)
    """In a row, of an engine that dies; then it is given up."""
    log: Path | None = None
    """What the engine writes; unset: data/engine-NAME.log."""


class TokensConfig(Section):
    """How calls are continued token by token, and what is done about odd ones."""

    stitch: bool = True
    """Continue a conversation from the tokens that were recorded instead of rendering it anew."""
    tokenizer: Path | None = None
    """Folder of the model's tokenizer.json and chat template; unset: found by the model's name."""
    edits: list[Edit] = ["exact", "appended", "whitespace", "calls"]
    """How an agent may have changed an answer that it sends back for its tokens to be continued."""
    think: Literal["template", "keep"] = "template"
    """Where the chat template drops earlier reasoning: begin a new sequence that lacks it, as after
    deployment (template), or go on in one sequence that has it all (keep)."""
    train: list[str] = []
    """Flags whose calls are trained, whatever the default says."""
    mask: list[str] = []
    """Flags whose calls become context that is not trained."""
    drop: list[str] = []
    """Flags that drop the rollout."""
    audit_fraction: float = Field(default=0.0, ge=0, le=1)
    """`serve`: share of the rollouts whose logprobs the engine is asked for again, as a check."""
    audit_tolerance: float = Field(default=0.05, ge=0)
    """Largest difference of a logprob that an audit takes for rounding."""
    keep_calls: bool = False
    """Keep every call (its tokens as differences) beside the sequences of a trajectory."""


class SimConfig(Section):
    """The simulated engine (`--model sim`): for tests, load and demos; it is no language model."""

    seed: int = 0
    """Same seed, same requests: same answers."""
    solve_probability: float = Field(default=0.6, ge=0, le=1)
    """Chance that a rollout's task is answered right."""
    openers: bool = True
    """Whether up to three sentences of no meaning stand before an answer."""
    latency_seconds: float = Field(default=0.02, ge=0)
    """Seconds until the first token."""
    seconds_per_token: float = Field(default=0.0, ge=0)
    """Seconds between tokens."""
    error_rate: float = Field(default=0.0, ge=0, le=1)
    """Chance that a call answers HTTP 500."""
    truncate_rate: float = Field(default=0.0, ge=0, le=1)
    """Chance that an answer ends by length before its end."""
    disconnect_rate: float = Field(default=0.0, ge=0, le=1)
    """Chance that the connection breaks in the middle of an answer (over HTTP)."""


class SamplingConfig(Section):
    """How every call is sampled, whatever the agent asks for."""

    temperature: float = Field(default=1.0, ge=0)
    """Sampling temperature."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling; 1: off."""
    max_tokens: int = Field(default=1024, ge=1)
    """Longest single answer in tokens; an agent may ask for less."""


class WorkersConfig(Section):
    """The isolated processes in which agents run."""

    processes: int = Field(default=2, ge=1)
    """Warm processes of the `pooled` level."""
    rollouts_per_process: int = Field(default=32, ge=1)
    """Rollouts at a time in one `pooled` process."""
    dedicated: int = Field(default=8, ge=1)
    """Rollouts at a time at the `dedicated` level, each in a process of its own."""
    heartbeat_seconds: float = Field(default=1.0, gt=0)
    """A worker that says nothing for this long is killed and replaced."""
    memory_mb: int = Field(default=2048, ge=64)
    """Of a worker behind a wall, with all that it starts (isolation "sandboxed")."""
    disk_mb: int = Field(default=256, ge=1)
    """That a worker behind a wall may write."""
    kill_grace_seconds: float = Field(default=2.0, ge=0)
    """Between a rollout's deadline, when it is cancelled, and the kill of its process tree."""


class SandboxConfig(Section):
    """Where the programs run that a model wrote: `--sandbox.*`."""

    wall: Literal["auto", "bubblewrap", "namespace", "landlock", "docker", "unsafe-local"] = "auto"
    """auto: the first of bubblewrap, namespace, landlock that works here (`envserver doctor`)."""
    concurrent: int = Field(default=32, ge=1)
    """Sandboxes at a time; more wait."""
    docker_image: str = ""
    """Image for the wall `docker`, where no other is named; it needs python3, bash and git."""


class RolloutsConfig(DeliveryConfig):
    """Which rollouts run when."""

    max_concurrent: int = Field(default=64, ge=1)
    """Rollouts in flight."""
    max_attempts: int = Field(default=3, ge=1)
    """Tries per rollout when a failure is not the model's fault."""
    min_group_size: int | None = Field(default=None, ge=1)
    """Smallest group worth delivering when rollouts were lost; unset: only whole groups."""
    failed_in_group: Missing = "shrink"
    """A rollout that failed for good and not by the model's fault: leave it out of the group (which
    `min_group_size` bounds), or drop the group. What the model is to blame for is always scored."""
    late_in_group: Missing = "shrink"
    """The same for stragglers and stale rollouts. Those are long ones: left out, the rest is biased
    towards short ones."""
    stragglers: Literal["cancel", "wait"] = "cancel"
    """Cancel what is not done when its group's time is over, or wait for every rollout's end."""
    group_timeout_seconds: float = Field(default=1800.0, gt=0)
    """Seconds from a group's first rollout; then its stragglers are cancelled."""
    straggler_grace_seconds: float | None = Field(default=None, ge=0)
    """Seconds that the rest of a group has from when `min_group_size` of it are scored; unset:
    until the group's time is over."""
    max_staleness: int | None = Field(default=None, ge=0)
    """Policy versions that the first token of a rollout in flight may be behind; unset: any."""
    stale_rollouts: Literal["cancel", "finish"] = "cancel"
    """What becomes of older ones when a version is published: cancelled, or left to their end."""
    stop_after_failed_groups: int = Field(default=8, ge=1)
    """Groups that fail in a row before `process` stops with an error (`serve` waits instead)."""
    stop_after_dropped_groups: int = Field(default=200, ge=1)
    """Groups in a row that were filtered or failed before `process` stops with an error."""
    scorer_processes: int = Field(default=1, ge=1)
    """Processes that score."""

    @model_validator(mode="after")
    def _grace_needs_a_least_size(self) -> RolloutsConfig:
        if self.straggler_grace_seconds is None:
            return self
        if self.min_group_size is None or self.stragglers == "wait":
            raise ValueError(
                "straggler_grace_seconds is for groups that may lack rollouts: "
                'set min_group_size, and stragglers "cancel"'
            )
        return self


class Quota(Section):
    """What one access token may ask for: `--server.quota.*`; nothing is bounded where unset."""

    requests_per_second: float | None = Field(default=1000.0, gt=0)
    """Requests, over time."""
    burst: int = Field(default=2000, ge=1)
    """Requests at once, before `requests_per_second` counts."""
    megabytes_per_minute: float | None = Field(default=None, gt=0)
    """Bodies in both directions, as they travel; a minute's worth may come at once."""
    open_streams: int | None = Field(default=64, ge=0)
    """Streams of leases at a time."""


class RetentionConfig(Section):
    """How long the store keeps what was delivered. What waits for a trainer is always kept."""

    acked_hours: float = Field(default=24.0, ge=0)
    """Hours after which a group that every run has acknowledged is removed but for its id; what a
    run acknowledged since its last but one checkpoint is kept."""
    max_gb: float | None = Field(default=None, gt=0)
    """While all groups take more than so many GB, such groups go earlier; unset: no limit."""


class ServerConfig(Section):
    """The HTTP server for trainers and people."""

    tokens_file: Path | None = None
    """Access tokens that `envserver token` made; unset: everybody on this machine may do all."""
    host: str = "127.0.0.1"
    """Address to listen at; beyond loopback only with `tokens_file`."""
    port: int = Field(default=8000, ge=0, le=65535)
    """Port; 0 takes a free one."""
    max_body_bytes: int = Field(default=256 * 1024 * 1024, ge=1024)
    """Largest request body, after inflating."""
    lease_seconds: float = Field(default=600.0, gt=0)
    """A leased batch that is not acknowledged for this long is delivered again."""
    max_open_leases: int = Field(default=1024, ge=1)
    """Leases of a run that are not acknowledged, for trainers that ask for them; then 429."""
    silent_after_seconds: float = Field(default=30.0, gt=0)
    """An environment elsewhere, silent for longer, no longer counts: others get its room."""
    drain_seconds: float = Field(default=60.0, ge=0)
    """`serve`, told to stop: seconds for the open groups to end; then they are cancelled."""
    allowed_hosts: list[str] = []
    """Further names that requests may call the server by, where there are no access tokens."""
    quota: Quota = Quota()
    max_connections: int = Field(default=4096, ge=1)
    """Connections at a time; more are answered 503 and closed."""
    max_header_bytes: int = Field(default=65536, ge=1024)
    """Of a request's line and headers together."""
    max_headers: int = Field(default=100, ge=8)
    """Headers of a request."""
    max_url_bytes: int = Field(default=8192, ge=256)
    """Path and query of a request."""
    header_seconds: float = Field(default=20.0, gt=0)
    """For a connection's next request to say all its headers, once it began; then 408."""
    body_idle_seconds: float = Field(default=30.0, gt=0)
    """A body of which nothing more comes for so long is given up; 408."""
    body_seconds: float = Field(default=600.0, gt=0)
    """For a whole body; then 408."""
    ssl_certfile: Path | None = None
    """Certificate chain (PEM); with it the server speaks HTTPS."""
    ssl_keyfile: Path | None = None
    """Key of the certificate; unset: it is in the same file."""
    ssl_keyfile_password: SecretStr | None = None
    """Password of the key; never logged or written."""
    ssl_ca_certs: Path | None = None
    """Authorities (PEM) whose certificates clients may have."""
    ssl_cert_reqs: Literal["none", "optional", "required"] = "none"
    """Whether clients must have a certificate of `ssl_ca_certs`."""

    @field_validator("host")
    @classmethod
    def _who_may_connect(cls, host: str, info: ValidationInfo) -> str:
        return host if info.data.get("tokens_file") is not None else _loopback(host)

    @model_validator(mode="after")
    def _certificates_fit(self) -> ServerConfig:
        if self.ssl_certfile is None and (self.ssl_keyfile or self.ssl_ca_certs):
            raise ValueError("ssl_keyfile and ssl_ca_certs need an ssl_certfile")
        if self.ssl_cert_reqs != "none" and self.ssl_ca_certs is None:
            raise ValueError(f"ssl_cert_reqs {self.ssl_cert_reqs!r} needs ssl_ca_certs")
        return self


class TelemetryConfig(Section):
    """What is seen of a running server: `--telemetry.*`."""

    otlp_endpoint: str | None = None
    """Where traces go by OTLP over HTTP, such as http://localhost:4318; unset: nowhere."""
    service_name: str = "envserver"
    """The server's name in traces."""
    sample_ratio: float = Field(default=1.0, ge=0, le=1)
    """Share of the rollouts that are traced."""
    slow_callback_seconds: float | None = Field(default=None, gt=0)
    """Log where the event loop stands when it is held for longer; unset: nothing is looked for."""


class EnvironmentSettings(Section):
    """What every command with an environment has; `env` gets the type of its own Config."""

    environment: str | None = None
    """A built-in's name, an entry point's, or path/to/file.py[:Class]."""
    log_level: LogLevel = "info"
    """Least serious event that is logged."""
    log_format: LogFormat = "auto"
    """How a log line looks; auto: console on a terminal, else json."""
    env: EnvironmentConfig = EnvironmentConfig()


class Settings(EnvironmentSettings):
    """All that can be set for making rollouts."""

    openai: OpenAIConfig = OpenAIConfig()
    model: str | None = None
    """A model to start an engine for (a name in `engine.models_file`, a folder, a name on the
    hub), or "sim" for the simulated engine; unset: the engine at `openai.base_url`."""
    engine: EngineConfig = EngineConfig()
    sim: SimConfig = SimConfig()
    sampling: SamplingConfig = SamplingConfig()
    tokens: TokensConfig = TokensConfig()
    workers: WorkersConfig = WorkersConfig()
    sandbox: SandboxConfig = SandboxConfig()
    rollouts: RolloutsConfig = RolloutsConfig()
    curriculum: CurriculumConfig = CurriculumConfig()
    server: ServerConfig = ServerConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
    retention: RetentionConfig = RetentionConfig()
    store: StorePlace = "data/envserver.db"
    """Where groups are kept: a file (SQLite) or a database URL."""


class MixEntry(Section):
    """One environment of several in a run."""

    name: str
    """A built-in's name, an entry point's, or path/to/file.py[:Class]."""
    weight: float = Field(default=1.0, gt=0)
    """Its part of the groups, in proportion to the others' weights."""
    minimum_share: float = Field(default=0.0, ge=0, le=1)
    """The least part of all groups that it has, whatever the weights say."""
    env: dict[str, Any] = {}
    """Its own settings, stronger than `env` of the file."""

    @model_validator(mode="before")
    @classmethod
    def _named(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value


class MixSettings(Settings):
    """Settings of a command that can run several environments at once."""

    environments: list[MixEntry] = []
    """Several environments at once: in a file with name, weight, minimum_share, env; by a flag
    `--env math=2,code=1`."""
    total_groups: int | None = Field(default=None, ge=1)
    """Groups of all environments together before stopping; unset: each ends by itself."""
