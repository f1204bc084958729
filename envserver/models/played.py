"""An engine without a model: an external client answers the calls of a rollout.

In: requests to the model. Out: the player's messages as they are, without token ids. What always
holds: only the player of its own rollout is asked for an answer; the time that a player takes is
limited by the rollout's own time alone.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import msgspec
from envserver_records.errors import EngineRefused
from envserver_records.records import Message

from .engine import ReplicaHealth

MODEL = "played"
_CHAT = "/v1/chat/completions"
_TEXT = "/v1/completions"


class Asked(msgspec.Struct, frozen=True):
    """A request to the player.

    Args:
        agent: the agent's name, if the environment declares agents.
        messages: the conversation, in OpenAI's format.
        tools: in OpenAI's format.
        choice: the request's `tool_choice`, if it has one.
    """

    agent: str | None
    messages: list[Message]
    tools: list[dict[str, Any]]
    choice: Any = None


Player = Callable[[Asked], Awaitable[Message]]
"""Returns the assistant's message."""


class PlayedEngine:
    """See the module; an Engine. It may serve any number of rollouts."""

    kind = "played"
    exact = False

    def __init__(self) -> None:
        self._players: dict[str, Player] = {}

    @contextmanager
    def played_by(self, rollout_id: str, player: Player) -> Iterator[None]:
        """Lets `player` answer the requests of a rollout within the block."""
        self._players[rollout_id] = player
        try:
            yield
        finally:
            del self._players[rollout_id]

    async def __aenter__(self) -> PlayedEngine:
        return self

    async def __aexit__(self, *exc: object) -> None:
        return None

    async def model_name(self) -> str:
        return MODEL

    async def health(self) -> list[ReplicaHealth]:
        return self.replicas()

    def replicas(self) -> list[ReplicaHealth]:
        return [ReplicaHealth(MODEL, healthy=True)]

    async def get(self, path: str) -> dict[str, Any]:
        """See Engine. Only /v1/models."""
        if path != "/v1/models":
            raise _refused(path)
        return {"object": "list", "data": [{"id": MODEL, "object": "model"}]}

    async def post(
        self,
        path: str,
        body: dict[str, Any],
        *,
        rollout_id: str,
        timeout_seconds: float,
        form: type | None = None,
    ) -> dict[str, Any]:
        """See Engine. Chat, and text completions of one prompt."""
        message = await self._answer(path, body, rollout_id)
        if path == _TEXT:
            choice: dict[str, Any] = {"text": message["content"] or ""}
        else:
            choice = {"message": message}
        return _whole(path, body, {"index": 0, **choice, "finish_reason": _reason(message)})

    @asynccontextmanager
    async def stream(
        self,
        path: str,
        body: dict[str, Any],
        *,
        rollout_id: str,
        timeout_seconds: float,
        form: type | None = None,
    ) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
        """See Engine; one chunk."""
        message = await self._answer(path, body, rollout_id)
        if path == _TEXT:
            part: dict[str, Any] = {"text": message["content"] or ""}
        else:
            part = {"delta": message}
        chunk = _whole(path, body, {"index": 0, **part, "finish_reason": _reason(message)})

        async def chunks() -> AsyncIterator[dict[str, Any]]:
            yield {**chunk, "object": f"{chunk['object']}.chunk"}

        yield chunks()

    async def _answer(self, path: str, body: dict[str, Any], rollout_id: str) -> Message:
        rollout, _, agent = rollout_id.partition("/")
        player = self._players.get(rollout)
        if player is None:
            raise EngineRefused("Nobody plays the model of this rollout.", status=400)
        if body.get("n") not in (None, 1):
            raise EngineRefused("A player gives one answer: n must be 1.", status=400)
        message = await player(
            Asked(
                agent=agent or None,
                messages=_messages(path, body),
                tools=body.get("tools") or [],
                choice=body.get("tool_choice"),
            )
        )
        calls = message.get("tool_calls")
        return {
            "role": "assistant",
            "content": message.get("content"),
            **({"tool_calls": calls} if calls else {}),
        }


def _messages(path: str, body: dict[str, Any]) -> list[Message]:
    """Returns the conversation of a request."""
    if path == _CHAT:
        return list(body.get("messages") or [])
    prompt = body.get("prompt")
    if path == _TEXT and isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    raise _refused(path)


def _refused(path: str) -> EngineRefused:
    return EngineRefused(
        f"The client that acts as the model answers chats and text prompts, not {path}.", status=404
    )


def _reason(message: Message) -> str:
    return "tool_calls" if message.get("tool_calls") else "stop"


def _whole(path: str, body: dict[str, Any], choice: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": f"played-{uuid.uuid4().hex[:12]}",
        "object": "chat.completion" if path == _CHAT else "text_completion",
        "created": int(time.time()),
        "model": body.get("model") or MODEL,
        "choices": [choice],
        # A player says nothing of tokens.
        "usage": {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0},
    }
