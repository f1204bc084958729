"""The operations of the Atropos protocol over the durable store.

A post is answered after its groups are on disk. A batch is formed, leased and recorded under one
lock, oldest first. A delivered group is never delivered again unless its trainer uses leases and
let one expire."""

from __future__ import annotations

import asyncio
import copy
import hashlib
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec
import structlog
from envserver_records.errors import ConflictError, NotFoundError, StoreError, StoreFull
from msgspec import structs

from ..formats.atropos import ScoreRange
from ..rollouts.estimates import scored
from ..runners.runner import Heartbeats
from ..store import ATROPOS_RUN, UNKNOWN_VERSION, GroupPut, GroupRow, Store, packed
from ..store.deliveries import DamagedBodies
from ..store.groups import EncodedPut
from ..store.leases import LeaseFacts
from ..store.packed import facts_of_rewards
from .atropos_batches import (
    KEY,
    BrokenBody,
    EncodedGroups,
    Formed,
    Lane,
    Registered,
    View,
    Waiting,
    WireState,
    as_waiting,
    environment_status,
    form_batches,
    grown_group_size,
)
from .atropos_posts import EnvironmentRegistration, PostedGroup, Registration

_INT64: Final = 2**63


class Posts:
    """Stores posts; `under_way` contains the ids of groups being stored right now. `version`:
    returns the current policy version, which is that of groups that name none: their tokens are not
    newer."""

    def __init__(self, store: Store, view: View, version: Callable[[], int]) -> None:
        self._version = version
        self._store = store
        self._view = view
        self.under_way: set[str] = set()

    def any_part(self, groups: Sequence[PostedGroup], state: WireState) -> bool:
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
        """Stores groups of which some are parts; calls must not run concurrently. Returns the
        answers, as for `whole`, and whether all groups that became whole could be queued."""
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


def _id_of(key: str) -> str:
    digest = hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()
    return f"atropos-{digest[:40]}"


def _group_id(key: str | None, index: int) -> str:
    return f"atropos-{uuid.uuid4().hex}" if key is None else f"{_id_of(key)}-{index}"


def _as_puts(
    groups: Sequence[PostedGroup], key: str | None, state: WireState, version: int
) -> list[EncodedPut]:
    encoded: list[EncodedPut] = []
    for index, group in enumerate(groups):
        put = _as_put(group, _group_id(key, index), state, version)
        encoded.append(EncodedPut(put, *(group.encoded or packed.encode(put.body))))
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


log = structlog.get_logger(__name__)

_MOST_ENVIRONMENTS: Final = 4096
_TRIES: Final = 5


class Batch(msgspec.Struct, frozen=True):
    """Encoded groups, with a lease id if the trainer acknowledges; or why there is no batch."""

    groups: list[bytes] | None
    reason: str = ""
    lease_id: str | None = None


