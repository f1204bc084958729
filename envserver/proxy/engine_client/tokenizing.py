"""Counts the tokens of a conversation with the engine's own template and tokenizer."""

from __future__ import annotations

from http import HTTPStatus

from envserver_records.errors import EngineRefused

from ...models.engine import Engine
from .base import ChatBody, EngineSession, require
from .derendering import TOKENIZE

_FIELDS = ("model", "messages", "tools", "chat_template_kwargs")
_UNKNOWN = (
    HTTPStatus.NOT_FOUND,
    HTTPStatus.METHOD_NOT_ALLOWED,
    HTTPStatus.UNPROCESSABLE_ENTITY,  # it takes texts only
    HTTPStatus.NOT_IMPLEMENTED,
)


async def tokenized(
    engine: Engine, body: ChatBody, rollout_id: str, timeout_seconds: float
) -> int | None:
    """Returns the number of tokens of the prompt of `body`; None: the engine has no such endpoint.
    Raises EngineError: the engine failed, or refuses the conversation.
    """
    session = EngineSession(engine, rollout_id, timeout_seconds)
    request = {name: body[name] for name in _FIELDS if name in body}
    try:
        answer = await session.post(TOKENIZE, request)
    except EngineRefused as error:
        if error.detail.get("status") in _UNKNOWN:
            return None
        raise
    count: int = require(answer, "count", int, "The engine's count")
    return count
