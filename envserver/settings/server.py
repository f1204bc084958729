"""The HTTP server (`--server.*`), what its store keeps (`--retention.*`), how groups are delivered
(`--delivery.*`), and what is watched (`--telemetry.*`, `--alarms.*`).
"""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    Field,
    SecretStr,
    ValidationInfo,
    field_validator,
    model_validator,
)

from .section import Amount, Count, Natural, Port, Positive, PositiveShare, Section, Share


def is_loopback(host: str) -> bool:
    """Returns whether only this machine can connect to `host`."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _loopback(host: str) -> str:
    if not is_loopback(host):
        raise ValueError(
            "must be a loopback address (127.0.0.1, ::1 or localhost) unless access tokens are "
            "required (server.tokens_file)"
        )
    return host


LoopbackHost = Annotated[str, AfterValidator(_loopback)]

Role = Literal["trainer", "environment", "reader", "admin"]
"""Role of an access token."""


class Quota(Section):
    """Limits of one access token (`--server.quota.*`); unset fields: no limit."""

    requests_per_second: Positive | None = 1000.0
    """Average requests per second."""
    burst: Count = 2000
    """Requests allowed at once, before `requests_per_second` applies."""
    megabytes_per_minute: Positive | None = None
    """Megabytes of bodies per minute, both directions, as transferred; may come in one burst."""
    open_streams: Natural | None = 64
    """Concurrent lease streams."""


class RetentionConfig(Section):
    """How long the store keeps delivered groups. Groups that wait for a trainer are always kept."""

    acked_hours: Amount = 24.0
    """Hours until a group that every run has acknowledged is removed, except for its id. Groups
    acknowledged since a run's second-to-last checkpoint are kept."""
    max_gb: Positive | None = None
    """Remove such groups earlier while all groups take more than this many GB; unset: no limit."""


class ServerConfig(Section):
    """The HTTP server for trainers and people."""

    tokens_file: Path | None = None
    """File of access tokens made by `envserver token`; unset: all local users have full access."""
    host: str = "127.0.0.1"
    """Address to listen on; other than loopback only with `tokens_file`."""
    port: Port = 8000
    """Port; 0 picks a free one."""
    advertise: str | None = Field(default=None, pattern=r"^https?://[^/?#\s]+$")
    """With `store_shared`: address at which the other servers reach this one (http://host:8000);
    unset: `host` and `port`."""
    advertise_ca_certs: Path | None = None
    """CA certificates (PEM) that verify the leading server, if it has HTTPS; unset: those of this
    machine."""
    takeover_seconds: float = Field(default=5.0, ge=1)
    """With `store_shared`: seconds without a sign of life after which the leading server's session
    at the database is ended, so that another one takes over; a killed server is noticed at once."""
    max_body_bytes: int = Field(default=256 * 1024 * 1024, ge=1024)
    """Maximum size of a request body after decompression."""
    lease_seconds: Positive = 600.0
    """Deliver a leased batch again if it is not acknowledged within this many seconds."""
    max_open_leases: Count = 1024
    """Maximum unacknowledged leases per run, for trainers that request them; then HTTP 429."""
    max_waiting_groups: Count = 100_000
    """Groups waiting for a run at which posts of groups get HTTP 429, with Retry-After."""
    max_waiting_gb: Positive = 50.0
    """The same for the GB of these groups, as stored (compressed)."""
    silent_after_seconds: Positive = 30.0
    """Seconds without a heartbeat until a remote runner's share goes to the others."""
    drain_seconds: Amount = 60.0
    """`serve`: seconds for open groups to finish on shutdown; then they are cancelled, and what has
    not ended 15 seconds later is killed."""
    openenv_sessions: Natural = 64
    """`serve`: maximum OpenEnv episodes in progress, each counted as a rollout; 0: none."""
    openenv_idle_seconds: Positive = 600.0
    """Seconds without a message until an OpenEnv session is closed."""
    allowed_hosts: list[str] = []
    """Additional host names that requests may use if there are no access tokens."""
    allowed_origins: list[Annotated[str, Field(pattern=r"^https?://[a-z0-9.:\[\]-]+$")]] = []
    """Origins whose web pages may use the API: https://lab.example (lower case, without a path)."""
    quota: Quota = Quota()
    max_connections: Count = 4096
    """Maximum connections; further ones get 503 and are closed."""
    max_header_bytes: int = Field(default=65536, ge=1024)
    """Maximum size of the request line and headers together."""
    max_headers: int = Field(default=100, ge=8)
    """Maximum headers per request."""
    max_url_bytes: int = Field(default=8192, ge=256)
    """Maximum length of path and query."""
    header_seconds: Positive = 20.0
    """Seconds for a request's headers to arrive, from its first byte; then 408."""
    body_idle_seconds: Positive = 30.0
    """Seconds without data until a request body is given up; then 408."""
    body_seconds: Positive = 600.0
    """Seconds for a whole request body; then 408."""
    ssl_certfile: Path | None = None
    """Certificate chain (PEM); enables HTTPS."""
    ssl_keyfile: Path | None = None
    """Private key of the certificate; unset: in the same file."""
    ssl_keyfile_password: SecretStr | None = None
    """Password of the private key; never logged or written."""
    ssl_ca_certs: Path | None = None
    """Certificate authorities (PEM) for client certificates."""
    ssl_cert_reqs: Literal["none", "optional", "required"] = "none"
    """Whether clients need a certificate signed by `ssl_ca_certs`."""

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
    """Tracing of a running server: `--telemetry.*`."""

    otlp_endpoint: str | None = None
    """Endpoint for traces (OTLP over HTTP), such as http://localhost:4318; unset: no traces."""
    otlp_texts: bool = False
    """Include prompts, answers, and the input and output of tools in traces, without what looks
    like a secret, and with at most 32,768 characters per attribute."""
    service_name: str = "envserver"
    """Service name in traces."""
    sample_ratio: Share = 1.0
    """Share of the rollouts that are traced."""
    slow_callback_seconds: Positive | None = 10.0
    """Log whose code blocks the event loop for longer than this; null: off."""


