"""A rollout worker for TRL's `AsyncGRPOTrainer`: gets groups that a server makes continuously.

    weights = VllmFull(engine_url, folder, server=client)
    worker = EnvserverRolloutWorker(url, run="my-run", model=model, weights=weights)
    trainer = AsyncGRPOTrainer(
        model=model, args=AsyncGRPOConfig(token_budget=..., ...), train_dataset=any_rows,
        rollout_worker=worker, weight_transfer=worker.weight_transfer,
        callbacks=[worker.checkpoints()],
    )

In: leases of groups. Out: `RolloutSample`s on `rollout_buffer`, one for each row, with advantages.
Invariants: a sample's tokens, mask and score are those of the server; its `model_version` is
that of its oldest token; a lease is acknowledged when the trainer has learned from all of it, so a
trainer that dies loses nothing. With `checkpoints`, a trainer that restarts from a checkpoint
(`checkpoint="step-40"`) continues with the groups after it. Written for TRL 1.16.0
(`RolloutWorkerProtocol`, `WeightTransferProtocol`).
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from envserver_records import ConfigError, ConflictError, EnvserverError, InputError, Message
from envserver_records.http_errors import Urls

from envserver_clients.http import BatchLimits, SyncEnvClient
from envserver_clients.records import Batch, ClientGroup, Row
from envserver_clients.training.advantages import Scaling, rewards_of, row_advantages
from envserver_clients.weights import WeightPush

from .completions import check_spans
from .trainers_engines import Versions

_WAIT_SECONDS: Final = 5.0
_LEASE_SECONDS: Final = 600.0
_UPDATES_UNTIL_LEARNED: Final = 3
"""A sample taken from the queue may still wait in the trainer's planner or prefetch."""


class WorkerFailed(EnvserverError):
    """No more samples arrive: the server is gone, or silent for too long."""

    kind = "worker_failed"


