"""Chunks of a chat answer: collected for the record, cleaned for the agent, or made from an answer.

With tools the engine is asked for a whole answer and the chunks are made from it, since an engine
may parse a stream differently.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from envserver_records.errors import EngineGarbage

from .engine_answer import EngineAnswer, Logprobs, Part, SampledChoice, list_or_none, read_chunk
from .engine_client.base import EXPERTS
from .engine_client.generated import IMAGES
from .model_request import ModelRequest

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
        self._prompt_ids: list[Any] | None = None
        self._completion_tokens: int | None = None
        self._prompt_tokens: int | None = None
        self._model = ""
        self._images: list[Any] | None = None

    def add(self, chunk: dict[str, Any]) -> None:
        """Adds one chunk. Raises EngineGarbage: it is not a chat chunk."""
        read = read_chunk(chunk)
        self._model = read.model or self._model
        if read.usage is not None:
            if read.usage.completion_tokens is not None:
                self._completion_tokens = read.usage.completion_tokens
            if read.usage.prompt_tokens is not None:
                self._prompt_tokens = read.usage.prompt_tokens
        if self._prompt_ids is None:
            self._prompt_ids = list_or_none(read.prompt_token_ids)
        if IMAGES in chunk:
            self._images = self._images or list_or_none(chunk.pop(IMAGES))
        for part in read.choices or ():
            self._add_choice(part)

    def engine_answer(self) -> EngineAnswer:
        """Returns the answer assembled so far."""
        for index, choice in self._choices.items():
            if index in self._lack_ids:
                choice.ids = None
            texts = self._texts[index]
            choice.message = {
                "role": "assistant",
                "content": "".join(texts.get("content", ())),
                **{name: "".join(parts) for name, parts in texts.items() if name != "content"},
            }
        return EngineAnswer(
            choices=[self._choices[index] for index in sorted(self._choices)],
            prompt_ids=self._prompt_ids,
            completion_tokens=self._completion_tokens,
            prompt_tokens=self._prompt_tokens,
            model=self._model,
            images=self._images,
        )

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
            choice.prompt_ids = list_or_none(part.prompt_token_ids)
        if isinstance(part.token_ids, list):
            choice.ids = _extended(choice.ids, part.token_ids)
        elif texts:
            self._lack_ids.add(index)
        if part.logprobs is not None and (logprobs := _numbers(part.logprobs)) is not None:
            choice.logprobs = _extended(choice.logprobs, logprobs)
        if isinstance(part.weight_versions, list):
            choice.weight_versions = part.weight_versions
        if part.finish_reason:
            choice.finish_reason = part.finish_reason
        if part.stop_reason is not None:
            choice.stop_reason = part.stop_reason


def _numbers(logprobs: Logprobs) -> list[Any] | None:
    """Returns the sampled tokens' logprobs."""
    if logprobs.content is not None:
        return [entry.logprob for entry in logprobs.content]
    return list_or_none(logprobs.token_logprobs)


def _extended(held: list[Any] | None, more: list[Any]) -> list[Any]:
    """Appends `more` to `held` in place, since a stream has thousands of chunks."""
    if held is None:
        return [*more]
    held.extend(more)
    return held


def clean_answer(answer: dict[str, Any], request: ModelRequest) -> None:
    """Removes fields that only the proxy requested from a whole answer."""
    if not request.wants_token_ids:
        answer.pop("prompt_token_ids", None)
    for choice in answer["choices"]:
        _clean_choice(choice, request)
        if not request.wants_reasoning:
            _drop_reasoning(choice["message"])


def leave_one_call(answer: dict[str, Any], engine_answer: EngineAnswer) -> None:
    """Removes all tool calls but the first from an answer, for an agent that wants one at a time;
    the record keeps the engine's message."""
    for choice, sampled in zip(answer["choices"], engine_answer.choices, strict=True):
        calls = sampled.message.get("tool_calls") or []
        if len(calls) > 1:
            choice["message"] = sampled.returned = {**sampled.message, "tool_calls": calls[:1]}
            sampled.calls_dropped = True


def clean_chunk(chunk: dict[str, Any], request: ModelRequest) -> bool:
    """Removes from a chunk what only the proxy asked for; returns False if nothing is left to
    send."""
    if not request.wants_token_ids:
        chunk.pop("prompt_token_ids", None)
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
    told = {"logprobs": choice["logprobs"]} if choice.get("logprobs") else {}
    if "token_ids" in choice:
        told["token_ids"] = choice["token_ids"]
    texts = {name: message[name] for name in ("content", "refusal") if message.get(name)}
    if texts or told:
        yield texts, told
    calls = message.get("tool_calls") or []
    for index, call in enumerate(calls):
        yield {"tool_calls": [{**call, "index": index}]}, {}
    if message.get("function_call"):
        yield {"function_call": message["function_call"]}, {}
    end = {"finish_reason": choice.get("finish_reason")}
    if "stop_reason" in choice:
        end["stop_reason"] = choice["stop_reason"]
    yield {}, end


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
