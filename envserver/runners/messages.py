"""Messages between runners and the server, as JSON under /v1/environments.

Groups are sent as MessagePack (`records.pack`), see `GROUP_MSGPACK`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal

import msgspec
import orjson
from envserver_records.tasks import Split
from pydantic import AfterValidator, ConfigDict, Field

from ..settings.section import Described

GROUP_MSGPACK: Final = "application/vnd.envserver.group+msgpack"
"""Media type of a posted group: a packed `records.Group`."""
KEY_HEADER: Final = "x-environment-key"
"""Header with the session key; `Authorization` is for the access token."""
NAME_PATTERN: Final = r"^[A-Za-z0-9][A-Za-z0-9._@-]{0,127}$"
LONGEST_POLL_SECONDS: Final = 60.0
MOST_IDS: Final = 4096
NEXT_SECONDS: Final = "next_seconds"
"""Said by a runner at its registration that understands `News.next_seconds`. It is a parameter of
the request, which servers of older versions ignore."""
ENGINES: Final = "engines"
"""Said by a runner that understands `News.engines`, and wants them."""
_MOST: Final = 2**31 - 1
_MOST_SHOWN_BYTES: Final = 1_000_000
_KEPT: Final = r"^[^\x00]*$"

Count = Annotated[int, Field(ge=0, le=_MOST)]
Counts = Annotated[dict[Annotated[str, Field(max_length=128)], Count], Field(max_length=64)]


def check_can_be_shown(value: dict[str, Any]) -> dict[str, Any]:
    try:
        size = len(orjson.dumps(value))
    except TypeError as error:
        raise ValueError(f"cannot be stored and shown as JSON: {error}") from error
    if size > _MOST_SHOWN_BYTES:
        raise ValueError(f"has {size} bytes as JSON: {_MOST_SHOWN_BYTES} at most")
    return value


Small = Annotated[
    dict[Annotated[str, Field(max_length=128)], Any],
    Field(max_length=64),
    AfterValidator(check_can_be_shown),
]


class _Message(Described):
    model_config = ConfigDict(extra="forbid")


class Registration(_Message):
    """Registers a runner, or starts a new session after a restart."""

    name: str = Field(pattern=NAME_PATTERN)
    """Name of the runner, unique at the server; the same name continues its own stream of groups.
    """
    instance: str = Field(min_length=8, max_length=128)
    """Secret of the runner, kept across restarts; it allows taking the name back at once."""
    env: str = Field(min_length=1, max_length=128)
    split: Split
    seed: int = Field(ge=-(2**62), le=2**62)
    """Configured seed; the response has the seed to use."""
    group_size: int = Field(ge=1, le=_MOST)
    weight: float = Field(default=1.0, gt=0, le=1e9, allow_inf_nan=False)
    minimum_share: float = Field(default=0.0, ge=0, le=1, allow_inf_nan=False)
    scoring: Small = {}
    """The runner's scoring and filter settings, for display."""
    version: str = Field(default="", max_length=128)
    """Version of envserver."""
    host: str = Field(default="", max_length=256)


class Welcome(_Message):
    """Response to a registration."""

    id: str
    key: str
    """Session key, for `x-environment-key`; the previous key becomes invalid."""
    seed: int
    """Seed of the stream: no other environment of this server has the same stream."""
    stored: int
    """Number of groups of this stream that the server has."""
    again: int = 0
    """Number of them that the curriculum re-sampled."""
    silent_after_seconds: float
    """A runner silent for longer than this does not count until it is heard from again."""


class Pause(_Message):
    """No call may reach the engine while its weights change. See `proxy.gate`."""

    id: str
    in_flight: Literal["drain", "keep", "abort"]


class ToldEngine(_Message):
    """An engine of the server, which its runners may call.

    The fields but `url` are those of `models.replicas.Registration`."""

    url: str
    version: int | None = None
    follows: bool = False
    draining: bool = False
    paused: bool = False


class EngineList(_Message):
    """The engines of the server; without `engines` in what a runner has seen."""

    id: str
    """Changes with the list."""
    engines: list[ToldEngine] = []


class News(_Message):
    """News for a runner; the response to heartbeats and posted groups."""

    policy_version: int = -1
    pause: Pause | None = None
    room: int = 0
    """Number of groups it may have open now, including those waiting to be posted."""
    drain: bool = False
    """Whether to begin no more groups, and leave once the open ones are posted."""
    next_seconds: float | None = None
    """How long the next heartbeats should wait for news. Only for a runner that registered with
    `understands=next_seconds`: a runner of an older version refuses the unknown field."""
    engines: EngineList | None = None
    """The server's engines, if they have changed. Only for a runner that registered with
    `understands=engines`."""


class Refused(_Message):
    """A posted group that was permanently refused."""

    index: int
    """Its position in the request, from 0."""
    place: str
    """The error's place in the group; "" if unknown."""
    message: str


class Accepted(News):
    """Response to a post of several groups: all are on disk except the refused ones."""

    refused: list[Refused] = []


class Heartbeat(_Message):
    """A runner's status, and what it knows; the server answers when there is news, or after
    `wait_seconds`."""

    open: Count = 0
    """Groups in progress or waiting to be posted."""
    capacity: Count = 0
    """Number of groups it could have open; 0: it begins no more."""
    begun: Count = 0
    """Groups begun since it registered."""
    delivered: Count = 0
    dropped: Counts = {}
    failures: Counts = {}
    """Failed attempts by kind."""
    engine: Small = {}
    quiet: str = Field(default="", max_length=64)
    """Id of the pause it observes: none of its calls is at the engine (with "keep", some may be).
    """
    seen: News | None = None
    wait_seconds: float = Field(default=0.0, ge=0, le=LONGEST_POLL_SECONDS)


class ScoredGroup(_Message):
    """A group that was scored and dropped: it counts in the estimate of its task."""

    group_id: str = Field(min_length=1, max_length=512, pattern=_KEPT)
    task_id: str = Field(min_length=1, max_length=512, pattern=_KEPT)
    attempts: int = Field(ge=1, le=_MOST)
    rewards: float = Field(ge=0, le=_MOST, allow_inf_nan=False)
    """Sum of the rewards of all attempts."""
    policy_version: int = Field(ge=-1, le=_MOST)


class ScoredGroups(_Message):
    groups: list[ScoredGroup] = Field(max_length=MOST_IDS)


class GroupIds(_Message):
    group_ids: list[Annotated[str, Field(max_length=512)]] = Field(max_length=MOST_IDS)


GROUP_LIST_MSGPACK: Final = "application/vnd.envserver.group-list+msgpack"
"""Media type of a post of several groups, which costs the server much less than many requests: a
MessagePack array of binaries, each a group as packed by `records.pack`, or the same as one zstd
frame with its size and checksum, which the server stores unchanged."""
MOST_GROUPS: Final = 64
"""Maximum number of groups in one request."""
MOST_BYTES: Final = 16 * 1024 * 1024
"""Maximum total size of a runner's request; a single group may be larger."""


def compressed(body: bytes) -> bytes:
    """Compresses a packed group into one zstd frame, if that is smaller. CPU work."""
    from ..store import packed  # the command line imports this module for its patterns

    return packed.smaller(body) or body


def encode_batch(bodies: Sequence[bytes]) -> bytes:
    return msgspec.msgpack.encode(bodies)