class EnvserverRolloutWorker:
    """Implements TRL's `RolloutWorkerProtocol`.

    Args:
        server_url: address of `envserver serve`, or a list of equal servers.
        run: name of this trainer's run; an existing run of that name continues.
        model: folder or hub name of the trained model, whose configuration is saved with the
            weights. Required with `weights`.
        weights: transfers the trainer's weights to the server's engine through `weight_transfer`;
            adapters are merged. None: something else transfers them; only the version is published.
        checkpoint: go back to this checkpoint (see `checkpoints`); None: continue the run.
        groups: number of groups per lease; the server prepares a few times as many.
        environments: only groups of these environments; empty: of all.
        max_staleness: policy versions that a group may be behind when leased; None: any.
        scaling: how advantages are scaled.
        temperature: that of `AsyncGRPOConfig`; rows of another one end the run.
        queue_size: samples that wait for the trainer; a long queue means older samples.
        token: the server's access token. Default: the environment variable ENVSERVER_TOKEN.
    """

    def __init__(
        self,
        server_url: Urls,
        *,
        run: str,
        model: str | Path | None = None,
        weights: WeightPush | None = None,
        checkpoint: str | None = None,
        groups: int = 4,
        environments: Sequence[str] = (),
        max_staleness: int | None = None,
        scaling: Scaling = "std",
        temperature: float = 1.0,
        queue_size: int = 64,
        token: str | None = None,
    ) -> None:
        if weights is not None and model is None:
            raise ConfigError("Weights need the name of their model: pass model=.")
        self._client = SyncEnvClient(
            server_url,
            run=run,
            batch_size=groups,
            environments=environments,
            keep_leases_seconds=_LEASE_SECONDS,
            token=token,
        )
        self._is_open = False
        self._checkpoint = checkpoint
        self._max_staleness = max_staleness
        self._scaling: Scaling = scaling
        self._temperature = temperature
        self._versions: Versions | None = None
        self._model_version = 0
        self._held = _Held()
        self._numbers = itertools.count()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._heard_at = time.monotonic()
        self.rollout_buffer = _Buffer(queue_size, self._held)
        self.metrics_queue: queue.Queue[dict[str, float]] = queue.Queue()
        self.weight_transfer = _Transfer(self, weights, model)

    def start(self) -> None:
        """The trainer calls this when the engine has the first weights."""
        self._open()
        self._heard_at = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="rollout-worker", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Acknowledges the leases that the trainer has taken and gives back the rest."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        if not self._is_open:
            return
        try:
            for lease_id in self._held.taken():
                self._ack(lease_id)
            for lease_id in self._held.untaken():
                self._client.nack(lease_id, reason="trainer_ended")
        finally:
            self._client.__exit__(None, None, None)
            self._is_open = False

    def update_model_version(self, model_version: int) -> None:
        """Reports that the engine has the weights of this version."""
        self._open()
        self._model_version = model_version
        self._client.publish_policy_version(self.published(model_version))
        for lease_id in self._held.learned():
            self._ack(lease_id)

    def check_health(self, stale_after_s: float) -> None:
        """Raises WorkerFailed: the worker ended by an error, or the server is silent for too
        long."""
        if self._error is not None:
            raise WorkerFailed(f"No more rollouts: {self._error}") from self._error
        silent = time.monotonic() - self._heard_at
        if self._thread is not None and silent > stale_after_s:
            raise WorkerFailed(f"The server has been silent for {silent:.0f} s.")

    def checkpoints(self) -> Any:
        """Returns a `TrainerCallback` that registers each checkpoint at the server as `step-N`."""
        from transformers import TrainerCallback

        worker = self

        class Checkpoints(TrainerCallback):  # type: ignore[misc]
            def on_save(self, args: Any, state: Any, control: Any, **more: Any) -> None:
                worker.saved(f"step-{state.global_step}")

        return Checkpoints()

    def saved(self, checkpoint: str) -> None:
        """Reports that this checkpoint holds everything acknowledged so far."""
        if self._held.last_acked is not None:
            self._client.ack(self._held.last_acked, checkpoint=checkpoint)

    def published(self, model_version: int) -> int:
        """Returns the server's policy version of a trainer's version."""
        if self._versions is None:
            self._open()
            self._versions = Versions(self._client.status()["policy_version"])
        return self._versions.of(model_version)

    def _open(self) -> None:
        if self._is_open:
            return
        self._client.__enter__()
        self._is_open = True
        if self._checkpoint is not None:
            self._client.resume(self._checkpoint)

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                batch = self._lease()
                self._heard_at = time.monotonic()
                if batch is not None:
                    self._offer(batch)
        except Exception as error:  # noqa: BLE001 - the trainer hears of it in check_health
            self._error = error

    def _lease(self) -> Batch | None:
        most = self._max_staleness
        limits: BatchLimits = {} if most is None else {"max_staleness": most}
        return self._client.lease(whole=False, wait_seconds=_WAIT_SECONDS, **limits)

    def _offer(self, batch: Batch) -> None:
        samples = [sample for group in batch.groups for sample in self._samples(group)]
        self._held.add(batch.lease_id, len(samples))
        for sample in samples:
            while not self._stop.is_set():
                try:
                    self.rollout_buffer.put((batch.lease_id, sample), timeout=_WAIT_SECONDS)
                    break
                except queue.Full:
                    self._heard_at = time.monotonic()

    def _samples(self, group: ClientGroup) -> list[Any]:
        for row in group.rows:
            check_spans(row.sampling, self._temperature, "AsyncGRPOConfig(temperature=...)")
        return samples_of(
            group,
            number=next(self._numbers),
            scaling=self._scaling,
            model_version=self._model_version,
            base=self.published(self._model_version) - self._model_version,
        )

    def _ack(self, lease_id: str) -> None:
        try:
            self._client.ack(lease_id)
        except ConflictError:
            self.metrics_queue.put({"envserver/lost_leases_total": 1.0})
            return
        self._held.last_acked = lease_id


