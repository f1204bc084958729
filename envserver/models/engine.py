"""The interface between the proxy and whatever samples tokens."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

import msgspec

from .replicas import Origin, State
from .routing import Standing


class ReplicaHealth(msgspec.Struct, frozen=True):
    """The health of one address of an engine.

    Args:
        seconds: how long its answer took.
        reason: why it is not healthy, or "".
        in_flight, limit: calls there now, and the current limit.
        waiting: calls that wait for a slot.
        state: of the circuit breaker. closed: used; open: set aside; half_open: being tested with
            one call at a time.
        calls, errors: calls that were answered, and that failed, since the start.
        seconds_p50, seconds_p95: until the answer of a call, or the first part of a streamed one.
        id, origin, rollouts, expires_at: see Replica; id "": an engine without replicas.
        standing: how it is used; `reason` says why it is not.
        follows: whether it has each policy version that is published for all engines.
        version: the version that it serves, if it does not; None: not known.
    """

    base_url: str
    healthy: bool
    seconds: float = 0.0
    reason: str = ""
    in_flight: int = 0
    limit: int = 0
    waiting: int = 0
    state: State = "closed"
    calls: int = 0
    errors: int = 0
    seconds_p50: float | None = None
    seconds_p95: float | None = None
    id: str = ""
    origin: Origin = "setting"
    standing: Standing = "used"
    follows: bool = True
    version: int | None = None
    rollouts: int = 0
    expires_at: float | None = None


class Engine(Protocol):
    """An OpenAI-compatible engine. Bodies and answers are decoded JSON, unvalidated.

    Every method raises only EngineError and its kinds: EngineUnavailable (no replica answers),
    EngineTimeout, EngineRefused (HTTP 4xx, with the engine's message), EngineGarbage (not JSON, not
    a stream of server-sent events, ended early). Each method retries what is safe to retry.
    """

    kind: str
    """"openai", "sim" or "played"."""
    exact: bool
    """Whether it returns token ids and logprobs."""

    async def __aenter__(self) -> Engine: ...

    async def __aexit__(self, *exc: object) -> None: ...

    async def model_name(self) -> str:
        """Returns the name under which the engine serves the model (asked once)."""

    async def post(
        self,
        path: str,
        body: dict[str, Any],
        *,
        rollout_id: str,
        timeout_seconds: float,
        form: type | None = None,
    ) -> dict[str, Any]:
        """Returns the answer to one request that does not stream.

        Requests of one `rollout_id` go to the same replica while it is healthy and has slots.

        Args:
            form: a TypedDict of the fields that are read; see `Decoder.decode`. An engine may
                ignore it.
        """

    def stream(
        self,
        path: str,
        body: dict[str, Any],
        *,
        rollout_id: str,
        timeout_seconds: float,
        form: type | None = None,
    ) -> AbstractAsyncContextManager[AsyncIterator[dict[str, Any]]]:
        """Streams an answer's chunks; it ends normally only after the engine's `[DONE]`.

        Args:
            form: of each chunk; see `post`.
        """

    async def get(self, path: str) -> dict[str, Any]:
        """Sends a GET request (such as /v1/models)."""

    async def health(self) -> list[ReplicaHealth]:
        """Asks every address for its health; one entry per address."""

    def replicas(self) -> list[ReplicaHealth]:
        """Returns the known state of each address without asking; `healthy`: not set aside."""
