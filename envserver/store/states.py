"""The states of deliveries, leases and runs, and which event leads from which state to which.

A delivery is one group in one queue:

    buffered ──move──▶ queued ──lease──▶ leased ──ack──▶ acked
       │                 │  ◀──give_back──┘                │
       │                 │  ◀─────────────rewind───────────┘
       └──────move───────┴──move, drop_stale, compact──▶ dropped

and set_aside leads from leased, drop_damaged from buffered, queued and leased to dropped.

Only queued groups are leased. Acked is final unless the run rewinds to a checkpoint; dropped is
always final. Buffered groups are accepted as well and wait for others.

A lease is open until it is acked, nacked (given back) or expired. An expired lease whose groups
have not been leased again is still valid: `resume` opens it again, so a late ack counts. Closing or
rewinding a run revokes its leases: a revoked lease can no longer be acked or nacked.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal, get_args

from envserver_records.errors import ConflictError

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
"""States in which a group may be put. A group put as dropped is for no run, but can be read by
id.
"""

SETTLED: Final[frozenset[GroupState]] = frozenset({"acked", "dropped"})
"""Final states: the delivery waits for nothing any more."""

GROUP_TRANSITIONS: Final[Mapping[GroupEvent, frozenset[tuple[GroupState, GroupState]]]] = {
    "move": frozenset({("buffered", "queued"), ("buffered", "dropped"), ("queued", "dropped")}),
    "lease": frozenset({("queued", "leased")}),
    "ack": frozenset({("leased", "acked")}),
    "give_back": frozenset({("leased", "queued")}),
    "set_aside": frozenset({("leased", "dropped")}),
    "rewind": frozenset({("acked", "queued")}),
    "drop_stale": frozenset({("queued", "dropped")}),
    "drop_damaged": frozenset(
        {("buffered", "dropped"), ("queued", "dropped"), ("leased", "dropped")}
    ),
    "compact": frozenset({("queued", "dropped")}),
}

LEASE_TRANSITIONS: Final[Mapping[LeaseEvent, frozenset[tuple[LeaseState, LeaseState]]]] = {
    "ack": frozenset({("open", "acked")}),
    "nack": frozenset({("open", "nacked")}),
    "expire": frozenset({("open", "expired")}),
    "resume": frozenset({("expired", "open")}),
    "close": frozenset({("open", "revoked"), ("expired", "revoked")}),
    "rewind": frozenset({("open", "revoked"), ("expired", "revoked"), ("acked", "revoked")}),
}


def check_group(group_id: str, source: GroupState, target: GroupState, event: GroupEvent) -> None:
    """Checks that `event` may take a delivery from `source` to `target`.
    Raises ConflictError: the table has no such transition.
    """
    if (source, target) not in GROUP_TRANSITIONS[event]:
        raise ConflictError(
            f"Group {group_id} is {source}; {event} cannot make it {target}.",
            group_id=group_id,
            state=source,
        )


def check_lease(lease_id: str, source: LeaseState, target: LeaseState, event: LeaseEvent) -> None:
    """Checks that `event` may take a lease from `source` to `target`.
    Raises ConflictError: the table has no such transition.
    """
    if (source, target) not in LEASE_TRANSITIONS[event]:
        raise ConflictError(
            f"Lease {lease_id} is {source}, which is final.",
            hint="Its run was closed or rewound to a checkpoint." if source == "revoked" else "",
            lease_id=lease_id,
            state=source,
        )
