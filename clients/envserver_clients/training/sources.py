"""Gets batches from a server over its native wire or the Atropos wire, in the same form."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Final, Protocol

from envserver_records import EnvserverError, InputError, NotFoundError

from envserver_clients.adapters.atropos import AtroposTrainerClient
from envserver_clients.http import Retries, SyncEnvClient
from envserver_clients.records import Batch, ClientGroup

from .advantages import AdvantageSettings, group_advantages, rewards_of
from .checkpoints import CheckpointInfo
from .guard import SKIPPED, Guard, GuardSettings
from .settings import TrainerSettings

log = logging.getLogger(__name__)

_LEASE_SECONDS: Final = 600.0
_WAIT_SECONDS: Final = 5.0
_PATIENT: Final = Retries(tries=40, longest_pause_seconds=5.0)
"""Allows three minutes for a restart of the server."""


class Source(Protocol):
    """Provides batches for one trainer."""

    def resume(self, saved: CheckpointInfo) -> None:
        """Goes back to a checkpoint; step 0 is the beginning. Call this first, once."""

    def batches(self) -> Iterator[Batch]:
        """Yields batches; ends after a long time without one."""

    def done(self, batch: Batch, checkpoint: str | None) -> None:
        """Acknowledges a batch; `checkpoint` contains what was learned from it."""


class _Leasing(ABC):
    """Leases batches, and judges what the server drops while none comes.

    Args:
        client: an open client.
        idle_seconds: end after this time without a batch.
        groups: per batch.
        guard: how many batches in a row may be replaced as a whole, or dropped by the server.
        sampling: replace groups whose advantages by these rules are all 0 (native wire only); None:
            keep them.
    """

    _client: SyncEnvClient | AtroposTrainerClient

    def __init__(
        self,
        client: SyncEnvClient | AtroposTrainerClient,
        *,
        idle_seconds: float,
        groups: int = 8,
        sampling: AdvantageSettings | None = None,
        guard: GuardSettings | None = None,
    ) -> None:
        self._client = client
        self._idle_seconds = idle_seconds
        self._groups = groups
        self._dropped: Counter[str] | None = None
        self._sampling = sampling
        self._guard = Guard(guard or GuardSettings())

    def batches(self) -> Iterator[Batch]:
        """Raises NothingLearned: all groups of too many batches in a row were replaced or
        dropped.
        """
        last = time.monotonic()
        while time.monotonic() - last < self._idle_seconds:
            # Short waits: a trainer that must stop should not wait long for the answer.
            if batch := self._client.lease(wait_seconds=_WAIT_SECONDS):
                if self._takes(batch):
                    self._guard.judge({})
                    yield batch
                self._dropped = None
                last = time.monotonic()
            else:
                self._judge_dropped()

    @abstractmethod
    def _takes(self, batch: Batch) -> bool:
        """Returns whether to learn from `batch`; gives it back otherwise."""

    def _judge_dropped(self) -> None:
        """Judges the groups that the server dropped since the last batch, a batch at a time."""
        server = self._client.status().get("server", {})
        dropped = Counter(server.get("groups_dropped"))
        before = dropped if self._dropped is None else self._dropped
        new = dropped - before
        if enough := new.total() >= self._groups:
            reasons = ", ".join(f"{count} {reason}" for reason, count in new.most_common())
            if failure := server.get("latest_failure"):
                reasons += f"; latest failure: {failure}"
            self._guard.judge({SKIPPED: "dropped", "reasons": reasons})
        self._dropped = dropped if enough else before


class NativeSource(_Leasing):
    """Leases batches of a run: see `envserver_clients.http`."""

    _client: SyncEnvClient

    def resume(self, saved: CheckpointInfo) -> None:
        if saved.step == 0:
            self._client.resume(None)
            return
        self._acknowledge_again(saved)
        try:
            self._client.resume(saved.name)
        except NotFoundError as error:
            raise NotFoundError(
                f"The server does not know the checkpoint {saved.name}: {error.message}",
                hint="It has another store, or others got the last batch while this trainer "
                "was away. Start again with another --output and --run.",
            ) from error

    def _acknowledge_again(self, saved: CheckpointInfo) -> None:
        """Repeats the last acknowledgement, which the server may not have received."""
        if not saved.lease_id:
            return
        try:
            self._client.ack(saved.lease_id, checkpoint=saved.name)
        except EnvserverError as error:
            log.warning("lease %s is not acknowledged again: %s", saved.lease_id, error)

    def _takes(self, batch: Batch) -> bool:
        if not self._is_usable(batch):
            self._client.ack(batch)
            return False
        if self._replaces(batch):
            # The others are the first of the next lease.
            self._client.nack(batch, reason="dynamic sampling")
            return False
        return True

    def _is_usable(self, batch: Batch) -> bool:
        """Sets groups aside that cannot be read; returns whether any are left."""
        if unread := _unread(batch):
            log.error("groups are set aside: %s", "; ".join(unread.values()))
            self._client.set_aside(batch, list(unread), reason="unreadable")
        return bool(batch.groups)

    def _replaces(self, batch: Batch) -> bool:
        """Sets groups aside that teach nothing; returns whether there were any."""
        rules = self._sampling
        if rules is None:
            return False
        equal = [
            group.group_id
            for group in batch.groups
            if not any(one.teaches for one in group_advantages(group.rows, rules))
        ]
        if equal:
            self._client.set_aside(batch, equal, reason="equal rewards")
        rewards = [reward for one in batch.groups for reward in rewards_of(one.rows).values()]
        is_waste = rewards and len(equal) == len(batch.groups)
        mean = sum(rewards) / max(1, len(rewards))
        self._guard.judge({SKIPPED: "equal", "reward_mean": mean} if is_waste else {})
        return bool(equal)

    def done(self, batch: Batch, checkpoint: str | None) -> None:
        self._client.ack(batch, checkpoint=checkpoint)


def _unread(batch: Batch) -> dict[str, str]:
    """Removes groups that cannot be read; returns why, by their ids."""
    unread = {group.group_id: error for group in batch.groups if (error := _unreadable(group))}
    batch.groups = [group for group in batch.groups if group.group_id not in unread]
    return unread


def _unreadable(group: ClientGroup) -> str:
    try:
        _ = group.rows
    except InputError as error:
        return error.message
    return ""


class AtroposSource(_Leasing):
    """Fetches batches over the Atropos wire.

    The server remembers what was fetched, not what a checkpoint contains: after a restart the
    unacknowledged batch comes again; acknowledged batches since the checkpoint are lost.
    """

    _client: AtroposTrainerClient

    def resume(self, saved: CheckpointInfo) -> None:
        if saved.lease_id:
            try:
                self._client.ack(saved.lease_id)
            except EnvserverError as error:
                log.warning("lease %s is not acknowledged again: %s", saved.lease_id, error)

    def _takes(self, batch: Batch) -> bool:
        if unread := _unread(batch):
            log.error("groups are left out: %s", "; ".join(unread.values()))
        return True

    def done(self, batch: Batch, checkpoint: str | None) -> None:
        self._client.ack(batch)


def open_source(settings: TrainerSettings, stack: ExitStack) -> tuple[Source, SyncEnvClient | None]:
    """The source of `settings`, and the client that publishes versions (None: the Atropos wire has
    none).
    """
    idle_seconds = settings.idle_minutes * 60
    if settings.wire == "atropos":
        stock = AtroposTrainerClient(
            settings.server,
            group_size=settings.group_size,
            batch_size=settings.groups,
            max_token_length=settings.max_tokens,
            steps=settings.steps or 1_000_000,
            acknowledged=True,
            token=settings.token or None,
            retries=_PATIENT,
        )
        stack.enter_context(stock)
        source = AtroposSource(
            stock, idle_seconds=idle_seconds, groups=settings.groups, guard=settings.guard()
        )
        return source, None
    client = SyncEnvClient(
        settings.server,
        run=settings.run,
        environments=settings.environments,
        batch_size=settings.groups,
        token=settings.token or None,
        keep_leases_seconds=_LEASE_SECONDS,
        retries=_PATIENT,
    )
    stack.enter_context(client)
    sampling = settings.examples().advantages if settings.dynamic_sampling else None
    native = NativeSource(
        client,
        idle_seconds=idle_seconds,
        groups=settings.groups,
        sampling=sampling,
        guard=settings.guard(),
    )
    return native, client
