"""What goes over the wire under /v1, and the bounds of it: what trainers send, which is validated,
and what they get, which is described.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec
from envserver_records.wire import GroupSummary
from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema, model_validator

LONGEST_WAIT_SECONDS: Final = 60.0
MOST_GROUPS: Final = 1024
MOST_SEQUENCES: Final = 2**20
MOST_TOKENS: Final = 2**40
MOST_WINDOW: Final = 64
_LONGEST_LEASE_SECONDS: Final = 7 * 24 * 3600.0
VERSION_LIMIT: Final = 2**31 - 1

Seconds = Annotated[float, Field(gt=0, le=_LONGEST_LEASE_SECONDS, allow_inf_nan=False)]
Name = Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[^\x00-\x1f\x7f]+$")]
Delivery = Literal["shared", "broadcast"]


class Body(BaseModel):
    """Base of what is sent: unknown names are errors, docstrings are descriptions."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class RunRequest(Body):
    """A run to be created, or gone on with when there is one of this name."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")
    batch_size: int | None = Field(default=None, ge=1, le=MOST_GROUPS)
    """Groups per lease where the lease names no limit; 8 for a new run."""
    settings: dict[str, Any] | None = None
    """Anything the trainer wants to find again."""
    delivery: Delivery | None = None
    """shared: each group goes to one of all shared runs; broadcast: this run gets every group. A
    new run is shared; what a run is never changes."""
    environments: list[Name] | None = Field(default=None, max_length=256)
    """Only groups of these environments; an empty list: of all."""
    checkpoint: Name | None = None
    """Go back to this checkpoint: what was acknowledged after it is delivered again."""
    from_start: bool = False
    """Go back to the start: all that the run ever acknowledged is delivered again."""

    @model_validator(mode="after")
    def _one_way_back(self) -> RunRequest:
        if self.from_start and self.checkpoint is not None:
            raise ValueError("checkpoint and from_start are two ways back")
        return self


class Limits(Body):
    """Which groups a lease is to hold."""

    max_groups: int | None = Field(default=None, ge=1, le=MOST_GROUPS)
    """Most groups; unset: the run's batch size, or 1024 where another limit is given."""
    max_sequences: int | None = Field(default=None, ge=1, le=MOST_SEQUENCES)
    """Most trajectories together; a first group that has more comes alone."""
    max_tokens: int | None = Field(default=None, ge=1, le=MOST_TOKENS)
    """Most tokens together; a first group that has more comes alone."""
    min_groups: int = Field(default=1, ge=1, le=MOST_GROUPS)
    """Fewer are not handed out."""
    environments: list[Name] | None = Field(default=None, max_length=256)
    """Only groups of these environments; the others keep their places."""
    min_version: int | None = Field(default=None, ge=0, le=VERSION_LIMIT)
    """Only groups sampled with this policy version or later ones."""
    max_staleness: int | None = Field(default=None, ge=0, le=VERSION_LIMIT)
    """Only groups at most so many versions older than the one published last."""
    seconds: Seconds | None = None
    """How long the lease lasts; unset: as the server is set."""

    @model_validator(mode="after")
    def _in_order(self) -> Limits:
        if self.max_groups is not None and self.min_groups > self.max_groups:
            raise ValueError("min_groups is more than max_groups")
        return self


class LeaseRequest(Limits):
    """Groups to be handed out."""

    wait_seconds: float = Field(default=0.0, ge=0, le=LONGEST_WAIT_SECONDS)
    """How long to wait for them."""


class StreamRequest(Limits):
    """Query of a stream of leases."""

    stream: str | None = Field(default=None, pattern=r"^[A-Za-z0-9_-]{8,64}$")
    """Name of this stream, chosen by the client: connecting again with it goes on with the leases
    that are open. Unset: a new one."""
    window: int = Field(default=2, ge=1, le=MOST_WINDOW)
    """Most leases that are open and not acknowledged; an ack or nack makes room for the next."""
    on_hangup: Literal["keep", "give_back"] = "keep"
    """What becomes of them when the client hangs up: they stay leased until they end, or they are
    given back at once."""


class LeaseReference(Body):
    lease_id: str


class Ack(LeaseReference):
    checkpoint: Name | None = None
    """The trainer's checkpoint that holds this lease and all that the run acknowledged before."""


class Nack(LeaseReference):
    reason: str = Field(default="", max_length=200)
    """Counted by the server."""


class LeaseExtension(LeaseReference):
    seconds: Seconds


class PolicyVersionRequest(Body):
    version: int = Field(ge=0, le=VERSION_LIMIT, strict=True)


# Answers

_GROUP_SUMMARY: Final = msgspec.json.schema_components([GroupSummary])[1]["GroupSummary"]


class RunAnswer(BaseModel):
    name: str
    created_at: float
    batch_size: int
    settings: dict[str, Any]
    policy_version: int
    state: Literal["open", "closed"]
    delivery: Delivery
    environments: list[str]


class RunsAnswer(BaseModel):
    runs: list[RunAnswer]


class ResumedAnswer(RunAnswer):
    redelivered: int | None = None
    """Groups that come again, where the run went back."""


class CheckpointAnswer(BaseModel):
    name: str
    acked_groups: int
    created_at: float


class CheckpointsAnswer(BaseModel):
    checkpoints: list[CheckpointAnswer]


class LeasedGroup(BaseModel):
    group_id: str
    env: str
    format: str
    policy_version: int
    group: dict[str, Any]
    """With the keys of the Atropos wire."""


class LeaseAnswer(BaseModel):
    lease_id: str
    expires_at: float
    groups: list[LeasedGroup]


class ExtendedAnswer(BaseModel):
    lease_id: str
    expires_at: float


class GroupsAnswer(BaseModel):
    groups: list[Annotated[dict[str, Any], WithJsonSchema(_GROUP_SUMMARY)]]
    next: int | None


class TaskEstimate(BaseModel):
    model_config = ConfigDict(use_attribute_docstrings=True)

    number: int
    """Order in which tasks were first scored."""
    task_id: str
    environment: str
    split: str
    attempts: int
    """Rollouts that were ever counted."""
    mean_reward: float | None
    """Of them, late policies counting more; null where nothing of it holds any more."""
    success: float
    """How likely the next rollout solves it; 0.5 where nothing is known."""
    weight: float
    """Attempts that still count."""
    policy_version: int
    """The last that tried it, -1 where none is known."""
    scored_at: float


class EstimatesAnswer(BaseModel):
    estimates: list[TaskEstimate]
    next: int | None


class PolicyVersionAnswer(BaseModel):
    version: int


class StatusAnswer(BaseModel):
    model_config = ConfigDict(extra="allow")

    version: str
    policy_version: int
    groups: dict[str, int]
    """Groups of the shared queue by state."""
    damaged: list[dict[str, Any]]
    """The last groups whose stored bodies could not be read: `group_id`, `reason`, `found_at`."""
    atropos: dict[str, Any]
    joined: dict[str, int]
    """Environments on other machines by how they are: present, silent, gone."""
    server: dict[str, Any]


class Problem(BaseModel):
    """RFC 9457; some kinds have more members."""

    model_config = ConfigDict(extra="allow")

    type: str
    title: str
    status: int
    detail: str
