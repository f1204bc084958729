"""Batches from a server, over its native API or the Atropos API, in the same form; new weights to
the engine, checked, and their version to the server."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Final, Self

import numpy as np
from envserver_records import ConfigError, EngineError, EnvserverError, InputError, NotFoundError
from envserver_records.tasks import Json

from envserver_clients.adapters.atropos import AtroposTrainerClient
from envserver_clients.http import Retries, SyncEnvClient
from envserver_clients.records import Batch, ClientGroup
from envserver_clients.weights import (
    LocalFull,
    Lora,
    PromptCheck,
    Published,
    Transfer,
    VllmFull,
    Wire,
)

from .advantages import AdvantageSettings, group_advantages, rewards_of
from .checkpoints import CheckpointInfo
from .examples import Example
from .guard import SKIPPED, Guard, GuardSettings
from .policy import Policy
from .settings import TrainerSettings

log = logging.getLogger(__name__)

_LEASE_SECONDS: Final = 600.0
_WAIT_SECONDS: Final = 5.0
_PATIENCE_SECONDS: Final = 300.0
_PAUSE_SECONDS: Final = 1.0
_PASSING: Final = ("engine_unavailable", "engine_timeout")


class Source(ABC):
    """Provides batches for one trainer, and judges what the server drops while none comes.

    Args:
        idle_seconds: end after this time without a batch.
        groups: per batch.
        guard: how many batches in a row may be replaced as a whole, or dropped by the server.
        sampling: replace groups whose advantages by these rules are all 0 (native API only); None:
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
        """Yields batches; ends after a long time without one. Raises NothingLearned: all groups of
        too many batches in a row were replaced or dropped."""
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
    def resume(self, saved: CheckpointInfo) -> None:
        """Goes back to a checkpoint; step 0 is the beginning. Call this first, once."""

    def done(self, batch: Batch, checkpoint: str | None) -> None:
        """Acknowledges a batch; `checkpoint` contains what was learned from it."""
        self._client.ack(batch, checkpoint=checkpoint)

    @abstractmethod
    def _takes(self, batch: Batch) -> bool:
        """Returns whether to learn from `batch`; gives it back otherwise."""

    def _acknowledge_again(self, saved: CheckpointInfo, checkpoint: str | None = None) -> None:
        """Repeats the last acknowledgement, which the server may not have received."""
        if not saved.lease_id:
            return
        try:
            self._client.ack(saved.lease_id, checkpoint=checkpoint)
        except EnvserverError as error:
            log.warning("lease %s is not acknowledged again: %s", saved.lease_id, error)

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


class NativeSource(Source):
    """Leases batches of a run: see `envserver_clients.http`."""

    _client: SyncEnvClient

    def resume(self, saved: CheckpointInfo) -> None:
        if saved.step == 0:
            self._client.resume(None)
            return
        self._acknowledge_again(saved, saved.name)
        try:
            self._client.resume(saved.name)
        except NotFoundError as error:
            raise NotFoundError(
                f"The server does not know the checkpoint {saved.name}: {error.message}",
                hint="It has another store, or others got the last batch while this trainer "
                "was away. Start again with another --output and --run.",
            ) from error

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
            if not any(advantage.teaches for advantage in group_advantages(group.rows, rules))
        ]
        if equal:
            self._client.set_aside(batch, equal, reason="equal rewards")
        rewards = [reward for group in batch.groups for reward in rewards_of(group.rows).values()]
        is_waste = rewards and len(equal) == len(batch.groups)
        mean = sum(rewards) / max(1, len(rewards))
        self._guard.judge({SKIPPED: "equal", "reward_mean": mean} if is_waste else {})
        return bool(equal)


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


class AtroposSource(Source):
    """Fetches batches over the Atropos API.

    The server remembers what was fetched, not what a checkpoint contains: after a restart the
    unacknowledged batch comes again; acknowledged batches since the checkpoint are lost.
    """

    _client: AtroposTrainerClient

    def resume(self, saved: CheckpointInfo) -> None:
        self._acknowledge_again(saved)

    def _takes(self, batch: Batch) -> bool:
        if unread := _unread(batch):
            log.error("groups are left out: %s", "; ".join(unread.values()))
        return True