class DeliveryConfig(Section):
    """Which groups go to trainers, and how many may wait for them."""

    max_staleness_at_delivery: Natural | None = None
    """Maximum policy versions between a group's first token and its delivery; unset: no limit.
    Groups that would be staler by then are not started."""
    stale_groups: Literal["drop", "deliver"] = "drop"
    """What happens to staler groups, finished or waiting: drop and count them, or deliver them."""
    silent_run_seconds: Positive | None = 3600.0
    """Close a broadcast run that leases nothing for this many seconds while others do, so that its
    queue does not block them; it resumes when it registers again. Unset: never."""
    max_queued_groups: Natural = 256
    """Groups waiting for a trainer at which new rollouts pause; 0: without a registered run,
    only requested groups are made."""
    max_batches_offpolicy: Count = 3
    """Batches (of the registered trainer) waiting at which new rollouts pause."""

    @property
    def most_staleness(self) -> int | None:
        """Maximum staleness of a group at its delivery; None: no limit."""
        return self.max_staleness_at_delivery if self.stale_groups == "drop" else None


class AlarmsConfig(Section):
    """Alarms of a running server: `GET /v1/alarms`, the log, the live tables."""

    off: list[str] = []
    """Names of alarms that are not raised: no_trainer,equal_rewards."""
    span_minutes: Positive = 10.0
    """Minutes over which shares and counts are computed."""
    fewest: Count = 20
    """Minimum number of groups or rollouts for an alarm about a share."""
    no_trainer_minutes: Amount = 10.0
    """Minutes without a lease while enough groups wait for a batch."""
    no_rollout_minutes: Amount = 10.0
    """Minutes without a finished rollout while rollouts run; at least four times as long as a
    rollout takes on average."""
    paused_minutes: Amount = 10.0
    """Minutes for which model calls are paused."""
    unused_engine_minutes: Amount = 10.0
    """Minutes for which an engine gets no calls: it is refused, unreachable, or has old weights."""
    lost_share: PositiveShare = 0.05
    """Share of rollouts that are lost, not by the model's fault."""
    stale_share: PositiveShare = 0.2
    """Share of groups that are dropped as stale."""
    cut_share: PositiveShare = 0.25
    """Share of rollouts that a limit ends or cuts."""
    split_share: PositiveShare = 0.1
    """Share of rollouts whose conversations are not continued: each of their calls is a row."""
    equal_share: PositiveShare = 0.8
    """Share of groups whose rewards are all equal."""
    same_share: PositiveShare = 0.5
    """Share of groups whose rollouts all say the same."""
    untrained_share: PositiveShare = 0.1
    """Share of sampled tokens that flags mask or drop."""
    worker_deaths: Count = 3
    """Deaths of worker processes."""
    disk_free_gb: Amount = 1.0
    """GB that are left on the disk of the store."""
    store_seconds: Positive = 1.0
    """Mean seconds of a commit of the store."""
