"""The records that go into the store and come out. Times are `time.time()` seconds."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Set
from contextlib import suppress
from typing import Any, Final, Literal, get_args

import msgspec
from envserver_records.errors import ConflictError

from ..rollouts.estimates import Scored
from ..telemetry.numbers import SHORT_SECONDS, Distribution
from .packed import GroupFacts

# A delivery is one group in one queue:
#
#     buffered ──move──▶ queued ──lease──▶ leased ──ack──▶ acked
#        │                 │  ◀──give_back──┘                │
#        │                 │  ◀─────────────rewind───────────┘
#        └──────move───────┴──move, drop_stale, compact──▶ dropped
#
# And set_aside leads from leased, drop_damaged from buffered, queued and leased to dropped.
#
# Only queued groups are leased. Acked is final unless the run rewinds to a checkpoint; dropped is
# always final. Buffered groups are accepted as well and wait for others.
#
# A lease is open until it is acked, nacked (given back) or expired. An expired lease whose groups
# have not been leased again is still valid: `resume` opens it again, so a late ack counts. Closing
# or rewinding a run revokes its leases: a revoked lease can no longer be acked or nacked.

GroupState = Literal["buffered", "queued", "leased", "acked", "dropped"]
LeaseState = Literal["open", "expired", "acked", "nacked", "revoked"]
RunState = Literal["open", "closed"]
GroupEvent = Literal[
    "move",
    "lease",
    "ack",
    "give_back",
    "set_aside",
    "rewind",
    "drop_stale",
    "drop_damaged",
    "compact",
]
LeaseEvent = Literal["ack", "nack", "expire", "resume", "close", "rewind"]

GROUP_STATES: Final[tuple[GroupState, ...]] = get_args(GroupState)
LEASE_STATES: Final[tuple[LeaseState, ...]] = get_args(LeaseState)
RUN_STATES: Final[tuple[RunState, ...]] = get_args(RunState)

FIRST_STATES: Final[frozenset[GroupState]] = frozenset({"queued", "buffered", "dropped"})
"""States in which a group may be put; one put as dropped is for no run, but can be read by id."""

SETTLED: Final[frozenset[GroupState]] = frozenset({"acked", "dropped"})
"""Final states: the delivery waits for nothing any more."""

GROUP_TRANSITIONS: Final[Mapping[GroupEvent, Set[tuple[GroupState, GroupState]]]] = {
    "move": {("buffered", "queued"), ("buffered", "dropped"), ("queued", "dropped")},
    "lease": {("queued", "leased")},
    "ack": {("leased", "acked")},
    "give_back": {("leased", "queued")},
    "set_aside": {("leased", "dropped")},
    "rewind": {("acked", "queued")},
    "drop_stale": {("queued", "dropped")},
    "drop_damaged": {("buffered", "dropped"), ("queued", "dropped"), ("leased", "dropped")},
    "compact": {("queued", "dropped")},
}

LEASE_TRANSITIONS: Final[Mapping[LeaseEvent, Set[tuple[LeaseState, LeaseState]]]] = {
    "ack": {("open", "acked")},
    "nack": {("open", "nacked")},
    "expire": {("open", "expired")},
    "resume": {("expired", "open")},
    "close": {("open", "revoked"), ("expired", "revoked")},
    "rewind": {("open", "revoked"), ("expired", "revoked"), ("acked", "revoked")},
}


def check_group(group_id: str, source: GroupState, target: GroupState, event: GroupEvent) -> None:
    if (source, target) not in GROUP_TRANSITIONS[event]:
        raise ConflictError(
            f"Group {group_id} is {source}; {event} cannot make it {target}.",
            group_id=group_id,
            state=source,
        )


def check_lease(lease_id: str, source: LeaseState, target: LeaseState, event: LeaseEvent) -> None:
    if (source, target) not in LEASE_TRANSITIONS[event]:
        raise ConflictError(
            f"Lease {lease_id} is {source}, which is final.",
            hint="Its run was closed or rewound to a checkpoint." if source == "revoked" else "",
            lease_id=lease_id,
            state=source,
        )


Delivery = Literal["shared", "broadcast"]
"""shared: each group goes to one of these runs; broadcast: the run gets every group."""

Format = Literal["group", "group-shares", "atropos"]
"""The encoding of a body: a packed `records.Group` (`wire.NATIVE`), or an Atropos API's post."""


