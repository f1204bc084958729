"""An engine's client together with the engine that it asks."""

from contextlib import AbstractAsyncContextManager
from typing import Any

from envserver.models.engine import Engine
from envserver.proxy.engine_client import EngineClient, EngineSession


class Asking:
    def __init__(self, engine: Engine, client: EngineClient) -> None:
        self._engine = engine
        self._client = client
        self.can_continue = client.can_continue

    def streams(self, body: Any, prompt: Any) -> bool:
        return self._client.streams(body, prompt.ids)

    async def whole(
        self, body: Any, prompt: Any, *, rollout_id: str, timeout_seconds: float, bare: bool = False
    ) -> dict[str, Any]:
        session = EngineSession(self._engine, rollout_id, timeout_seconds)
        return await self._client.whole(session, body, prompt.ids, bare=bare)

    def stream(
        self, body: Any, prompt: Any, *, rollout_id: str, timeout_seconds: float
    ) -> AbstractAsyncContextManager[Any]:
        session = EngineSession(self._engine, rollout_id, timeout_seconds)
        return self._client.stream(session, body, prompt.ids)
