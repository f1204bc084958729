"""Request and response bodies under /v1, and their limits. Requests are validated with these
models; responses are only described by them."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec
from envserver_records.wire import GroupSummary
from pydantic import AfterValidator, ConfigDict, Field, WithJsonSchema, model_validator

from ..runners.messages import check_can_be_shown
from ..settings.section import Described

LONGEST_WAIT_SECONDS: Final = 60.0
MOST_GROUPS: Final = 1024
MOST_SEQUENCES: Final = 2**20
MOST_TOKENS: Final = 2**40
MOST_WINDOW: Final = 64
_LONGEST_LEASE_SECONDS: Final = 7 * 24 * 3600.0
VERSION_LIMIT: Final = 2**31 - 1

Seconds = Annotated[float, Field(gt=0, le=_LONGEST_LEASE_SECONDS, allow_inf_nan=False)]
Name = Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[^\x00-\x1f\x7f]+$")]
TaskId = Annotated[str, Field(max_length=16_384, pattern=r"^[^\x00]*$")]
"""Any text; a longer one fits into no URL."""
Delivery = Literal["shared", "broadcast"]


class Body(Described):
    """Base of request bodies: unknown fields are errors; docstrings become descriptions."""

    model_config = ConfigDict(extra="forbid")


class RunRequest(Body):
    """A run to create, or to resume if one of this name exists."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")
    batch_size: int | None = Field(default=None, ge=1, le=MOST_GROUPS)
    """Groups per lease when the lease sets no limit; 8 for a new run."""
    settings: Annotated[dict[str, Any], AfterValidator(check_can_be_shown)] | None = None
    """Any JSON object that the trainer wants to read back later."""
    delivery: Delivery | None = None
    """shared: each group goes to one of the shared runs; broadcast: this run gets every group. A
    new run is shared unless set. It cannot change later."""
    environments: list[Name] | None = Field(default=None, max_length=256)
    """Only groups of these environments; an empty list means all."""
    checkpoint: Name | None = None
    """Go back to this checkpoint: groups acknowledged after it are delivered again."""
    from_start: bool = False
    """Go back to the start: all groups the run ever acknowledged are delivered again."""

    @model_validator(mode="after")
    def _one_way_back(self) -> RunRequest:
        if self.from_start and self.checkpoint is not None:
            raise ValueError("give checkpoint or from_start, not both")
        return self


class Limits(Body):
    """Filters of a lease."""

    max_groups: int | None = Field(default=None, ge=1, le=MOST_GROUPS)
    """Maximum number of groups; unset: the run's batch size, or 1024 if another limit is set."""
    max_sequences: int | None = Field(default=None, ge=1, le=MOST_SEQUENCES)
    """Maximum number of trajectories in total; a first group with more is delivered alone."""
    max_tokens: int | None = Field(default=None, ge=1, le=MOST_TOKENS)
    """Maximum number of tokens in total; a first group with more is delivered alone."""
    min_groups: int = Field(default=1, ge=1, le=MOST_GROUPS)
    """Minimum number of groups; with fewer, nothing is leased."""
    environments: list[Name] | None = Field(default=None, max_length=256)
    """Only groups of these environments; other groups keep their places in the queue."""
    min_version: int | None = Field(default=None, ge=0, le=VERSION_LIMIT)
    """Only groups sampled with this policy version or a later one."""
    max_staleness: int | None = Field(default=None, ge=0, le=VERSION_LIMIT)
    """Only groups at most this many versions older than the current policy version."""
    seconds: Seconds | None = None
    """Duration of the lease; unset: the server's default."""

    @model_validator(mode="after")
    def _in_order(self) -> Limits:
        if self.max_groups is not None and self.min_groups > self.max_groups:
            raise ValueError("min_groups is more than max_groups")
        return self


class LeaseRequest(Limits):
    """Groups to lease."""

    wait_seconds: float = Field(default=0.0, ge=0, le=LONGEST_WAIT_SECONDS)
    """Maximum time to wait for them."""


class StreamRequest(Limits):
    """Query parameters of a lease stream."""

    # FastAPI names its parameter by an alias: pydantic would warn of it at the first request.
    model_config = ConfigDict(defer_build=False)

    stream: str | None = Field(default=None, pattern=r"^[A-Za-z0-9_-]{8,64}$")
    """Name of this stream, chosen by the client. Reconnecting with it resumes with the leases that
    are still open. Unset: a new stream."""
    window: int = Field(default=2, ge=1, le=MOST_WINDOW)
    """Maximum number of unacknowledged leases; an ack or nack makes room for the next."""
    on_hangup: Literal["keep", "give_back"] = "keep"
    """What happens to open leases when the client disconnects: they stay leased until they expire,
    or are returned at once."""


class LeaseReference(Body):
    lease_id: str


class Ack(LeaseReference):
    checkpoint: Name | None = None
    """The trainer's checkpoint that contains this lease and all acknowledged before it."""


class Nack(LeaseReference):
    reason: str = Field(default="", max_length=200)
    """Nacks are counted by this reason."""
    group_ids: list[str] | None = Field(default=None, min_length=1, max_length=MOST_GROUPS)
    """Sets only these groups aside: they are never delivered to this run again, nor, if it is
    shared, to other shared runs. The lease keeps the others. Needs a reason."""

    @model_validator(mode="after")
    def _says_why(self) -> Nack:
        if self.group_ids is not None and not self.reason:
            raise ValueError("setting groups aside needs a reason")
        return self


class LeaseExtension(LeaseReference):
    seconds: Seconds


