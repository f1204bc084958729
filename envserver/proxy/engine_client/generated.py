"""Converts answers of /inference/v1/generate to chat answers and chunks. Pure.

Unlike chat, the endpoint lists at least the sampled token among the alternatives, and its streams
begin with the first token instead of a chunk for the role.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from envserver_records.records import Message

from .base import (
    ChatAnswer,
    ChatBody,
    answer_fields,
    chat_id,
    check_ended,
    check_prompt,
    choices_of,
    chunk_head,
    require,
    role_chunk,
    top_logprobs,
)

_WHERE = "The engine's generated answer"
_CHUNK = "A chunk of the engine's generated stream"


def count_of(body: ChatBody) -> int:
    """Returns the number of choices that `body` asks for."""
    count = body.get("n")
    return count if isinstance(count, int) else 1


class GeneratedAnswer:
    """A checked whole answer.

    Args:
        answer: to a request for text that echoes its prompt.
        body: the chat body of the request.
        sent: the prompt's ids.

    Raises:
        EngineGarbage: a field is missing, or the engine saw another prompt.
    """

    def __init__(self, answer: ChatAnswer, body: ChatBody, sent: Sequence[int]) -> None:
        check_prompt(answer, sent, _WHERE)
        self._answer = answer
        self._body = body
        self.choices = choices_of(answer, count_of(body), _WHERE)
        for choice in self.choices:
            require(choice, "token_ids", list, _WHERE)
            require(choice, "text", str, _WHERE)

    def told(self, messages: Sequence[Message]) -> ChatAnswer:
        """Returns the chat answer with `messages`, one for each choice."""
        return {
            "id": _id(self._answer),
            "object": "chat.completion",
            "created": self._answer.get("created") or 0,
            "model": self._answer.get("model") or self._body.get("model"),
            "choices": [
                {"index": choice["index"], "message": message, **_facts(choice, self._body, _WHERE)}
                for choice, message in zip(self.choices, messages, strict=True)
            ],
            "usage": require(self._answer, "usage", dict, _WHERE),
            "prompt_token_ids": self._answer["prompt_token_ids"],
            "prompt_logprobs": self._answer.get("prompt_logprobs"),
        }


async def chunks_of(
    stream: AsyncIterator[ChatAnswer], body: ChatBody, sent: Sequence[int], created: int
) -> AsyncIterator[ChatAnswer]:
    """Converts a generated stream to the chunks of a chat answer.

    Raises:
        EngineGarbage: a field is missing, or the engine saw another prompt.
    """
    count = count_of(body)
    head: dict[str, Any] = {}
    unfinished = set(range(count))
    async for chunk in stream:
        if not head:
            check_prompt(chunk, sent, _CHUNK)
            head = chunk_head(_id(chunk), created, body.get("model"))
            for index in range(count):
                first = {"prompt_token_ids": list(sent)} if index == 0 else {}
                yield {**role_chunk(head, index), **first}
        for choice in require(chunk, "choices", list, _CHUNK):
            index = require(choice, "index", int, _CHUNK)
            text = require(choice, "text", str, _CHUNK)
            require(choice, "token_ids", list, _CHUNK)
            delta = {"content": text} if text else {}
            facts = _facts(choice, body, _CHUNK)
            if facts["finish_reason"] is not None:
                unfinished.discard(index)
            yield {**head, "choices": [{"index": index, "delta": delta, **facts}]}
        if not chunk["choices"]:
            yield {**head, "choices": [], "usage": require(chunk, "usage", dict, _CHUNK)}
    check_ended(unfinished)


def _id(answer: ChatAnswer) -> str:
    return chat_id(answer, "request_id", "generate-tokens-")


def _facts(choice: dict[str, Any], body: ChatBody, where: str) -> dict[str, Any]:
    logprobs = _logprobs(choice, body, where) if body.get("logprobs") else None
    facts = answer_fields(choice, choice["token_ids"], logprobs)
    if choice.get("weight_versions") is not None:
        facts["weight_versions"] = require(choice, "weight_versions", list, where)
    return facts


def _logprobs(choice: dict[str, Any], body: ChatBody, where: str) -> dict[str, Any] | None:
    if not choice["token_ids"] and choice.get("logprobs") is None:
        return None
    logprobs: dict[str, Any] = require(choice, "logprobs", dict, where)
    wanted = top_logprobs(body)
    for entry in require(logprobs, "content", list, where):
        if wanted >= 0:
            entry["top_logprobs"] = require(entry, "top_logprobs", list, where)[:wanted]
    return logprobs
