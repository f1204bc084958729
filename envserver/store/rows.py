"""What goes into the store and what comes out. Times are `time.time()` seconds."""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec

from ..rollouts.estimates import Scored
from .states import GroupState, RunState

Delivery = Literal["shared", "broadcast"]
"""shared: each group goes to one of these runs; broadcast: the run gets every group."""

Format = Literal["group", "atropos"]
"""How a body is to be read: a packed `records.Group`, or a post of the Atropos wire."""


UNKNOWN_VERSION: Final = -1
"""Policy version of a group of which nobody said which policy sampled it: never called stale."""


class GroupPut(msgspec.Struct, frozen=True, kw_only=True):
    """One group to be stored.

    Args:
        group_id: unique in the store; the second put of an id changes nothing.
        env: name of the environment that made it.
        format: how `body` is to be read.
        body: opaque bytes.
        size: logical group size: trajectories, or rows for posts of the Atropos wire.
        tokens: training tokens over all sequences.
        max_length: tokens of the longest sequence.
        policy_version: the lowest version that sampled any of it (-1: unknown).
        env_id: number of a registered foreign environment.
        state: queued (may be leased at once), buffered (waits for `move`), or dropped (for whoever
            knows its id: it is never leased, and kept as long as what was delivered).
        scored: what it says of its task; None where it names none.
    """

    group_id: str
    env: str
    format: Format
    body: bytes
    size: int
    tokens: int
    max_length: int
    policy_version: int = -1
    env_id: int | None = None
    state: Literal["queued", "buffered", "dropped"] = "queued"
    scored: Scored | None = None


class GroupRow(msgspec.Struct, frozen=True):
    """What is known of a stored group without its body. Fields as in `GroupPut`, and:

    Args:
        seq: order of arrival; grows, never used twice.
        state: in the queue of the run that asks, else in the one that is shared.
        lease_id: in that queue, the lease it is in or, after that expired, was in last.
        created_at: when it was accepted.
    """

    seq: int
    group_id: str
    env: str
    format: Format
    size: int
    tokens: int
    max_length: int
    policy_version: int
    env_id: int | None
    state: GroupState
    lease_id: str | None
    created_at: float


class DamagedGroup(msgspec.Struct, frozen=True):
    """A group whose stored body could not be read, why, and when that was found."""

    group_id: str
    reason: str
    found_at: float


class Lease(msgspec.Struct, frozen=True):
    """Groups handed to one run, to be acked before `expires_at`, else they are delivered again."""

    lease_id: str
    run: str
    expires_at: float
    groups: list[GroupRow]


ATROPOS_RUN = "atropos"
"""Name of the run of whoever registers over the Atropos wire; its `batch_size` counts sequences."""


class Run(msgspec.Struct, frozen=True):
    """One trainer's (or one export's) subscription.

    Args:
        batch_size: what it asks for at a time, in its own unit.
        settings: JSON-like.
        policy_version: the last one that it published (-1: none yet).
        state: a closed run leases no more.
        delivery: which groups it gets: its part of those that are shared, or all.
        environments: names of the environments whose groups it takes; empty: all.
    """

    name: str
    created_at: float
    batch_size: int
    settings: dict[str, Any]
    policy_version: int
    state: RunState
    delivery: Delivery = "shared"
    environments: list[str] = []


class Checkpoint(msgspec.Struct, frozen=True):
    """A point to which a run can go back.

    Args:
        acked_groups: how many groups the run had acked by then, with those of this checkpoint.
    """

    name: str
    acked_groups: int
    created_at: float


class Compacted(msgspec.Struct, frozen=True):
    """What retention removed.

    Args:
        groups: groups of which only the id is still known.
        stored_bytes: of their bodies, as they lay in the database.
        leases: leases that had ended.
    """

    groups: int
    stored_bytes: int
    leases: int
