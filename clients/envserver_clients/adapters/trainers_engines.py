"""Lets agents of a server ask the engines that a trainer runs itself.

In: the addresses of a trainer's engines, and its calls before and after each change of their
weights. Out: a server that asks these engines. What always holds: no call reaches an engine between
`pause` and `publish`, and every token carries the version of the weights that sampled it. Engines
are registered when they first have weights, not earlier: many begin with random ones.

The server starts without an engine, and makes only the rollouts that are ordered:

    envserver serve --env math --openai.base_url none --openai.model_name MODEL \\
        --rollouts.max_queued_groups 0
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Final

from envserver_records import EngineRefused
from envserver_records.urls import Urls

from envserver_clients.http import EnvClient
from envserver_clients.protocol import InFlight

from .trl_weights import Versions

log = logging.getLogger(__name__)

_USABLE: Final = ("used", "paused")


class TrainersEngines:
    """Tells a server about a trainer's engines and their weights. It keeps no connection, so that
    it works from any event loop.

    Args:
        url: the server's address.
        in_flight: what a pause does with running calls: "drain" (they end first), "keep" (they
            continue with the new weights), "abort" (they are repeated afterwards).
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
        """Registers the engines at `addresses` with the weights of `version`, and lets calls go on.

        Args:
            addresses: with or without http:// and /v1.
            version: None: the last one.

        Raises:
            ConflictError: an engine has another model.
            EngineRefused: the version is lower than the server's, or the server cannot use an
                engine. The calls stay paused.
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
