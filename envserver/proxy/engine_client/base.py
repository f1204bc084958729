"""What every way of asking an engine has in common: the seam, and the line to the engine.

A body is in the shape of OpenAI's chat API with vLLM's extra fields, and so are answers and chunks:
`prompt_token_ids` at the top, `token_ids`, `logprobs` and, where the engine tells them,
`weight_versions` in each choice.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from envserver_records.errors import EngineGarbage, EngineTimeout

from ...models.engine import Engine

ChatBody = dict[str, Any]
ChatAnswer = dict[str, Any]


class Prompt(Protocol):
    """What is decided of a call's prompt: its ids, or None where the engine renders it."""

    @property
    def ids(self) -> Sequence[int] | None: ...


class EngineClient(Protocol):
    """One way of asking an engine.

    Every method that asks raises only EngineError and its kinds; EngineGarbage says what an answer
    lacks. All requests of one `rollout_id` go to the same replica, and together they take
    `timeout_seconds` at most.
    """

    def can_continue(self, body: ChatBody) -> str | None:
        """Why a prompt of our own ids cannot be asked with `body`; None when it can.

        To be asked before the prompt is planned: a call that cannot be continued begins a new
        branch with this reason.
        """

    def streams(self, body: ChatBody, prompt: Prompt) -> bool:
        """Whether `stream` is possible and gives the same answer as `whole`."""

    async def whole(
        self, body: ChatBody, prompt: Prompt, *, rollout_id: str, timeout_seconds: float
    ) -> ChatAnswer:
        """The whole answer."""

    def stream(
        self, body: ChatBody, prompt: Prompt, *, rollout_id: str, timeout_seconds: float
    ) -> AbstractAsyncContextManager[AsyncIterator[ChatAnswer]]:
        """The answer as chunks. One that ends normally was whole."""


class EngineSession:
    """Several requests for one call: to one replica, within one time.

    Args:
        timeout_seconds: for all of them together, from now on.
    """

    def __init__(self, engine: Engine, rollout_id: str, timeout_seconds: float) -> None:
        self._engine = engine
        self._rollout_id = rollout_id
        self._now = asyncio.get_running_loop().time
        self._deadline = self._now() + timeout_seconds

    async def post(self, path: str, body: ChatBody) -> ChatAnswer:
        """The answer to one request.

        Raises:
            EngineError: as the engine's `post`.
        """
        return await self._engine.post(
            path, body, rollout_id=self._rollout_id, timeout_seconds=self._seconds_left()
        )

    def stream(
        self, path: str, body: ChatBody
    ) -> AbstractAsyncContextManager[AsyncIterator[dict[str, Any]]]:
        """The chunks of a streamed answer.

        Raises:
            EngineError: as the engine's `stream`.
        """
        return self._engine.stream(
            path, body, rollout_id=self._rollout_id, timeout_seconds=self._seconds_left()
        )

    def _seconds_left(self) -> float:
        seconds = self._deadline - self._now()
        if seconds <= 0:
            raise EngineTimeout("The engine did not answer in time.")
        return seconds


def has_tools(body: ChatBody) -> bool:
    """Whether the answer may hold tool calls."""
    return bool(body.get("tools") or body.get("functions"))


def is_strict(tool: dict[str, Any]) -> bool:
    """Whether the engine holds the arguments of `tool` to their schema while it samples."""
    function = tool.get("function")
    return bool(isinstance(function, dict) and function.get("strict"))


def top_logprobs(body: ChatBody) -> int:
    """How many alternatives are wanted for each token; -1 for all."""
    wanted = body.get("top_logprobs")
    return wanted if isinstance(wanted, int) else 0


def max_tokens(body: ChatBody) -> int | None:
    """The limit per choice, None where the engine's own applies."""
    newer = body.get("max_completion_tokens")
    limit: int | None = body.get("max_tokens") if newer is None else newer
    return limit


def has_media(body: ChatBody) -> bool:
    """Whether some message holds an image, a sound or anything else that is no text."""
    for message in body.get("messages") or []:
        content = message.get("content")
        if isinstance(content, list) and any(_is_media(part) for part in content):
            return True
    return False


def _is_media(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") not in ("text", "input_text", "refusal")


def require(holder: Any, name: str, kind: type, where: str) -> Any:
    """`holder[name]`, which must be a `kind`.

    Raises:
        EngineGarbage: it is not; `where` says in what.
    """
    value = holder.get(name) if isinstance(holder, dict) else None
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise EngineGarbage(f"{where} holds no {name}.")
    return value


def choices_of(answer: ChatAnswer, count: int, where: str) -> list[dict[str, Any]]:
    """The choices of a whole answer in the order of their indices, which are 0 to `count` - 1.

    Raises:
        EngineGarbage: they are not.
    """
    choices = require(answer, "choices", list, where)
    indices = [require(choice, "index", int, f"A choice in {where.lower()}") for choice in choices]
    if sorted(indices) != list(range(count)):
        raise EngineGarbage(f"{where} holds choices {indices}, not {count} from 0 on.")
    return sorted(choices, key=_index)


def _index(choice: dict[str, Any]) -> int:
    index: int = choice["index"]
    return index


def check_prompt(answer: ChatAnswer, sent: Sequence[int], where: str) -> None:
    """The engine saw what it was sent.

    Raises:
        EngineGarbage: it echoes nothing, or something else.
    """
    if require(answer, "prompt_token_ids", list, where) != list(sent):
        raise EngineGarbage(f"{where} tells of another prompt than was sent.")


def check_ended(unfinished: set[int]) -> None:
    """
    Raises:
        EngineGarbage: a stream has ended without an end of some choice.
    """
    if unfinished:
        raise EngineGarbage(f"The engine's stream does not end choices {sorted(unfinished)}.")
