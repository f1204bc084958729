"""Tells a server about engines that come and go: its addresses, versions and pauses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from .protocol import Answer, Call, Calls, object_of


class EnginesOfServer(ABC):
    """The methods of a client that are about the server's engines."""

    @abstractmethod
    async def _send(self, call: Call) -> Answer:
        """See `OnDemand`."""

    async def register_engine(
        self, url: str, version: int | None = None, *, wait_seconds: float = 60.0
    ) -> dict[str, Any]:
        """Registers an engine that serves the weights of `version`; again: tells its version.

        Args:
            wait_seconds: maximum wait for the check of a new engine.

        Returns:
            Its row of GET /v1/engines: `id`, `standing`, `reason` ...

        Raises:
            ConflictError: the engine differs from the server's others.
        """
        call = Calls.register_engine(url, version, wait_seconds)
        row: dict[str, Any] = object_of(await self._send(call))["engine"]
        return row

    async def engines(self) -> list[dict[str, Any]]:
        """Returns the rows of GET /v1/engines: `id`, `url`, `weights_version`, `standing`, ..."""
        rows: list[dict[str, Any]] = object_of(await self._send(Calls.engines()))["engines"]
        return rows

    async def pause_engine(self, engine_id: str) -> None:
        """Sends an engine no more calls; those that are there go to another one."""
        await self._send(Calls.pause_engine(engine_id))

    async def resume_engine(self, engine_id: str, version: int) -> None:
        """Sends an engine calls again, whose weights are of `version` now."""
        await self._send(Calls.resume_engine(engine_id, version))
