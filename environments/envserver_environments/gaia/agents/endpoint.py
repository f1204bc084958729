"""Calls the model at `run.base_url` from threads: one HTTP connection, typed errors."""

from __future__ import annotations

import json
import time
import uuid
from dataclasses import dataclass
from typing import Any

from envserver_records import http_errors

from envserver import EngineError, LimitReached, Message, Rollout

from .connection import Connection

_TRIES = 2


class CutOff(Exception):
    """The model's turn was longer than it may be."""


@dataclass(frozen=True)
class Turn:
    """One answer of the model: its message as sampled, and its token counts."""

    message: Message
    tokens: tuple[int, int]

    @property
    def calls(self) -> list[dict[str, Any]]:
        return self.message.get("tool_calls") or []


class Endpoint:
    """Requests one turn after the other.

    Args:
        stop: strings that end a turn.
        tools: OpenAI function tools that the model may call.
        token_budget: maximum number of sampled tokens in all.
        stop_at: `time.time()` after which no request is sent.
        extra: additional fields of each request.
    """

    def __init__(
        self,
        run: Rollout,
        *,
        stop: tuple[str, ...] = (),
        tools: list[dict[str, Any]] | None = None,
        token_budget: int | None = None,
        stop_at: float = float("inf"),
        extra: dict[str, Any] | None = None,
    ) -> None:
        self.model = run.model
        self._common: dict[str, Any] = {"model": run.model}
        if stop:
            self._common["stop"] = list(stop)
        if tools:
            self._common["tools"] = tools
        self.extra = extra or {}
        self._tokens_left = token_budget
        self._stop_at = stop_at
        self._connection = _Proxy(run.base_url, run.api_key)

    def turn(self, messages: list[Message], **fields: Any) -> Turn:
        """The model's next turn.

        Args:
            fields: of this request only.

        Raises:
            LimitReached: turns, tokens, time or context are used up.
            EngineError: the engine failed.
            CutOff: the turn was cut off.
        """
        body = {**self._common, "messages": messages, **self.extra, **fields}
        if self._tokens_left is not None:
            if self._tokens_left <= 0:
                raise _budget_is_spent()
            body["max_tokens"] = self._tokens_left
        answer = self._connection.ask(body, self._stop_at)
        choice, usage = answer["choices"][0], answer.get("usage") or {}
        written = int(usage.get("completion_tokens") or 0)
        if self._tokens_left is not None:
            self._tokens_left -= written
        if choice.get("finish_reason") == "length":
            is_spent = self._tokens_left is not None and self._tokens_left <= 0
            raise _budget_is_spent() if is_spent else CutOff
        return Turn(_whole(choice), (int(usage.get("prompt_tokens") or 0), written))

    def close(self) -> None:
        """Ends the connection, from any thread; a request that waits on it fails."""
        self._connection.close()


class _Proxy:
    """A connection to the proxy. A request whose connection broke is repeated with the same key:
    the proxy returns the answer that it has."""

    def __init__(self, base_url: str, api_key: str) -> None:
        self._connection = Connection(f"{base_url}/chat/completions")
        self._key = api_key
        self._closed = False

    def ask(self, body: dict[str, Any], stop_at: float) -> dict[str, Any]:
        data = json.dumps(body).encode()
        headers = {
            "authorization": f"Bearer {self._key}",
            "content-type": "application/json",
            "idempotency-key": uuid.uuid4().hex,
        }
        for tries_left in reversed(range(_TRIES)):
            seconds = min(stop_at - time.time(), 86_400.0)
            if seconds <= 0 or self._closed:
                raise _is_over()
            try:
                status, content = self._connection.post(data, headers, seconds)
                break
            except TimeoutError:
                self._connection.close()
                raise _is_over() from None
            except OSError as error:
                self._connection.close()
                if not tries_left:
                    raise EngineError(f"The model's endpoint cannot be reached: {error}") from error
        if status != 200:
            raise http_errors.MODEL.read(status, content)
        try:
            answer: dict[str, Any] = json.loads(content)
        except ValueError as error:
            raise EngineError(f"The model's endpoint did not answer with JSON: {error}") from error
        return answer

    def close(self) -> None:
        self._closed = True
        self._connection.close()


def _whole(choice: dict[str, Any]) -> Message:
    """The message as it was sampled: with the stop string that was cut off."""
    message: Message = choice["message"]
    stop = choice.get("stop_reason")
    if not isinstance(stop, str):
        return message
    return {**message, "content": f"{message.get('content') or ''}{stop}"}


def _budget_is_spent() -> LimitReached:
    return LimitReached("The token budget is used up.", limit="tokens")


def _is_over() -> LimitReached:
    return LimitReached("The time of this rollout is used up.", limit="time")
