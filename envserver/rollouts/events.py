"""Events of rollouts and groups, and the interfaces of what receives them."""

from __future__ import annotations

from typing import Protocol

import msgspec
from envserver_records.errors import Failure
from envserver_records.records import Group, Usage

from .estimates import Scored
from .policy import Alike, Untrained


class RolloutFailed(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt failed. `final`: it is not retried, the rollout is lost."""

    group_id: str
    index: int
    task_id: str
    rollout_id: str
    attempt: int
    failure: Failure
    final: bool
    at: float


class RolloutScored(msgspec.Struct, frozen=True, kw_only=True):
    """One rollout has a score. Seconds are wall clock. `scorable`: whether the score has a reward,
    which `score_group` may still change: rewards are shown from delivered groups only.

    `flags` say what is odd about its tokens, see `tokens.flags`; `limit`: what ended it, None when
    its agent did; `untrained`: tokens that flags mask or drop; `usage`: with its scoring and
    its cost, without its share of `score_group`.
    """

    group_id: str
    rollout_id: str
    scorable: bool
    turns: int
    completion_tokens: int
    seconds: float
    flags: list[str] = msgspec.field(default_factory=list)
    prompt_tokens: int = 0
    limit: str | None = None
    untrained: Untrained = Untrained()
    usage: Usage | None = None


class GroupDropped(msgspec.Struct, frozen=True, kw_only=True):
    """A group was not delivered.

    Args:
        reason: zero_variance, incomplete, unscorable, too_long, stale or untrained.
        failed: whether that counts as a failure (a filtered group does not).
        scored: its result for the curriculum; None if too few rollouts were scored.
        alike: see `policy.alike`; known of groups that were dropped for zero variance.
    """

    group_id: str
    index: int
    task_id: str
    reason: str
    failed: bool
    message: str
    at: float
    scored: Scored | None = None
    alike: tuple[Alike, ...] = ()


class GroupDelivered(msgspec.Struct, frozen=True, kw_only=True):
    """A group is stored durably in the sink."""

    group: Group


Event = RolloutFailed | RolloutScored | GroupDropped | GroupDelivered


class Observer(Protocol):
    """Receives each event in order, on the event loop; must not block."""

    def __call__(self, event: Event) -> None: ...


class GroupSink(Protocol):
    """Receives finished groups."""

    async def put(self, group: Group) -> None:
        """Returns when `group` is durable; the same `group_id` twice is stored once."""

    async def known(self, group_ids: list[str]) -> set[str]:
        """Returns the ids of groups that need not be made again."""

    async def wait_for_capacity(self) -> None:
        """Waits until another group may start."""
