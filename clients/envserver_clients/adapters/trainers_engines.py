"""Connects the engines that a trainer runs itself to a server's agents, and its weights to engines.

Invariants: no call reaches an engine between `pause` and `publish`, and every token carries the
version of the weights that sampled it. Engines are registered when they first have weights, not
earlier: many begin with random ones.

The server starts without an engine, and makes only the rollouts that are ordered:

    envserver serve --env math --openai.base_url none --openai.model_name MODEL \\
        --rollouts.max_queued_groups 0
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

from envserver_records import EngineRefused
from envserver_records.http_errors import Urls

from envserver_clients.http import EnvClient
from envserver_clients.protocol import InFlight
from envserver_clients.weights import PromptCheck

log = logging.getLogger(__name__)

_USABLE: Final = ("used", "paused")
_TOLERANCE: Final = 1e-3
_ROUGH_TOLERANCE: Final = 0.2
"""For 16-bit weights, whose rounding alone changes a logprob by 0.1."""


class Versions:
    """Maps a trainer's steps to policy versions, which continue after the last `published` one (-1:
    none) if the trainer restarts from an older checkpoint."""

    def __init__(self, published: int) -> None:
        self._published = published
        self._base: int | None = None

    def of(self, step: int) -> int:
        """Returns the version after `step` steps; steps must not decrease."""
        if self._base is None:
            self._base = max(0, self._published + 1 - step)
        return self._base + step


def saver(trainer: Any) -> Callable[[Path], None]:
    """Returns a function that saves the trainer's model (with PEFT: the adapter) as safetensors.
    Call it on all ranks, because the weights may be distributed."""
    state = trainer.accelerator.get_state_dict(trainer.model)
    model = trainer.accelerator.unwrap_model(trainer.model)

    def save(folder: Path) -> None:
        model.save_pretrained(folder, state_dict=state)

    return save


def check_of(trainer: Any, prompt_ids: list[int], completion_ids: list[int]) -> PromptCheck | None:
    """Returns the logprobs of a row under the trainer's weights; None if those are distributed."""
    import torch

    if trainer.accelerator.num_processes > 1:
        return None
    model = trainer.accelerator.unwrap_model(trainer.model)
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            ids = torch.tensor([prompt_ids + completion_ids], device=model.device)
            logits = model(input_ids=ids).logits[0, len(prompt_ids) - 1 : -1]
            logprobs = logits.float().log_softmax(-1)
            sampled = logprobs.gather(1, ids[0, len(prompt_ids) :, None])[:, 0].tolist()
    finally:
        model.train(was_training)
    is_fine = next(model.parameters()).dtype == torch.float32
    tolerance = _TOLERANCE if is_fine else _ROUGH_TOLERANCE
    return PromptCheck(prompt_ids, completion_ids, sampled, tolerance)


class TrainersEngines:
    """Registers a trainer's engines and their weights at a server. It keeps no connection, so that
    it works from any event loop.

    Args:
        in_flight: what a pause does with running calls, as for `EnvClient.pause_calls`.
        counts_on: the trainer's versions begin anew when it is restarted, and nothing of it reads
            the server's: then those of the server go on after the last published one.
        timeout_seconds: how long a pause waits for running calls, and a registration for the check
            of an engine.
    """

    def __init__(
        self,
        url: Urls,
        *,
        token: str | None = None,
        in_flight: InFlight = "drain",
        counts_on: bool = False,
        timeout_seconds: float = 60.0,
    ) -> None:
        self._url = url
        self._token = token
        self._in_flight: InFlight = in_flight
        self._timeout_seconds = timeout_seconds
        self._version: int | None = None
        self._counts_on = counts_on
        self._versions: Versions | None = None

    async def pause(self) -> None:
        """Stops the server's calls to the engines. Idempotent."""
        async with self._client() as client:
            if not await client.pause_calls(self._in_flight, timeout_seconds=self._timeout_seconds):
                log.warning("calls did not end in %g s: they are repeated", self._timeout_seconds)
                await client.pause_calls("abort", timeout_seconds=self._timeout_seconds)

    async def publish(self, addresses: Iterable[str], version: int | None) -> None:
        """Registers the engines at `addresses` (with or without http:// and /v1) with the weights
        of `version` (None: the last one), and lets calls go on.

        Raises ConflictError: an engine has another model. EngineRefused: the version is lower than
        the server's, or the server cannot use an engine. The calls stay paused.
        """
        async with self._client() as client:
            if version is not None:
                self._version = (await self._mapped(client)).of(version)
            for address in addresses:
                url = address if "://" in address else f"http://{address}"
                row = await client.register_engine(
                    url, self._version, wait_seconds=self._timeout_seconds
                )
                if row.get("standing", "used") not in _USABLE:
                    raise EngineRefused(
                        f"The server does not use {url}: {row['standing']}, {row.get('reason')}.",
                        hint="A trainer that goes back to an older version needs a new server.",
                    )
            await client.resume_calls(self._version)

    async def _mapped(self, client: EnvClient) -> Versions:
        if self._versions is None:
            published = (await client.status())["policy_version"] if self._counts_on else -1
            self._versions = Versions(published)
        return self._versions

    def _client(self) -> EnvClient:
        return EnvClient(self._url, run=None, token=self._token)