class PolicyVersionRequest(Body):
    version: int = Field(ge=0, le=VERSION_LIMIT, strict=True)
    engines: list[Annotated[str, Field(max_length=2048)]] | None = Field(
        default=None, max_length=1024
    )
    """Ids or addresses of engines that have these weights, of those whose versions are their own;
    unset: only engines that follow publications have them."""


_GROUP_SUMMARY: Final = msgspec.json.schema_components([GroupSummary])[1]["GroupSummary"]


class RunAnswer(Described):
    name: str
    created_at: float
    batch_size: int
    settings: dict[str, Any]
    policy_version: int
    state: Literal["open", "closed"]
    delivery: Delivery
    environments: list[str]
    warnings: list[str]
    """Parts of the run's filter that match nothing so far; a POST also sends them in
    `X-Envserver-Warning`."""


class RunsAnswer(Described):
    runs: list[RunAnswer]


class ResumedAnswer(RunAnswer):
    redelivered: int | None = None
    """Number of groups to be delivered again after the run went back."""


class CheckpointAnswer(Described):
    name: str
    acked_groups: int
    created_at: float


class CheckpointsAnswer(Described):
    checkpoints: list[CheckpointAnswer]


class LeasedGroup(Described):
    group_id: str
    env: str
    format: str
    policy_version: int
    group: dict[str, Any]
    """The group, with the keys of the Atropos protocol."""


class LeaseAnswer(Described):
    lease_id: str
    expires_at: float
    groups: list[LeasedGroup]


class ExtendedAnswer(Described):
    lease_id: str
    expires_at: float


class GroupsAnswer(Described):
    groups: list[Annotated[dict[str, Any], WithJsonSchema(_GROUP_SUMMARY)]]
    cursor: str
    """Of the next page; "" on the last one."""
    next: int | None
    """The `after` of the next page; null on the last one, and in other orders than oldest."""
    searched: int | None = None
    """With `words`: the groups that were read for this page."""


class RewardsAnswer(Described):
    """Groups by mean reward: `counts` of equal bins from `low` to `high`."""

    groups: int
    """All that match; `unscored` of them have no mean reward."""
    unscored: int
    low: float | None
    """0 if all means lie between 0 and 1, else the least; null without a mean"""
    high: float | None
    counts: list[int]
    """A bin has its lower end; the last has both."""


class RolloutAnswer(Described):
    group: dict[str, Any]
    """Its group (`envserver_records.Group`) without rollouts."""
    rollouts: int
    """Number of rollouts of the group."""
    number: int
    """Position of this one, from 0."""
    rollout: dict[str, Any]
    """The rollout (`envserver_records.Trajectory`); `sequences` has facts of each row instead of
    its tokens: length, trained (tokens), agent, flags, path, sampling. `timings`: kind (engine,
    tool, sandbox, scoring), name, agent, started and seconds (from the rollout's start), first
    (seconds to the first chunk), call, and where its tokens are: row, from, to. `attempts`: those
    that failed before: attempt, kind, fault, message, seconds. `logs`: time (from the rollout's
    start), stream, text. `use`: CPU seconds and memory of worker and sandbox, killed programs."""


class RolloutsAnswer(Described):
    group: dict[str, Any]
    """Its row in the list of groups, what is known of it (`envserver_records.Group`), and `task`,
    the task's public part."""
    rollouts: list[dict[str, Any]]
    """Each as `rollout` of `/v1/groups/ID/rollouts/N`; `cut`: its texts were left out."""


class TokensAnswer(Described):
    """Columns of equal length, from token `start` of a row of `length` tokens."""

    start: int
    length: int
    ids: list[int]
    texts: list[str | None]
    """null: part of a character, or no tokenizer of the model is on this machine."""
    mask: list[int]
    """1: sampled by the policy and trained."""
    logprobs: list[float]
    """Of sampled tokens; else 0."""
    versions: list[int]
    """Policy version that sampled the token; -1: none, or unknown."""
    calls: list[int]
    """Call of the rollout that sampled the token; -1: none."""


class TaskEstimate(Described):
    number: int
    """Position in the order in which tasks were first scored."""
    task_id: str
    environment: str
    split: str
    attempts: int
    """Number of rollouts ever counted."""
    mean_reward: float | None
    """Mean reward, with recent policies weighted more; null if no attempt counts any more."""
    success: float
    """Estimated probability that the next rollout solves the task; 0.5 without data."""
    weight: float
    """Effective number of attempts after decay."""
    policy_version: int
    """Latest policy version that tried the task; -1 if unknown."""
    scored_at: float


class EstimatesAnswer(Described):
    estimates: list[TaskEstimate]
    next: int | None


class PolicyVersionAnswer(Described):
    version: int


class RunBacklog(Described):
    queued_groups: int
    """Groups that the run may lease now; shared runs count the same groups."""
    lag_seconds: float
    """How long the oldest of them has waited; 0 if there is none."""
    open_leases: int
    """Leases that the run has neither acknowledged nor given back, and that have not expired."""
    leased_groups: int
    """Groups in these leases."""


class StatusAnswer(Described):
    model_config = ConfigDict(extra="allow")

    version: str
    policy_version: int
    groups: dict[str, int]
    """Groups in the shared queue, by state."""
    runs: dict[str, RunBacklog]
    """Queued and leased groups of each open run."""
    damaged: list[dict[str, Any]]
    """The latest groups whose stored bodies cannot be read: `group_id`, `reason`, `found_at`."""
    atropos: dict[str, Any]
    joined: dict[str, int]
    """Number of runners by status: present, silent, gone."""
    server: dict[str, Any]
