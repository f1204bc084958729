"""Versions that are asked for by name and that the engine does not have.

A LoRA adapter is missing for a moment where an engine was started again (its trainer gives it the
adapters anew), before the first version is published, or where a call waited so long for room that
its version went meanwhile. Such a call is sent again, with the name of the version of then, for as
long as that may take; it is not the rollout's fault.
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
    """For one call: when to ask again."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._pauses = 0

    async def wait(self, error: EngineRefused, asked: str, now: str) -> None:
        """Returns when the call may be sent again.

        Args:
            asked: the name that the engine was asked for, and refused by `error`.
            now: the name of the version of now.

        Raises:
            EngineRefused: `error` says something else than that there is no such model.
            EngineUnavailable: the version did not come.
        """
        if error.detail.get("status") != HTTPStatus.NOT_FOUND:
            raise error
        if self._since is None:
            self._since = time.monotonic()
        if asked != now:
            return
        if time.monotonic() - self._since > PATIENCE_SECONDS:
            raise EngineUnavailable(
                f"The engine has no {asked!r}: {error.message}",
                hint="A trainer must publish it, with `envserver_clients.weights.Lora` or "
                "/v1/load_lora_adapter.",
            )
        self._pauses += 1
        with count_as_waiting():
            await asyncio.sleep(_BACKOFF.seconds(self._pauses))
