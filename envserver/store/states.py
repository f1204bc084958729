"""The life of a group and of a lease, as data: the states and what leads from one to another.

    buffered ──move──▶ queued ──lease──▶ leased ──ack──▶ acked
       │                 │  ◀──give_back──┘
       └──────move───────┴──▶ dropped

A group is handed out only while queued, and acked and dropped are ends: nothing acknowledged is
ever delivered again. Buffered groups are accepted too and wait for others.

A lease is open until it is acked, nacked (given back) or expired. An expired lease whose groups
nobody else has taken is still good: `resume` opens it again, which is how a late ack counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal, get_args

from ..errors import ConflictError

GroupState = Literal["buffered", "queued", "leased", "acked", "dropped"]
LeaseState = Literal["open", "expired", "acked", "nacked"]
RunState = Literal["open", "closed"]
GroupEvent = Literal["move", "lease", "ack", "give_back"]
LeaseEvent = Literal["ack", "nack", "expire", "resume"]

GROUP_STATES: Final[tuple[GroupState, ...]] = get_args(GroupState)
LEASE_STATES: Final[tuple[LeaseState, ...]] = get_args(LeaseState)
RUN_STATES: Final[tuple[RunState, ...]] = get_args(RunState)

FIRST_STATES: Final[frozenset[GroupState]] = frozenset({"queued", "buffered"})
"""In which a group may be put."""

GROUP_TRANSITIONS: Final[Mapping[tuple[GroupState, GroupState], GroupEvent]] = {
    ("buffered", "queued"): "move",
    ("buffered", "dropped"): "move",
    ("queued", "dropped"): "move",
    ("queued", "leased"): "lease",
    ("leased", "acked"): "ack",
    ("leased", "queued"): "give_back",
}

LEASE_TRANSITIONS: Final[Mapping[tuple[LeaseState, LeaseState], LeaseEvent]] = {
    ("open", "acked"): "ack",
    ("open", "nacked"): "nack",
    ("open", "expired"): "expire",
    ("expired", "open"): "resume",
}


def check_group(group_id: str, source: GroupState, target: GroupState, event: GroupEvent) -> None:
    """Allows `event` to take a group from `source` to `target`.

    Raises:
        ConflictError: the table has no such transition.
    """
    if GROUP_TRANSITIONS.get((source, target)) != event:
        raise ConflictError(
            f"Group {group_id} is {source}; {event} cannot make it {target}.",
            group_id=group_id,
            state=source,
        )


def check_lease(lease_id: str, source: LeaseState, target: LeaseState) -> None:
    """Allows a lease to go from `source` to `target`.

    Raises:
        ConflictError: the table has no such transition.
    """
    if (source, target) not in LEASE_TRANSITIONS:
        raise ConflictError(
            f"Lease {lease_id} is {source} and cannot become {target}.",
            lease_id=lease_id,
            state=source,
        )
