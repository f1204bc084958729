"""The seam between the proxy and whatever samples tokens."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

import msgspec

from .breaker import State


class ReplicaHealth(msgspec.Struct, frozen=True):
    """Whether one address of an engine answers, and in how many seconds, or why not.

    Args:
        in_flight, limit: calls there now, and the most that are sent there at once as things are.
        waiting: calls that wait here for one of these to end.
        state: closed: it is used; open: it failed and is set aside; half_open: one call at a time
            tries whether it is well again.
    """

    base_url: str
    healthy: bool
    seconds: float = 0.0
    reason: str = ""
    in_flight: int = 0
    limit: int = 0
    waiting: int = 0
    state: State = "closed"


class Engine(Protocol):
    """An OpenAI-compatible engine. Bodies and answers are decoded JSON, unvalidated.

    Every method raises only EngineError and its kinds: EngineUnavailable (no replica answers),
    EngineTimeout, EngineRefused (HTTP 4xx, with the engine's words), EngineGarbage (not JSON, not a
    stream of server-sent events, ended early). Each retries by itself what is safe to retry.
    """

    kind: str
    """"openai" or "sim"."""
    exact: bool
    """Whether it returns token ids and logprobs."""

    async def __aenter__(self) -> Engine: ...

    async def __aexit__(self, *exc: object) -> None: ...

    async def model_name(self) -> str:
        """The name under which the engine serves the model (asks it once)."""

    async def post(
        self, path: str, body: dict[str, Any], *, rollout_id: str, timeout_seconds: float
    ) -> dict[str, Any]:
        """The answer to one request that does not stream. `path` begins with /v1/ or is /generate.

        Requests of one `rollout_id` go to the same replica while it is well and has room.
        """

    def stream(
        self, path: str, body: dict[str, Any], *, rollout_id: str, timeout_seconds: float
    ) -> AbstractAsyncContextManager[AsyncIterator[dict[str, Any]]]:
        """The chunks of a streamed answer; ends normally only after the engine's `[DONE]`."""

    async def get(self, path: str) -> dict[str, Any]:
        """A plain GET (such as /v1/models)."""

    async def health(self) -> list[ReplicaHealth]:
        """One entry per address."""

    def replicas(self) -> list[ReplicaHealth]:
        """The same as far as it is known without asking; `healthy`: it is not set aside."""