def samples_of(
    group: ClientGroup, *, number: int, scaling: Scaling, model_version: int, base: int
) -> list[Any]:
    """Converts the rows of a group to TRL's `RolloutSample`s; rows that are not to be learned from
    count only in the group's mean.

    Args:
        number: the group's number, for TRL.
        model_version: used for rows whose policy version is unknown.
        base: the server's policy version for the trainer's version 0.

    Raises InputError: a row has images.
    """
    from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

    rewards = rewards_of(group.rows)
    if not rewards:
        return []
    spread = float(np.std(list(rewards.values())))
    samples = []
    for row, better in zip(group.rows, row_advantages(group.rows, scaling), strict=True):
        if not row.learn or row.logprobs is None or not row.mask.any():
            continue
        if row.images:
            raise InputError(
                "A row has images, for which TRL's RolloutSample has no place.",
                hint="verl's adapter passes images on; row.images has their bytes and places.",
                place="images",
            )
        prompt, completion = _parted(row.messages)
        samples.append(
            RolloutSample(
                prompt=prompt,
                completion=completion,
                input_ids=row.tokens.astype(np.int64),
                completion_mask=row.mask.astype(np.int64),
                old_log_probs=row.logprobs.astype(np.float32),
                advantage=better.value,
                model_version=_version(row, base, model_version),
                group_id=number,
                metrics={"reward": row.reward, "reward_std": spread},
                enqueued_at=time.time(),
            )
        )
    return samples


def _parted(messages: list[Message]) -> tuple[list[Message], list[Message]]:
    """Splits the messages before the model's first answer."""
    roles = [message.get("role") for message in messages]
    first = roles.index("assistant") if "assistant" in roles else len(messages)
    return messages[:first], messages[first:]


def _version(row: Row, base: int, unknown: int) -> int:
    oldest = int(row.versions[row.mask == 1].min())
    return unknown if oldest < 0 else oldest - base


class _Held:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._left: dict[str, int] = {}
        self._taken: deque[list[str]] = deque([[]])
        self.last_acked: str | None = None

    def add(self, lease_id: str, samples: int) -> None:
        with self._lock:
            if samples:
                self._left[lease_id] = samples
            else:
                self._taken[-1].append(lease_id)

    def take(self, lease_id: str) -> None:
        with self._lock:
            self._left[lease_id] -= 1
            if not self._left[lease_id]:
                del self._left[lease_id]
                self._taken[-1].append(lease_id)

    def learned(self) -> list[str]:
        """The leases, at a weight update, that the trainer has learned from by now."""
        with self._lock:
            self._taken.append([])
            if len(self._taken) <= _UPDATES_UNTIL_LEARNED:
                return []
            return self._taken.popleft()

    def taken(self) -> list[str]:
        """The leases, at the end, that the trainer took completely, oldest first."""
        with self._lock:
            return [lease_id for leases in self._taken for lease_id in leases]

    def untaken(self) -> list[str]:
        with self._lock:
            return list(self._left)


class _Buffer(queue.Queue[Any]):
    """A queue that takes (lease, sample) pairs, returns samples and counts them as taken."""

    def __init__(self, size: int, held: _Held) -> None:
        super().__init__(size)
        self._of_leases = held

    def _get(self) -> Any:
        lease_id, sample = super()._get()
        self._of_leases.take(lease_id)
        return sample


@dataclass(eq=False)
class _Transfer:
    """Implements TRL's `WeightTransferProtocol` with `envserver_clients.weights`."""

    worker: EnvserverRolloutWorker
    weights: WeightPush | None
    model: str | Path | None
    sent: int = 0

    def init_weight_transfer(self) -> None:
        """Nothing to set up."""

    def pause(self) -> None:
        """`send_weights` pauses the server's calls itself."""

    def send_weights(self, iterator: Iterator[tuple[str, Any]]) -> None:
        self.sent += 1
        if self.weights is None:
            for _ in iterator:  # on other ranks it takes part in gathering the weights
                pass
            return

        def save(folder: Path) -> None:
            from safetensors.torch import save_file
            from transformers import AutoConfig

            AutoConfig.from_pretrained(self.model).save_pretrained(folder)
            tensors = {name: tensor.cpu().contiguous() for name, tensor in iterator}
            save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

        self.weights.publish(self.worker.published(self.sent), save, None)

    def resume(self) -> None: ...

    def destroy(self) -> None: ...
