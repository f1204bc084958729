"""Client for vLLM's /v1/completions, which continues ids and parses nothing.

A call whose prompt the engine renders goes through chat. A continued call returns text and ids; the
text is parsed here as the engine parses its own chat answers.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import orjson
from envserver_records.errors import EngineGarbage
from envserver_records.records import Tokens

from ...models.probe import ProbeResult
from ...tokens.chat_format import ChatFormat
from .answer_parser import AnswerParser, calls_are_free, keeps_special
from .base import (
    EXPERTS,
    EXPERTS_START,
    ChatAnswer,
    ChatBody,
    ChatClient,
    EngineSession,
    Ids,
    answer_fields,
    chat_id,
    check_ended,
    check_prompt,
    choices_of,
    chunk_head,
    dumped,
    has_media,
    has_tools,
    index_of,
    is_strict,
    max_tokens,
    not_streamed,
    require,
    role_chunk,
    streamed,
    top_logprobs,
)
from .generated import count_of

PATH = "/v1/completions"

_SHARED = frozenset(
    {
        "model",
        "n",
        "seed",
        "stop",
        "stop_token_ids",
        "include_stop_str_in_output",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "logit_bias",
        "allowed_token_ids",
        "ignore_eos",
        "min_tokens",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "user",
        "priority",
        "cache_salt",
        "vllm_xargs",
        EXPERTS_START,
    }
)
"""Fields that mean the same in both APIs."""
_READ_HERE = frozenset(
    {
        "messages",
        "tools",
        "tool_choice",
        "response_format",
        "max_tokens",
        "max_completion_tokens",
        "logprobs",
        "top_logprobs",
        "return_token_ids",
        "include_reasoning",
        "chat_template_kwargs",
        "reasoning_effort",
        "add_generation_prompt",
        "stream",
        "stream_options",
        "metadata",
        "store",
        "service_tier",
    }
)
"""Fields that are not sent: they are used here, affect only the rendering, or change no answer."""
_WHERE = "The engine's completion"
_CHUNK = "A chunk of the engine's completion"
_TOKEN_ID = "token_id:"
_MOST_DIGITS = 9
"""A token's id has at most so many digits."""


class _Logprobs(msgspec.Struct):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float | None] | None] | None = None


class CompletionsClient:
    def __init__(self, probe_result: ProbeResult, format: ChatFormat) -> None:
        self._reasons = probe_result.reasoning_parser
        self._format = format
        self._reader = AnswerParser(format, reasons=probe_result.reasoning_parser)
        self._chat = ChatClient()

    def can_continue(self, body: ChatBody) -> str | None:
        if has_media(body):
            return "multimodal"
        return _foreign_field(body) or self._reader.trouble(body)

    def streams(self, body: ChatBody, ids: Ids) -> bool:
        if ids is None:
            return self._chat.streams(body, ids)
        return not (has_tools(body) or self._reasons)

    async def whole(
        self, session: EngineSession, body: ChatBody, ids: Ids, *, bare: bool = False
    ) -> ChatAnswer:
        if ids is None:
            answer = await self._chat.whole(session, body, ids)
            if _foreign_field(body) is None:
                self._reader.compare(body, answer)
            return answer
        json = dumped(ids)
        answer = await session.post(PATH, _request(body, json), echo=json)
        return self._parsed(answer, body, ids)

    @asynccontextmanager
    async def stream(
        self, session: EngineSession, body: ChatBody, ids: Ids, *, bare: bool = False
    ) -> AsyncIterator[AsyncIterator[ChatAnswer]]:
        if ids is None:
            async with self._chat.stream(session, body, ids) as chunks:
                yield chunks
            return
        json = dumped(ids)
        async with session.stream(PATH, streamed(_request(body, json)), echo=json) as chunks:
            yield self._chunks(chunks, body, ids)

    def _parsed(self, answer: ChatAnswer, body: ChatBody, sent: Tokens) -> ChatAnswer:
        choices = []
        for choice in choices_of(answer, count_of(body), _WHERE):
            check_prompt(choice, sent, _WHERE)
            message = self._reader.message(require(choice, "text", str, _WHERE), body, sent)
            facts = self._facts(choice, body, _WHERE)
            if message.get("tool_calls"):
                facts["finish_reason"] = "tool_calls"
            choices.append({"index": choice["index"], "message": message, **facts})
        return {
            "id": _id(answer),
            "object": "chat.completion",
            "created": answer.get("created") or int(time.time()),
            "model": answer.get("model") or body.get("model"),
            "choices": choices,
            "usage": require(answer, "usage", dict, _WHERE),
            "prompt_token_ids": sent,
        }

    async def _chunks(
        self, stream: AsyncIterator[ChatAnswer], body: ChatBody, sent: Tokens
    ) -> AsyncIterator[ChatAnswer]:
        begun: set[int] = set()
        count = count_of(body)
        unfinished = set(range(count))
        async for chunk in stream:
            model = chunk.get("model") or body.get("model")
            head = chunk_head(_id(chunk), chunk.get("created") or 0, model)
            for choice in require(chunk, "choices", list, _CHUNK):
                index = index_of(choice, count, _CHUNK)
                if index not in begun:
                    begun.add(index)
                    check_prompt(choice, sent, _CHUNK)
                    yield {**role_chunk(head, index), "prompt_token_ids": sent}
                text = require(choice, "text", str, _CHUNK)
                delta = {"content": text} if text else {}
                facts = self._facts(choice, body, _CHUNK)
                if facts["finish_reason"]:
                    unfinished.discard(index)
                yield {**head, "choices": [{"index": index, "delta": delta, **facts}]}
            if not chunk["choices"]:
                yield {**head, "choices": [], "usage": require(chunk, "usage", dict, _CHUNK)}
        check_ended(unfinished)

    def _facts(self, choice: dict[str, Any], body: ChatBody, where: str) -> dict[str, Any]:
        ids = require(choice, "token_ids", list, where)
        logprobs = None
        if body.get("logprobs") and ids:
            logprobs = self._logprobs(choice, body, where)
        return answer_fields(choice, ids, logprobs)

    def _logprobs(self, choice: dict[str, Any], body: ChatBody, where: str) -> dict[str, Any]:
        """Converts a completion's logprobs, whose tokens are given by id, to those of a chat."""
        held = require(choice, "logprobs", dict, where)
        try:
            read = msgspec.convert(held, _Logprobs)
        except msgspec.ValidationError as error:
            raise EngineGarbage(f"{where} holds malformed logprobs: {error}.") from None
        tops = read.top_logprobs or [None] * len(read.tokens)
        if not len(read.tokens) == len(read.token_logprobs) == len(tops):
            raise EngineGarbage(f"{where} holds logprobs of different numbers of tokens.")
        for token, id in zip(read.tokens, choice["token_ids"], strict=False):
            if token.startswith(_TOKEN_ID) and token != f"{_TOKEN_ID}{id}":
                raise EngineGarbage(f"{where} holds logprobs of other tokens than its own.")
        wanted = top_logprobs(body)
        content = []
        for token, value, top in zip(read.tokens, read.token_logprobs, tops, strict=True):
            others = list((top or {}).items())[: None if wanted < 0 else wanted]
            entry = self._entry(token, value)
            content.append({**entry, "top_logprobs": [self._entry(*other) for other in others]})
        return {"content": content}

    def _entry(self, token: str, logprob: float | None) -> dict[str, Any]:
        number = token.removeprefix(_TOKEN_ID)
        is_id = number.isdecimal() and len(number) <= _MOST_DIGITS
        text = self._format.decode([int(number)]) if is_id else token
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def _request(body: ChatBody, ids: bytes) -> ChatBody:
    request = {name: body[name] for name in body if name in _SHARED}
    request |= {
        "prompt": orjson.Fragment(ids),
        # An explicit null: without the field the limit would be 16.
        "max_tokens": max_tokens(body),
        "return_token_ids": True,
    }
    if body.get("logprobs"):
        # By id: two alternatives may have the same text.
        request |= {"logprobs": top_logprobs(body), "return_tokens_as_token_ids": True}
    if keeps_special(body):
        request["skip_special_tokens"] = False
    return request