class AtroposService:
    """The Atropos service of an app; call `load` first.

    Args:
        lease_seconds: time after which an unacknowledged batch is delivered again, for trainers
            that acknowledge.
        include_messages, score_range: how native groups are encoded.
        longest_row: tokens that a row of a native group may have.
        silent_after_seconds: an environment silent for this long loses its minimum share.
        minimums: returns the minimum shares of the runners that are alive, by environment name.
    """

    def __init__(
        self,
        store: Store,
        *,
        lease_seconds: float,
        include_messages: bool = True,
        score_range: ScoreRange = "unit",
        longest_row: int = 0,
        silent_after_seconds: float = 30.0,
        minimums: Callable[[], Mapping[str, float]] = dict,
        version: Callable[[], int] = lambda: UNKNOWN_VERSION,
    ) -> None:
        self._store = store
        self._longest_row = longest_row
        self._minimums = minimums
        self._lease_seconds = lease_seconds
        self._state = WireState()
        self._view = View()
        self._heartbeats = Heartbeats(silent_after_seconds)
        self._encoded = EncodedGroups(
            store, include_messages=include_messages, score_range=score_range
        )
        self._posts = Posts(store, self._view, version)
        self._lock = asyncio.Lock()
        self._stale = False
        self._undelivered: list[str] = []
        self._last_reason = ""
        self._refused: Counter[str] = Counter()

    async def load(self) -> None:
        """Restores the state after any kind of shutdown."""
        async with self._lock:
            self._state = msgspec.convert(await self._store.get_value(KEY) or {}, WireState)
            await self._ensure_run()
            ahead = self._state.ahead
            await self._reload()
            self._view.latest = self._view.latest or self._state.latest
            again = self._formable().batches[:ahead]
            self._view.add_formed(again)
            self._state.ahead = len(self._view.formed)

    async def _ensure_run(self) -> None:
        try:
            await self._store.get_run(ATROPOS_RUN)
        except NotFoundError:
            await self._store.create_run(ATROPOS_RUN, batch_size=0)

    # Trainer

    async def register(self, registration: Registration) -> int:
        """Starts a new run, keeping the waiting groups; returns a number for the trainer."""
        async with self._lock:
            draft = copy.deepcopy(self._state)
            draft.register(registration)
            await self._save(draft)
            await self._store.set_run(ATROPOS_RUN, batch_size=max(0, registration.batch_size))
            self._view.dissolve_formed()
        if 0 < registration.max_token_len < self._longest_row:
            log.warning(
                "rows_may_be_too_long",
                trainer_takes=registration.max_token_len,
                longest=self._longest_row,
                hint="Set env.max_token_length to what the trainer takes (its max_token_len).",
            )
        return uuid.uuid4().int

    @property
    def state(self) -> WireState:
        return self._state

    async def queue_size(self) -> int:
        await self._follow_store()
        return len(self._view.queue)

    async def batch(self, *, leased: bool, key: str | None = None) -> Batch:
        """Returns the oldest batch.

        Args:
            leased: whether the trainer acknowledges; otherwise fetching a batch acknowledges it.
            key: a repeated request with the same key gets the same batch.
        """
        async with self._lock:
            if not self._state.registered:
                return Batch(None, "no trainer is registered")
            await self._give_back_undelivered()
            lease_id = None if key is None else _id_of(key)
            if lease_id is not None and (known := await self._find_lease(lease_id)) is not None:
                if known.state in ("open", "acked"):
                    return await self._deliver_again(known, leased)
                lease_id = None  # it has ended, and its groups are waiting
            first = not self._state.started
            self._state.started = True
            for _ in range(_TRIES):
                await self._follow_store_exactly()
                reason = self._form()
                if not self._view.formed:
                    if first:
                        await self._save(self._state)
                    return Batch(None, reason)
                batch = await self._deliver(leased, lease_id)
                if batch is not None:
                    return batch
            return Batch(None, "the groups of the batch are gone; try again")

    async def _find_lease(self, lease_id: str) -> LeaseFacts | None:
        try:
            return await self._store.find_lease(lease_id)
        except NotFoundError:
            return None

    async def _deliver_again(self, known: LeaseFacts, leased: bool) -> Batch:
        rows = await self._store.rows(known.group_ids)
        bodies = await self._encoded.get([as_waiting(row) for row in rows])
        if not leased:
            await self._store.ack(known.lease_id)
        return Batch(bodies, lease_id=known.lease_id if leased else None)

    async def _deliver(self, leased: bool, lease_id: str | None) -> Batch | None:
        groups = self._view.formed[0]
        ids = [group.group_id for group in groups]
        try:
            bodies = await self._encoded.get(groups)
        except BrokenBody as error:
            # Left in the queue, it would block every later batch.
            log.error("group_dropped", error=str(error))
            await self._store.move([error.detail["group_id"]], "dropped")
            self._stale = True
            return None
        except DamagedBodies as error:
            await self._store.drop_damaged(error.reasons)
            self._stale = True
            return None
        try:
            lease = await self._store.lease(
                ATROPOS_RUN, group_ids=ids, seconds=self._lease_seconds, lease_id=lease_id
            )
        except (ConflictError, NotFoundError):
            lease = None
        if lease is None:
            self._stale = True
            return None
        self._view.formed.popleft()
        self._state.ahead = len(self._view.formed)
        self._state.latest = self._view.latest
        if leased:
            self._state.leases[lease.lease_id] = ids
        try:
            await self._save(self._state)
            if not leased:
                await self._store.ack(lease.lease_id)
        except StoreError:
            # This trainer does not get the batch; the next request does.
            self._state.leases[lease.lease_id] = ids
            self._undelivered.append(lease.lease_id)
            raise
        for group in groups:
            self._encoded.forget(group)
        return Batch(bodies, lease_id=lease.lease_id if leased else None)

    async def _give_back_undelivered(self) -> None:
        while self._undelivered:
            await self._give_back(self._undelivered[-1])
            self._undelivered.pop()
            self._stale = True

    async def acknowledge(self, lease_id: str) -> None:
        async with self._lock:
            await self._store.ack(lease_id)
            # A late ack: the groups were about to be delivered again.
            self._stale = True
            if self._state.leases.pop(lease_id, None) is not None:
                await self._save(self._state)

    async def latest(self) -> bytes | None:
        """Returns the group queued last, as JSON; None if there is none."""
        await self._follow_store()
        latest = self._view.latest
        if latest is None:
            return None
        try:
            return (await self._encoded.get([latest]))[0]
        except (NotFoundError, BrokenBody, DamagedBodies):
            return None

    async def reset(self) -> None:
        """Drops the waiting groups that only this trainer gets; forgets it and the environments."""
        async with self._lock:
            for lease_id in self._state.leases:
                await self._give_back(lease_id)
            await self._drop_own()
            await self._save(self._state.after_reset(self._view.latest))
            self._view.clear()
            self._heartbeats.clear()
            # Groups posted in the meantime are in the store but not in the view.
            self._stale = True

    async def _give_back(self, lease_id: str) -> None:
        try:
            await self._store.nack(lease_id)
        except (ConflictError, NotFoundError) as error:
            log.info("lease_had_ended", lease_id=lease_id, why=error.message)

    async def _drop_own(self) -> None:
        for _ in range(_TRIES):
            rows = await self._store.pending()
            ids = [
                row.group_id
                for row in rows
                if row.group_id not in self._posts.under_way and not self._others_take(row)
            ]
            try:
                await self._store.move(ids, "dropped")
                log.info("queue_reset", dropped=len(ids), kept_for_others=len(rows) - len(ids))
                return
            except ConflictError as error:
                log.info("group_leased_while_dropping", why=error.message)
        raise ConflictError("Groups are being leased faster than they can be dropped; try again.")

    def _others_take(self, row: GroupRow) -> bool:
        return row.state == "queued" and any(
            run.delivery == "shared" and (not run.environments or row.env in run.environments)
            for name, run in self._store.open_runs.items()
            if name != ATROPOS_RUN
        )

    # Environments

    async def register_environment(self, wanted: EnvironmentRegistration) -> int | None:
        """Returns the environment's number; None until a trainer has asked for a batch."""
        async with self._lock:
            if not self._state.started:
                return None
            if len(self._state.environments) >= _MOST_ENVIRONMENTS:
                raise StoreFull(f"No more than {_MOST_ENVIRONMENTS} environments can register.")
            draft = copy.deepcopy(self._state)
            before = sum(e.desired_name == wanted.desired_name for e in draft.environments)
            real_name = f"{wanted.desired_name}_{before}"
            draft.environments.append(Registered(real_name=real_name, **wanted.model_dump()))
            env_id = len(draft.environments) - 1
            await self._save(draft)
            self._heartbeats.hear(env_id)
            return env_id

    async def disconnect(self, env_id: int) -> bool:
        """Disconnects an environment, which no longer counts; returns whether it was registered."""
        async with self._lock:
            if not self._state.knows(env_id):
                return False
            draft = copy.deepcopy(self._state)
            draft.environments[env_id].connected = False
            await self._save(draft)
            return True

    async def environment_status(self, env_id: int) -> dict[str, float]:
        await self._follow_store()
        if not self._state.knows(env_id):
            raise NotFoundError(f"No environment is registered as {env_id}.", env_id=env_id)
        self._heartbeats.hear(env_id)
        environments, queue = self._state.environments, self._view.queue
        grown = grown_group_size(queue, environments, env_id)
        if grown != environments[env_id].group_size:
            async with self._lock:
                environments[env_id].group_size = grown
                await self._save(self._state)
        return environment_status(
            queue,
            environments,
            env_id,
            batch_size=self._state.batch_size,
            step=self._state.step,
        )

    async def post(self, groups: Sequence[PostedGroup], key: str | None) -> list[int | None]:
        """Stores groups, all or none; durable on return. The same `key` (the client's
        Idempotency-Key) never stores a group twice. Returns for each group None if it is queued,
        else the number of sequences now in its environment's buffer."""
        for group in groups:
            if group.env_id is not None and self._state.knows(group.env_id):
                self._heartbeats.hear(group.env_id)
        if not self._posts.any_part(groups, self._state):
            return await self._posts.whole(groups, key, self._state)
        async with self._lock:
            answers, complete = await self._posts.parts(groups, key, self._state)
            self._stale = self._stale or not complete
            return answers

    # The server

    def store_changed(self) -> None:
        """Notes that groups were leased, returned or expired outside this service."""
        self._stale = True

    async def lease_closed(self, lease_id: str) -> None:
        """Handles a lease that was acknowledged or returned outside this protocol."""
        self._stale = True
        if lease_id in self._state.leases:
            async with self._lock:
                self._state.leases.pop(lease_id, None)
                await self._save(self._state)

    def environment_names(self) -> set[str]:
        return {env.desired_name for env in self._state.environments}

    def count_refusal(self, kind: str) -> None:
        self._refused[kind] += 1

    def snapshot(self) -> dict[str, Any]:
        state, view = self._state, self._view
        return {
            "registered": state.registered,
            "started": state.started,
            "batch_size": state.batch_size,
            "step": state.step,
            "queued_groups": len(view.queue),
            "buffered_groups": sum(len(parts) for parts in view.buffers.values()),
            "formed_batches": len(view.formed),
            "leased_batches": len(state.leases),
            "refused_posts": dict(self._refused),
            "environments": [
                {
                    "name": env.real_name,
                    "connected": env.connected,
                    "silent": self._heartbeats.is_silent(env_id),
                    "group_size": env.group_size,
                    "min_batch_allocation": env.min_batch_allocation,
                }
                for env_id, env in enumerate(state.environments)
            ],
        }

    def _form(self) -> str:
        """Forms batches if none is left; returns the reason if no further batch could be formed."""
        if self._view.formed:
            return ""
        formed = self._formable()
        self._view.add_formed(formed.batches)
        self._state.step += len(formed.batches)
        self._state.ahead = len(self._view.formed)
        if not formed.batches and formed.reason != self._last_reason:
            log.info("no_batch", reason=formed.reason)
        self._last_reason = formed.reason
        return formed.reason

    def _formable(self) -> Formed:
        minimums: dict[Lane, float] = {
            env_id: env.min_batch_allocation
            for env_id, env in enumerate(self._state.environments)
            if env.connected
            and env.min_batch_allocation is not None
            and not self._heartbeats.is_silent(env_id)
        }
        for name, share in self._minimums().items():
            minimums[name] = share
        return form_batches(list(self._view.queue), self._state.batch_size, minimums)

    async def _follow_store(self) -> None:
        """Reloads the view if the store holds groups that the view does not know, or the reverse.
        Posts in progress may be counted or not."""
        slack = len(self._posts.under_way)
        if self._stale or not 0 <= await self._unknown() <= slack:
            async with self._lock:
                await self._reload()

    async def _follow_store_exactly(self) -> None:
        if self._stale or await self._unknown():
            await self._reload()

    async def _unknown(self) -> int:
        counts = await self._store.counts()
        return counts["queued"] + counts["buffered"] - len(self._view)

    async def _reload(self) -> None:
        self._stale = False
        before = self._view.ids()
        rows = await self._store.pending()
        self._view.merge(rows, before=before, skip=self._posts.under_way)
        self._view.take_back(self._state)
        self._state.ahead = len(self._view.formed)
        if not await self._posts.flush_all(self._state):
            self._stale = True

    async def _save(self, state: WireState) -> None:
        await self._store.set_value(KEY, msgspec.to_builtins(state))
        self._state = state