UNKNOWN_VERSION: Final = -1
"""Policy version of groups whose policy is unknown; they are never stale."""


class GroupPut(msgspec.Struct, frozen=True, kw_only=True):
    """One group to be stored; putting an id again changes nothing.

    Args:
        env: name of the environment that made it.
        body: opaque bytes.
        size: logical group size: trajectories, or rows for posts of the Atropos API.
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
    group_id: str
    reason: str
    found_at: float


class Lease(msgspec.Struct, frozen=True):
    """Groups leased to one run; queued again if it does not ack them before `expires_at`."""

    lease_id: str
    run: str
    expires_at: float
    groups: list[GroupRow]


ATROPOS_RUN = "atropos"
"""Name of the run of the trainer on the Atropos API; its `batch_size` counts sequences."""


class Run(msgspec.Struct, frozen=True):
    """One trainer's (or one export's) subscription.

    Args:
        batch_size: what it leases at a time, in its own unit.
        policy_version: the last version that it published (-1: none yet).
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
    name: str
    acked_groups: int
    created_at: float


class Compacted(msgspec.Struct, frozen=True):
    """What retention removed; `stored_bytes`: size of the groups' bodies in the database."""

    groups: int
    stored_bytes: int
    leases: int


_SIZES: Final = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0)


_MOST_ENVIRONMENTS: Final = 200
_OTHER: Final = "other"


class Arrived:
    """The groups of one environment, local and remote. `rewards` has no bounds: sum and count."""

    def __init__(self) -> None:
        self.groups = self.equal = self.tokens = 0
        self.rewards = Distribution(())

    def add(self, facts: GroupFacts | None) -> None:
        self.groups += 1
        if facts is None or facts.reward_mean is None:
            return
        self.equal += facts.rated > 1 and facts.reward_min == facts.reward_max
        self.tokens += facts.completion_tokens or 0
        self.rewards.counts[0] += facts.rated
        self.rewards.total += facts.reward_mean * facts.rated


class StoreStatistics:
    """Counts since the store was opened.

    Args:
        commit_seconds: from a transaction's first statement until it is durable.
        commit_sizes: operations in each commit.
        leases: number of leases that were leased, acked, nacked.
        arrived: groups that were stored, by environment.
        on_lease: called with each lease that is handed out.
    """

    def __init__(self) -> None:
        self.commit_seconds = Distribution(SHORT_SECONDS)
        self.commit_sizes = Distribution(_SIZES)
        self.leases: Counter[str] = Counter()
        self.arrived: dict[str, Arrived] = {}
        self.on_lease: Callable[[Lease], None] | None = None

    def committed(self, operations: int, seconds: float) -> None:
        self.commit_seconds.add(seconds)
        self.commit_sizes.add(operations)

    def stored(self, environment: str, facts: GroupFacts | None) -> None:
        if environment not in self.arrived and len(self.arrived) >= _MOST_ENVIRONMENTS:
            environment = _OTHER
        self.arrived.setdefault(environment, Arrived()).add(facts)

    def leased(self, lease: Lease | None) -> Lease | None:
        if lease is not None:
            self.leases["leased"] += 1
            if self.on_lease is not None:
                self.on_lease(lease)
        return lease


class Changes:
    """A number that grows, and any number of coroutines that wait for it to change."""

    def __init__(self) -> None:
        self.number = 0
        self._grown = asyncio.Event()

    def announce(self, number: int) -> None:
        """Sets the number and wakes all waiting coroutines, if it is a new one."""
        if number == self.number:
            return
        self.number = number
        grown, self._grown = self._grown, asyncio.Event()
        grown.set()

    async def wait(self, since: int, timeout: float | None) -> int:
        """Returns the number as soon as it differs from `since`, or after `timeout` seconds."""
        if self.number == since:
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    await self._grown.wait()
        return self.number
