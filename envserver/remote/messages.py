"""What environments on other machines and the server say to each other, as JSON under
/v1/environments. Groups travel as MessagePack (`records.pack`), see `GROUP_MSGPACK`.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from envserver_records.splits import Split
from pydantic import BaseModel, ConfigDict, Field

GROUP_MSGPACK: Final = "application/vnd.envserver.group+msgpack"
"""Media type of a posted group: a packed `records.Group`."""
KEY_HEADER: Final = "x-environment-key"
"""Holds the key of the session; `Authorization` is for the access token."""
NAME_PATTERN: Final = r"^[A-Za-z0-9][A-Za-z0-9._@-]{0,127}$"
LONGEST_POLL_SECONDS: Final = 60.0
MOST_IDS: Final = 4096
_MOST: Final = 2**31 - 1
_KEPT: Final = r"^[^\x00]*$"

Count = Annotated[int, Field(ge=0, le=_MOST)]
Counts = Annotated[dict[Annotated[str, Field(max_length=128)], Count], Field(max_length=64)]
Small = Annotated[dict[Annotated[str, Field(max_length=128)], Any], Field(max_length=64)]


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class Registration(_Message):
    """An environment on another machine begins, or begins again."""

    name: str = Field(pattern=NAME_PATTERN)
    """Of this joiner, unique at the server; the same name goes on with its own stream of groups."""
    instance: str = Field(min_length=8, max_length=128)
    """Secret of the joiner, kept over its restarts: with it a name is taken back at once."""
    env: str = Field(min_length=1, max_length=128)
    split: Split
    seed: int = Field(ge=-(2**62), le=2**62)
    """As it was set; the answer says which one it gets."""
    group_size: int = Field(ge=1, le=_MOST)
    weight: float = Field(default=1.0, gt=0, le=1e9, allow_inf_nan=False)
    minimum_share: float = Field(default=0.0, ge=0, le=1, allow_inf_nan=False)
    scoring: Small = {}
    """How it scores and filters, for people."""
    version: str = Field(default="", max_length=128)
    """Of envserver."""
    host: str = Field(default="", max_length=256)


class Welcome(_Message):
    """What a registration is answered."""

    id: str
    key: str
    """Of this session, for `x-environment-key`; the former one is void."""
    seed: int
    """The seed of its stream: no other environment of this server has the same stream."""
    stored: int
    """Groups of this stream that the server has."""
    again: int = 0
    """Those of them whose tasks came again."""
    silent_after_seconds: float
    """Who says nothing for longer does not count until it is heard again."""


class Pause(_Message):
    """No call may reach the engine: its weights change. See `proxy.gate`."""

    id: str
    in_flight: Literal["drain", "keep", "abort"]


class News(_Message):
    """What a joiner must know; the answer to heartbeats and groups."""

    policy_version: int = -1
    pause: Pause | None = None
    room: int = 0
    """Groups that it may have open now, those that wait to be posted among them."""
    drain: bool = False
    """It is to begin no further group, and to leave when the open ones are posted."""


class Refused(_Message):
    """A posted group that is not stored, and never will be as it is."""

    index: int
    """Its position in the request, from 0."""
    place: str
    """Where in the group something is wrong, "" where that is not known."""
    message: str


class Accepted(News):
    """What a post of several groups is answered: all are on disk but those that are refused."""

    refused: list[Refused] = []


class Heartbeat(_Message):
    """How a joiner is, and what it knows: the server answers when there is something new, or after
    `wait_seconds`."""

    open: Count = 0
    """Groups that it makes or that wait to be posted."""
    capacity: Count = 0
    """Groups that it could have open; 0: it begins no more."""
    begun: Count = 0
    """Groups that it began since it registered."""
    delivered: Count = 0
    dropped: Counts = {}
    failures: Counts = {}
    """Failed attempts by kind."""
    engine: Small = {}
    quiet: str = Field(default="", max_length=64)
    """Id of the pause that it holds: no call of its is at the engine (or may be, with "keep")."""
    seen: News | None = None
    wait_seconds: float = Field(default=0.0, ge=0, le=LONGEST_POLL_SECONDS)


class ScoredGroup(_Message):
    """A group that was scored and dropped: it counts in the estimate of its task."""

    group_id: str = Field(min_length=1, max_length=512, pattern=_KEPT)
    task_id: str = Field(min_length=1, max_length=512, pattern=_KEPT)
    attempts: int = Field(ge=1, le=_MOST)
    rewards: float = Field(ge=0, le=_MOST, allow_inf_nan=False)
    """Of all attempts together."""
    policy_version: int = Field(ge=-1, le=_MOST)


class ScoredGroups(_Message):
    groups: list[ScoredGroup] = Field(max_length=MOST_IDS)


class GroupIds(_Message):
    group_ids: list[Annotated[str, Field(max_length=512)]] = Field(max_length=MOST_IDS)