def open_source(settings: TrainerSettings, stack: ExitStack) -> tuple[Source, SyncEnvClient | None]:
    """The source of `settings`, and the client that publishes versions (None: the Atropos API has
    none)."""
    # A restart of the server may take three minutes.
    common: Json = {"token": settings.token or None, "retries": Retries(tries=120)}
    rules: Json = {"groups": settings.groups, "guard": settings.guard()}
    rules["idle_seconds"] = settings.idle_minutes * 60
    if settings.wire == "atropos":
        stock = AtroposTrainerClient(
            settings.server,
            group_size=settings.group_size,
            batch_size=settings.groups,
            max_token_length=settings.max_tokens,
            steps=settings.steps or 1_000_000,
            acknowledged=True,
            **common,
        )
        return AtroposSource(stack.enter_context(stock), **rules), None
    client = SyncEnvClient(
        settings.server,
        run=settings.run,
        environments=settings.environments,
        batch_size=settings.groups,
        keep_leases_seconds=_LEASE_SECONDS,
        **common,
    )
    sampling = settings.examples().advantages if settings.dynamic_sampling else None
    return NativeSource(stack.enter_context(client), sampling=sampling, **rules), client


class Publisher:
    """Transfers the weights of `policy` to the engine of `settings`.

    While it is open, a restarted engine gets the weights again. `client` publishes versions and
    pauses model calls; None: without a server.
    """

    def __init__(
        self, settings: TrainerSettings, policy: Policy, client: SyncEnvClient | None
    ) -> None:
        self._policy = policy
        usual = 0.02 if settings.dtype == "float32" else 0.2
        self._tolerance = settings.check_tolerance or usual
        self._client = client
        self._push = _push(settings, client)
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self._stack.callback(self._push.close)
        self._stack.enter_context(self._push.watched())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def first_version(self, saved: int) -> int:
        """The version under which to publish the weights of a checkpoint.

        Versions never decrease: if later steps than the checkpoint's were published, its weights
        get a new version.
        """
        there = -1 if self._client is None else int(self._client.status()["policy_version"])
        return saved if there <= saved else there + 1

    def publish(self, version: int, examples: Sequence[Example] = ()) -> None:
        """Transfers the current weights and publishes them as `version`.

        One of `examples` is used to compare engine and policy; empty: no check. Raises EngineError:
        the engine refused, was away for minutes, or computes different logprobs.
        """
        check = _check(self._policy, examples[0], self._tolerance) if examples else None
        publish = self._attempts(version, check)
        give_up = time.monotonic() + _PATIENCE_SECONDS
        while True:
            try:
                publish()
                return
            except EngineError as error:
                if error.kind not in _PASSING or time.monotonic() > give_up:
                    raise
                log.warning("version %d waits for the engine: %s", version, error)
            time.sleep(_PAUSE_SECONDS)

    def _attempts(self, version: int, check: PromptCheck | None) -> Callable[[], Published]:
        """Returns a function that publishes `version`; it can be called again after a failure."""
        push = self._push
        if not isinstance(push, Transfer):
            return lambda: push.publish(version, self._policy.save, check)
        sent = push.prepare(version, self._policy.tensors(), check)
        return lambda: push.send(sent)


def _push(
    settings: TrainerSettings, client: SyncEnvClient | None
) -> LocalFull | VllmFull | Lora | Transfer:
    engines = [url.strip() for url in settings.engine.split(",")]
    sends = settings.weights != "files" and not settings.lora_rank
    if engines == ["server"] and not (sends and client):
        raise ConfigError(
            "The server's engines get weights only if they are sent.",
            hint="Name the engines, or set weights to gloo or nccl, on the native API.",
        )
    folder = settings.output / "weights"
    if settings.lora_rank:
        return Lora(engines, folder, server=client)
    if sends:
        wire: Wire = "nccl" if settings.weights == "nccl" else "gloo"
        return Transfer(
            "server" if engines == ["server"] else engines,
            wire=wire,
            in_flight=settings.in_flight,
            address=settings.weights_address,
            server=client,
        )
    if settings.engine_kind == "vllm":
        return VllmFull(engines, folder, server=client, in_flight=settings.in_flight)
    return LocalFull(engines, folder, server=client, in_flight=settings.in_flight)


def _check(policy: Policy, example: Example, tolerance: float) -> PromptCheck:
    # Without its images, which engines do not take beside tokens that they only score.
    shown = policy.vision.is_image(example.tokens) if policy.vision else np.zeros(1, bool)
    kept = ~np.broadcast_to(shown, example.tokens.shape)
    tokens = example.tokens[kept].tolist()
    first = int(np.flatnonzero(example.mask[kept])[0])
    logprobs = policy.prompt_logprobs(tokens)[first - 1 :]
    return PromptCheck(tokens[:first], tokens[first:], logprobs, tolerance)
