"""An engine's answer to one request, in the same form for whole answers and streams.

Chunks are collected, cleaned, or made from a whole answer: with tools the engine is asked for a
whole one, since an engine may parse a stream differently.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
from envserver_records.errors import EngineGarbage
from envserver_records.experts import RoutedExperts
from envserver_records.records import Call, Message, Tokens
from envserver_records.timings import HookEvent

from ..tokens.builder import read_experts
from .dialects.base import ModelRequest
from .engine_client.base import EXPERTS
from .engine_client.generated import IMAGES

# An engine's JSON is checked here once, before it is recorded and translated. Unknown fields pass.
# Token ids and logprobs may be anything: faulty ones are flagged on the call, and the agent still
# gets its answer.

_Index = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
_Count = Annotated[int, msgspec.Meta(ge=0, lt=2**53)] | None
"""A limit, since counts are summed and JSON numbers are exact only up to 2**53."""


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _ToolCall(msgspec.Struct):
    id: str | None = None
    function: _Function | None = None


class _Words(msgspec.Struct):
    role: str | None = None
    content: str | None = None
    refusal: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[_ToolCall] | None = None
    function_call: dict[str, Any] | None = None


class _Logprob(msgspec.Struct):
    token: str
    logprob: float | None
    bytes: list[int] | None = None


class _TokenLogprob(_Logprob):
    top_logprobs: list[_Logprob] | None = None


class Logprobs(msgspec.Struct):
    """`content` is set in chats, `token_logprobs` in text completions."""

    content: list[_TokenLogprob] | None = None
    token_logprobs: Any = None


class _Sampled(msgspec.Struct, kw_only=True):
    index: _Index = 0
    logprobs: Logprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: Any = None
    prompt_token_ids: Any = None
    weight_versions: Any = None


class _Choice(_Sampled, kw_only=True):
    message: _Words


class Part(_Sampled, kw_only=True):
    delta: _Words


class _Details(msgspec.Struct):
    cached_tokens: _Count = None
    reasoning_tokens: _Count = None


class _Usage(msgspec.Struct):
    prompt_tokens: _Count = None
    completion_tokens: _Count = None
    prompt_tokens_details: _Details | None = None
    completion_tokens_details: _Details | None = None


class _Head(msgspec.Struct, kw_only=True):
    id: str | None = None
    created: float | None = None
    model: str | None = None
    usage: _Usage | None = None
    prompt_token_ids: Any = None


_HeadT = TypeVar("_HeadT", bound=_Head)


class _Answer(_Head, kw_only=True):
    choices: Annotated[list[_Choice], msgspec.Meta(min_length=1)]


class Chunk(_Head, kw_only=True):
    choices: list[Part] | None = None


def _converted(value: dict[str, Any], form: type[_HeadT], what: str) -> _HeadT:
    try:
        return msgspec.convert(value, form)
    except msgspec.ValidationError as error:
        raise EngineGarbage(f"{what} does not have the form of a chat: {error}.") from None


class SampledChoice(msgspec.Struct, kw_only=True):
    """One sampled answer; `ids` and `logprobs` are None if the engine gave none.

    Args:
        prompt_ids: of this choice alone, if a request held several prompts.
        weight_versions: vLLM's spans of `ids`, each {"version", "start", "end"}.
        raw_experts: as the engine reports them; `experts`: read (`CallTask`).
        returned: the message that the agent gets instead, if it is another.
    """

    index: int
    message: Message
    ids: list[Any] | None = None
    logprobs: list[Any] | None = None
    prompt_ids: Tokens | list[Any] | None = None
    weight_versions: list[Any] | None = None
    raw_experts: Any = None
    experts: RoutedExperts | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    calls_dropped: bool = False
    returned: Message | None = None
    hooked: HookEvent | None = None


class EngineAnswer(msgspec.Struct, kw_only=True):
    """The answers to one request, with the engine's own counts, over all choices.

    `images`: offset, length and grid of each image in the prompt, if the engine reports them.
    """

    choices: list[SampledChoice] = []
    prompt_ids: Tokens | list[Any] | None = None
    completion_tokens: int | None = None
    prompt_tokens: int | None = None
    model: str = ""
    images: list[Any] | None = None

    def tokens(self) -> int:
        """Returns the number of completion tokens: the engine's count, or else that of the ids."""
        if self.completion_tokens is not None:
            return self.completion_tokens
        return sum(len(choice.ids or choice.logprobs or ()) for choice in self.choices)

    def take(self, head: _Head, answer: dict[str, Any]) -> None:
        """Takes what an answer or a chunk says besides its choices."""
        self.model = head.model or self.model
        if self.prompt_ids is None:
            self.prompt_ids = _prompt(head.prompt_token_ids)
        if head.usage is not None:
            if head.usage.completion_tokens is not None:
                self.completion_tokens = head.usage.completion_tokens
            if head.usage.prompt_tokens is not None:
                self.prompt_tokens = head.usage.prompt_tokens
        if IMAGES in answer:
            self.images = self.images or _list(answer.pop(IMAGES))