def _foreign_field(body: ChatBody) -> str | None:
    """Returns why `body` cannot be expressed as a completion request, if so."""
    if has_tools(body) and not calls_are_free(body) and body.get("tool_choice") != "none":
        return "forced_tool"
    if any(map(is_strict, body.get("tools") or [])):
        return "grammar"
    form = body.get("response_format")
    if isinstance(form, dict) and form.get("type") not in (None, "text"):
        return "response_format"
    known = _SHARED | _READ_HERE
    foreign = (name for name in body if name not in known and body[name] not in (None, False))
    return next((f"field_{name}" for name in foreign), None)


def _id(answer: ChatAnswer) -> str:
    return chat_id(answer, "id", "cmpl-")


# Answers to an agent's text completions, and their chunks, take the form of a chat whose assistant
# says the text. Each choice keeps the completion's own `logprobs` and `prompt_token_ids`, since
# there may be several prompts.

_KEPT = (
    "index",
    "finish_reason",
    "stop_reason",
    "logprobs",
    "token_ids",
    "prompt_token_ids",
    "prompt_logprobs",
    EXPERTS,
)


class TextClient:
    """For complete requests to /v1/completions, as the agent made them."""

    def can_continue(self, body: ChatBody) -> str | None:
        return "engine_renders"

    def streams(self, body: ChatBody, ids: Ids) -> bool:
        return True

    async def whole(
        self, session: EngineSession, body: ChatBody, ids: Ids = None, *, bare: bool = False
    ) -> ChatAnswer:
        answer = await session.post(PATH, not_streamed(body))
        return _with_text(answer, _WHERE, "message", {"role": "assistant"})

    @asynccontextmanager
    async def stream(
        self, session: EngineSession, body: ChatBody, ids: Ids = None, *, bare: bool = False
    ) -> AsyncIterator[AsyncIterator[ChatAnswer]]:
        async with session.stream(PATH, streamed(body)) as chunks:
            yield (_with_text(chunk, _CHUNK, "delta", {}) async for chunk in chunks)


def _with_text(answer: ChatAnswer, where: str, name: str, role: dict[str, str]) -> ChatAnswer:
    """Returns `answer` with its texts as `name`, and the ids of the only prompt at the top."""
    choices: list[dict[str, Any]] = [
        {
            name: {**role, "content": require(choice, "text", str, where)},
            **{kept: choice[kept] for kept in _KEPT if kept in choice},
        }
        for choice in require(answer, "choices", list, where)
    ]
    result = {**answer, "choices": choices}
    prompts = [choice.get("prompt_token_ids") for choice in choices]
    if prompts and isinstance(prompts[0], list) and all(ids == prompts[0] for ids in prompts):
        result["prompt_token_ids"] = prompts[0]
    return result
