"""The native API's answers about groups: what the server writes and the client reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

GROUPS_MSGPACK: Final = "application/vnd.envserver.groups+msgpack"
"""Media type of a lease: `WireLease` in MessagePack."""
GROUP_MSGPACK: Final = "application/vnd.envserver.group+msgpack"
"""Media type of one group: `WireGroup` in MessagePack."""
LEASE_STREAM: Final = "application/vnd.envserver.stream"
"""Media type of a stream of leases: `WireLease`s in frames (`framing`), empty ones between them."""


NATIVE: Final = ("group", "group-shares")
"""Formats of a packed `records.Group`; the second says that its rows have shares of the reward, so
that clients which do not know them refuse it."""


class WireGroup(msgspec.Struct):
    """One group. `policy_version`: the lowest that sampled any of it, -1: unknown.

    `format`: how to read `body`, a view of the answer: one of `NATIVE` (`records.unpack`) or
    "atropos" (JSON).
    """

    group_id: str
    env: str
    format: str
    policy_version: int
    body: memoryview


class WireLease(msgspec.Struct):
    """Groups that are leased together. `expires_at`: seconds of the server's clock."""

    lease_id: str
    expires_at: float
    groups: Sequence[WireGroup]


class GroupSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A server's facts about a group without its rows.

    Args:
        seq: order of arrival.
        size: trajectories, or rows of a group posted over the Atropos API.
        tokens: of all its rows together.
        max_length: tokens of the longest row.
        env_id: of the environment that posted it over the Atropos API.
        state: buffered, queued, leased, acked or dropped.
        created_at: when it was accepted, in seconds of the server's clock.

    What follows is null in groups of older versions, and in posts that do not say it:
        task_id, split, model: "" if unknown.
        rewards: of its rollouts in order, 64 at most; null: not scorable.
        reward_mean, reward_min, reward_max: over all its rollouts with a reward.
        turns, seconds: of its longest rollout.
        completion_tokens: of all its rollouts.
        truncated: number of rollouts that a limit of tokens cut off.
        flags: those of any of its rollouts.
        ends: number of rollouts by how they ended: "agent" (by itself), or the limit.
        rated: number of its rollouts with a reward; solved: of those that solved the task.
    """

    seq: int
    group_id: str
    env: str
    format: str
    size: int
    tokens: int
    max_length: int
    policy_version: int
    env_id: int | None = None
    state: str
    created_at: float
    task_id: str | None = None
    split: str | None = None
    model: str | None = None
    rewards: list[float | None] | None = None
    reward_mean: float | None = None
    reward_min: float | None = None
    reward_max: float | None = None
    turns: int | None = None
    completion_tokens: int | None = None
    truncated: int | None = None
    seconds: float | None = None
    flags: list[str] | None = None
    ends: dict[str, int] | None = None
    rated: int | None = None
    solved: int | None = None