def parse_answer(answer: dict[str, Any]) -> EngineAnswer:
    read = _converted(answer, _Answer, "The engine's answer")
    if len({choice.index for choice in read.choices}) < len(read.choices):
        raise EngineGarbage("The engine's answer holds two choices with the same index.")
    engine_answer = EngineAnswer()
    engine_answer.take(read, answer)
    for choice, sampled in zip(answer["choices"], read.choices, strict=True):
        engine_answer.choices.append(
            SampledChoice(
                index=sampled.index,
                message=choice["message"],
                ids=_list(sampled.token_ids),
                logprobs=_numbers(sampled.logprobs),
                prompt_ids=_prompt(sampled.prompt_token_ids),
                weight_versions=_list(sampled.weight_versions),
                raw_experts=choice.pop(EXPERTS, None),
                finish_reason=sampled.finish_reason,
                stop_reason=sampled.stop_reason,
            )
        )
    return engine_answer


def _list(value: Any) -> list[Any] | None:
    return value if isinstance(value, list) else None


def _prompt(value: Any) -> Tokens | list[Any] | None:
    """Returns a prompt as the engine echoed it, or as it was sent, if it is the same."""
    return value if isinstance(value, np.ndarray) else _list(value)


def _numbers(logprobs: Logprobs | None) -> list[Any] | None:
    if logprobs is not None and logprobs.content is not None:
        return [entry.logprob for entry in logprobs.content]
    return None if logprobs is None else _list(logprobs.token_logprobs)


_BROKEN_OFF = (None, "", "abort", "error")
"""Reasons of an answer that the engine did not finish."""


MOST_BYTES = 2**28
"""Experts that the record of one rollout may hold; calls beyond have none (`experts_missing`)."""


async def read_all_experts(
    engine_answer: EngineAnswer, calls: Iterable[Call], sent_ids: Tokens | None, start: int
) -> None:
    """Reads the experts of all choices, in a thread: there may be megabytes of them.

    An answer that the engine broke off may lack them. `sent_ids`: the prompt, for engines that do
    not echo it; `start`: position of the first token whose experts were asked for.
    """
    room = MOST_BYTES - sum(call.experts.ids.nbytes for call in calls if call.experts)
    for choice in engine_answer.choices:
        text, choice.raw_experts = choice.raw_experts, None
        prompts = (choice.prompt_ids, engine_answer.prompt_ids, sent_ids)
        prompt = next((ids for ids in prompts if ids is not None), None)
        if prompt is None or not choice.ids:
            continue
        try:
            if not isinstance(text, str):
                raise EngineGarbage("The engine's answer has no routed experts.")
            size = len(prompt) + len(choice.ids)
            found = await asyncio.to_thread(read_experts, text, size, start)
        except EngineGarbage:
            if choice.finish_reason not in _BROKEN_OFF:
                raise
            continue
        if found.ids.nbytes <= room:
            choice.experts = found
            room -= found.ids.nbytes


_REASONING = ("reasoning", "reasoning_content")
_ANSWER = ("content", "refusal")
_TEXTS = (*_ANSWER, *_REASONING)


class Collector:
    """Assembles the engine's chunks of one stream, before they are cleaned."""

    def __init__(self, request: ModelRequest) -> None:
        self._wanted = _TEXTS if request.wants_reasoning else _ANSWER
        self._choices: dict[int, SampledChoice] = {}
        self._texts: dict[int, dict[str, list[str]]] = {}
        self._lack_ids: set[int] = set()
        """Choices with a text whose ids are missing."""
        self._answer = EngineAnswer()

    def add(self, chunk: dict[str, Any]) -> None:
        read = _converted(chunk, Chunk, "A chunk of the engine's answer")
        self._answer.take(read, chunk)
        for part in read.choices or ():
            self._add_choice(part)

    def engine_answer(self) -> EngineAnswer:
        for index, choice in self._choices.items():
            if index in self._lack_ids:
                choice.ids = None
            texts = self._texts[index]
            choice.message = {
                "role": "assistant",
                "content": "".join(texts.get("content", ())),
                **{name: "".join(parts) for name, parts in texts.items() if name != "content"},
            }
        self._answer.choices = [self._choices[index] for index in sorted(self._choices)]
        return self._answer

    def _add_choice(self, part: Part) -> None:
        index = part.index
        choice = self._choices.get(index)
        if choice is None:
            choice = self._choices[index] = SampledChoice(index=index, message={})
            self._texts[index] = {}
        texts = {name: text for name in self._wanted if (text := getattr(part.delta, name))}
        if choice.finish_reason and (
            texts or part.token_ids or part.finish_reason not in (None, "", choice.finish_reason)
        ):
            raise EngineGarbage(f"The engine's stream goes on with choice {index} after its end.")
        for name, text in texts.items():
            self._texts[index].setdefault(name, []).append(text)
        if choice.prompt_ids is None:
            choice.prompt_ids = _prompt(part.prompt_token_ids)
        if isinstance(part.token_ids, list):
            choice.ids = _extended(choice.ids, part.token_ids)
        elif texts:
            self._lack_ids.add(index)
        if (logprobs := _numbers(part.logprobs)) is not None:
            choice.logprobs = _extended(choice.logprobs, logprobs)
        if isinstance(part.weight_versions, list):
            choice.weight_versions = part.weight_versions
        if part.finish_reason:
            choice.finish_reason = part.finish_reason
        if part.stop_reason is not None:
            choice.stop_reason = part.stop_reason


