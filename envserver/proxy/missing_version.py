"""Waits for policy versions that are requested by name and that the engine does not have yet.

A LoRA adapter is missing for a moment after the engine was restarted (its trainer loads the
adapters again), before the first version is published, or when a call waited so long for a slot
that its version was removed. Such a call is sent again with the then current version's name; the
rollout is not to blame.
"""

from __future__ import annotations

import asyncio
import time
from http import HTTPStatus

from envserver_records.backoff import Backoff
from envserver_records.errors import EngineRefused, EngineUnavailable

from ..models.measured import count_as_waiting

PATIENCE_SECONDS = 60.0
_BACKOFF = Backoff(first_seconds=0.05, max_seconds=2.0)


class MissingVersion:
    """Decides when one call may be sent again."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._pauses = 0

    async def wait(self, error: EngineRefused, asked: str, now: str) -> None:
        """Returns when the call may be sent again.

        Args:
            asked: the model name that the engine refused with `error`.
            now: the name of the current version.

        Raises:
            EngineRefused: `error` is not about an unknown model.
            EngineUnavailable: the version did not appear in time.
        """
        if error.detail.get("status") != HTTPStatus.NOT_FOUND:
            raise error
        if self._since is None:
            self._since = time.monotonic()
        if asked != now:
            return
        if time.monotonic() - self._since > PATIENCE_SECONDS:
            raise EngineUnavailable(
                f"The engine has no model {asked!r}: {error.message}",
                hint="A trainer must load it, with `envserver_clients.weights.Lora` or "
                "/v1/load_lora_adapter.",
            )
        self._pauses += 1
        with count_as_waiting():
            await asyncio.sleep(_BACKOFF.seconds(self._pauses))
