"""Stores posted groups and adds them to the view.

In: checked groups. Out: stored groups, queued or, if a group came in parts, buffered until the
parts make a whole group. What holds: a group is in the view only after it is on disk.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Callable, Sequence
from typing import Final

import structlog
from envserver_records.errors import StoreError
from msgspec import structs

from ...rollouts.estimates import scored
from ...store import GroupPut, GroupStore, compression
from ...store.facts import facts_of_rewards
from ...store.groups import EncodedPut
from .batching import Waiting
from .reading import PostedGroup
from .state import WireState
from .view import View

log = structlog.get_logger(__name__)

_INT64: Final = 2**63


class Posts:
    """Stores posts; `under_way` contains the ids of groups being stored right now.

    Args:
        version: returns the current policy version, which is that of groups that name none: their
            tokens are not newer.
    """

    def __init__(self, store: GroupStore, view: View, version: Callable[[], int]) -> None:
        self._version = version
        self._store = store
        self._view = view
        self.under_way: set[str] = set()

    def any_part(self, groups: Sequence[PostedGroup], state: WireState) -> bool:
        """Returns whether one of the groups is only part of a group of its environment."""
        return any(_is_part(group, state) for group in groups)

    async def whole(
        self, groups: Sequence[PostedGroup], key: str | None, state: WireState
    ) -> list[int | None]:
        """Stores and queues whole groups. Concurrent calls are allowed and share commits."""
        for put in await self._put_new(_as_puts(groups, key, state, self._version())):
            self._view.enqueue(self._waiting(put))
        return [None] * len(groups)

    async def parts(
        self, groups: Sequence[PostedGroup], key: str | None, state: WireState
    ) -> tuple[list[int | None], bool]:
        """Stores groups of which some are parts. Calls must not run concurrently.

        Returns:
            The answers, as for `whole`, and whether all groups that became whole could be queued.
        """
        encoded = _as_puts(groups, key, state, self._version())
        puts = [item.put for item in encoded]
        new = {put.group_id for put in await self._put_new(encoded)}
        ready: list[Waiting] = []
        parts: set[str] = set()
        answers: list[int | None] = []
        for put in puts:
            env_id = put.env_id
            if put.state == "queued" or env_id is None:
                if put.group_id in new:
                    ready.append(self._waiting(put))
                answers.append(None)
                continue
            if put.group_id in new:
                self._view.buffer(env_id, self._waiting(put))
                fitting = self._view.fitting(env_id, state.environments[env_id].group_size)
                ready += fitting
                parts |= {group.group_id for group in fitting}
            answers.append(self._view.buffered_sequences(env_id))
        return answers, await self._enqueue(ready, parts)

    async def flush_all(self, state: WireState) -> bool:
        """Queues every whole group in the buffers; returns whether that succeeded."""
        flushed: list[Waiting] = []
        for env_id in list(self._view.buffers):
            if state.knows(env_id):
                size = state.environments[env_id].group_size
                while fitting := self._view.fitting(env_id, size):
                    flushed += fitting
        return await self._enqueue(flushed, {group.group_id for group in flushed})

    async def _enqueue(self, ready: Sequence[Waiting], parts: set[str]) -> bool:
        """Queues groups in order; `parts` are buffered on disk. Returns whether all were queued."""
        moved = await self._move(parts)
        for group in ready:
            if moved or group.group_id not in parts:
                self._view.enqueue(structs.replace(group, order=self._view.next_order()))
        return moved

    async def _move(self, parts: set[str]) -> bool:
        try:
            if parts:
                await self._store.move(list(parts), "queued")
        except StoreError as error:
            # The parts are accepted and stay buffered on disk; the next flush queues them.
            log.error("flush_failed", groups=len(parts), error=str(error))
            return False
        return True

    async def _put_new(self, encoded: Sequence[EncodedPut]) -> list[GroupPut]:
        """Stores the groups; returns those that were not stored before."""
        puts = [item.put for item in encoded]
        mine = {put.group_id for put in puts}
        self.under_way |= mine
        try:
            stored = await self._store.put_encoded(encoded)
        finally:
            self.under_way -= mine
        return [put for put, is_new in zip(puts, stored, strict=True) if is_new]

    def _waiting(self, put: GroupPut) -> Waiting:
        return Waiting(
            group_id=put.group_id,
            size=put.size,
            env_id=put.env_id,
            lane=put.env_id,
            order=self._view.next_order(),
        )


def _is_part(group: PostedGroup, state: WireState) -> bool:
    env_id = group.env_id
    if env_id is None or not state.knows(env_id):
        return False
    return len(group.lengths) != state.environments[env_id].group_size


def _group_id(key: str | None, index: int) -> str:
    if key is None:
        return f"atropos-{uuid.uuid4().hex}"
    digest = hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()
    return f"atropos-{digest[:40]}-{index}"


def _as_puts(
    groups: Sequence[PostedGroup], key: str | None, state: WireState, version: int
) -> list[EncodedPut]:
    encoded: list[EncodedPut] = []
    for index, group in enumerate(groups):
        put = _as_put(group, _group_id(key, index), state, version)
        encoded.append(EncodedPut(put, *(group.encoded or compression.encode(put.body))))
    return encoded


def _as_put(group: PostedGroup, group_id: str, state: WireState, version: int) -> GroupPut:
    env_id = group.env_id
    lengths = group.lengths
    known = env_id is not None and state.knows(env_id)
    # The name that it asked for, which is the same after its restart.
    env = state.environments[env_id].desired_name if known and env_id is not None else "atropos"
    task_id = group.task_id
    if group.policy_version is not None:
        version = group.policy_version
    return GroupPut(
        group_id=group_id,
        env=env,
        format="atropos",
        body=group.body,
        size=len(lengths),
        tokens=sum(lengths),
        max_length=max(lengths),
        policy_version=version,
        env_id=env_id if env_id is not None and -_INT64 <= env_id < _INT64 else None,
        state="buffered" if _is_part(group, state) else "queued",
        scored=scored(group_id, env, "train", task_id, group.scores, version) if task_id else None,
        facts=facts_of_rewards(group.scores, task_id),
    )