def _extended(held: list[Any] | None, more: list[Any]) -> list[Any]:
    """Appends `more` to `held` in place, since a stream has thousands of chunks."""
    if held is None:
        return [*more]
    held.extend(more)
    return held


def clean_answer(answer: dict[str, Any], request: ModelRequest) -> None:
    _clean_prompt(answer, request)
    for choice in answer["choices"]:
        _clean_choice(choice, request)
        if not request.wants_reasoning:
            _drop_reasoning(choice["message"])


def leave_one_call(answer: dict[str, Any], engine_answer: EngineAnswer) -> None:
    """Removes all tool calls but the first; the record keeps the engine's message."""
    for choice, sampled in zip(answer["choices"], engine_answer.choices, strict=True):
        calls = sampled.message.get("tool_calls") or []
        if len(calls) > 1:
            choice["message"] = sampled.returned = {**sampled.message, "tool_calls": calls[:1]}
            sampled.calls_dropped = True


def clean_chunk(chunk: dict[str, Any], request: ModelRequest) -> bool:
    """Removes what only the proxy asked for; returns False if nothing is left to send."""
    _clean_prompt(chunk, request)
    if request.wants_usage:
        chunk.setdefault("usage", None)
    else:
        chunk.pop("usage", None)
    parts = _choices(chunk)
    says = request.wants_logprobs or request.wants_token_ids
    for part in parts:
        _clean_choice(part, request)
        if not request.wants_reasoning:
            _drop_reasoning(part["delta"])
        says = says or bool(part.get("finish_reason")) or any(part["delta"].values())
    return says if parts else request.wants_usage


def is_last(chunk: dict[str, Any]) -> bool:
    """Returns whether a choice ends with this chunk, or all have ended (usage)."""
    parts = _choices(chunk)
    for part in parts:
        if part.get("finish_reason"):
            return True
    return not parts


def chunks_of(answer: dict[str, Any], request: ModelRequest) -> Iterator[dict[str, Any]]:
    """Splits a cleaned whole answer into chunks: role, texts, whole tool calls, end; then usage."""
    head = {
        "id": answer.get("id", ""),
        "object": "chat.completion.chunk",
        "created": answer.get("created", 0),
        "model": answer.get("model", ""),
    }
    if request.wants_usage:
        head["usage"] = None
    for choice in answer["choices"]:
        for delta, rest in _parts_of(choice):
            part = {"index": choice.get("index", 0), "delta": delta, "finish_reason": None, **rest}
            yield {**head, "choices": [part]}
    if request.wants_usage:
        yield {**head, "choices": [], "usage": answer.get("usage")}


def _parts_of(choice: dict[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    message = choice["message"]
    yield {"role": "assistant", "content": ""}, {}
    for name in _REASONING:
        if message.get(name):
            yield {name: message[name]}, {}
    fields = {"logprobs": choice["logprobs"]} if choice.get("logprobs") else {}
    if "token_ids" in choice:
        fields["token_ids"] = choice["token_ids"]
    texts = {name: message[name] for name in ("content", "refusal") if message.get(name)}
    if texts or fields:
        yield texts, fields
    calls = message.get("tool_calls") or []
    for index, call in enumerate(calls):
        yield {"tool_calls": [{**call, "index": index}]}, {}
    if message.get("function_call"):
        yield {"function_call": message["function_call"]}, {}
    end = {"finish_reason": choice.get("finish_reason")}
    if "stop_reason" in choice:
        end["stop_reason"] = choice["stop_reason"]
    yield {}, end


def _clean_prompt(answer: dict[str, Any], request: ModelRequest) -> None:
    ids = answer.get("prompt_token_ids")
    if not request.wants_token_ids:
        answer.pop("prompt_token_ids", None)
    elif isinstance(ids, np.ndarray):
        answer["prompt_token_ids"] = ids.tolist()


def _clean_choice(choice: dict[str, Any], request: ModelRequest) -> None:
    choice.pop("weight_versions", None)
    choice.pop(EXPERTS, None)
    if not request.wants_token_ids:
        choice.pop("token_ids", None)
        choice.pop("prompt_token_ids", None)
    if not request.wants_logprobs and "logprobs" in choice:
        choice["logprobs"] = None


def _drop_reasoning(holder: dict[str, Any]) -> None:
    for name in _REASONING:
        holder.pop(name, None)


def _choices(chunk: dict[str, Any]) -> list[dict[str, Any]]:
    return chunk.get("choices") or []
