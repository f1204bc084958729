"""The records that go into the store and come out. Times are `time.time()` seconds."""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec

from ..rollouts.estimates import Scored
from .facts import GroupFacts
from .states import GroupState, RunState

Delivery = Literal["shared", "broadcast"]
"""shared: each group goes to one of these runs; broadcast: the run gets every group."""

Format = Literal["group", "atropos"]
"""The encoding of a body: a packed `records.Group`, or a post of the Atropos wire."""


UNKNOWN_VERSION: Final = -1
"""Policy version of groups whose policy is unknown; they are never stale."""


class GroupPut(msgspec.Struct, frozen=True, kw_only=True):
    """One group to be stored.

    Args:
        group_id: unique in the store; putting an id again changes nothing.
        env: name of the environment that made it.
        format: the encoding of `body`.
        body: opaque bytes.
        size: logical group size: trajectories, or rows for posts of the Atropos wire.
        tokens: training tokens over all sequences.
        max_length: tokens of the longest sequence.
        policy_version: the lowest version that sampled any of its tokens (-1: unknown).
        env_id: number of a registered Atropos environment.
        state: queued (can be leased at once), buffered (waits for `move`), or dropped (never
            leased, but can be read by id; kept as long as delivered groups).
        scored: its contribution to the estimate of its task; None if it has no task.
        facts: what lists of groups show.
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
    facts: GroupFacts | None = None


class GroupRow(msgspec.Struct, frozen=True):
    """A stored group without its body. Fields as in `GroupPut`, and:

    Args:
        seq: order of arrival; grows and is never reused.
        state: in the queue of the run that asks, otherwise in the shared queue.
        lease_id: the group's lease in that queue, or its last one if that expired.
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
    """A group whose stored body cannot be read, the reason, and when that was detected."""

    group_id: str
    reason: str
    found_at: float


class Lease(msgspec.Struct, frozen=True):
    """Groups leased to one run. If it does not ack them before `expires_at`, they are queued
    again.
    """

    lease_id: str
    run: str
    expires_at: float
    groups: list[GroupRow]


ATROPOS_RUN = "atropos"
"""Name of the run of the trainer on the Atropos wire; its `batch_size` counts sequences."""


class Run(msgspec.Struct, frozen=True):
    """One trainer's (or one export's) subscription.

    Args:
        batch_size: what it leases at a time, in its own unit.
        settings: JSON-like.
        policy_version: the last version that it published (-1: none yet).
        state: a closed run cannot lease.
        delivery: whether it shares groups with other runs or gets all of them.
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
    """A point to which a run can rewind.

    Args:
        acked_groups: groups that the run had acked by then, including those of this checkpoint.
    """

    name: str
    acked_groups: int
    created_at: float


class Compacted(msgspec.Struct, frozen=True):
    """Counts of what retention removed.

    Args:
        groups: groups of which only the id is kept.
        stored_bytes: size of their bodies in the database.
        leases: leases that had ended.
    """

    groups: int
    stored_bytes: int
    leases: int
