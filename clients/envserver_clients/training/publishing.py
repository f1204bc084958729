"""Transfers new weights to the engine, checks them, and publishes their version at the server."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Final, Self

import numpy as np
from envserver_records import ConfigError, EngineError

from envserver_clients.http import SyncEnvClient
from envserver_clients.weights import (
    LocalFull,
    Lora,
    PromptCheck,
    Published,
    Transfer,
    VllmFull,
    Wire,
)

from .examples import Example
from .policy import Policy
from .settings import TrainerSettings

log = logging.getLogger(__name__)

_PATIENCE_SECONDS: Final = 300.0
_PAUSE_SECONDS: Final = 1.0
_PASSING: Final = ("engine_unavailable", "engine_timeout")


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
        """What publishes `version`; it can be called again after a failure."""
        push = self._push
        if not isinstance(push, Transfer):
            return lambda: push.publish(version, self._policy.save, check)
        sent = push.prepare(version, self._policy.tensors(), check)
        return lambda: push.send(sent)


def _push(
    settings: TrainerSettings, client: SyncEnvClient | None
) -> LocalFull | VllmFull | Lora | Transfer:
    engines = [one.strip() for one in settings.engine.split(",")]
    sends = settings.weights != "files" and not settings.lora_rank
    if engines == ["server"] and not (sends and client):
        raise ConfigError(
            "The server's engines get weights only if they are sent.",
            hint="Name the engines, or set weights to gloo or nccl, on the native wire.",
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
