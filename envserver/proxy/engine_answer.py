"""An engine's answer to one request: the same form for whole answers and streams."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import msgspec
from envserver_records.errors import EngineGarbage
from envserver_records.experts import RoutedExperts
from envserver_records.proxy_events import HookEvent
from envserver_records.records import Call, Message

from ..tokens.builder import read_experts
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
    """A message, or the delta of one."""

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
    """`content` is set in chats, `token_logprobs` elsewhere."""

    content: list[_TokenLogprob] | None = None
    token_logprobs: Any = None


class _Ending(msgspec.Struct, kw_only=True):
    """Fields of choices in both answers and chunks."""

    index: _Index = 0
    logprobs: Logprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class _Choice(_Ending, kw_only=True):
    message: _Words


class Part(_Ending, kw_only=True):
    """A choice of a chunk."""

    delta: _Words
    token_ids: Any = None
    prompt_token_ids: Any = None
    weight_versions: Any = None


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


class _Answer(_Head, kw_only=True):
    choices: Annotated[list[_Choice], msgspec.Meta(min_length=1)]


class Chunk(_Head, kw_only=True):
    """A chunk, as it is collected for the record."""

    choices: list[Part] | None = None
    prompt_token_ids: Any = None


def check_answer(answer: dict[str, Any]) -> None:
    """Raises EngineGarbage: `answer` is not a chat answer; the message says why."""
    choices = _converted(answer, _Answer, "The engine's answer").choices
    if len({choice.index for choice in choices}) < len(choices):
        raise EngineGarbage("The engine's answer holds two choices with the same index.")


def read_chunk(chunk: dict[str, Any]) -> Chunk:
    """Raises EngineGarbage: `chunk` is not a chunk of a chat answer; the message says why."""
    read: Chunk = _converted(chunk, Chunk, "A chunk of the engine's answer")
    return read


def _converted(value: dict[str, Any], form: type[Any], what: str) -> Any:
    try:
        return msgspec.convert(value, form)
    except msgspec.ValidationError as error:
        raise EngineGarbage(f"{what} does not have the form of a chat: {error}.") from None


class SampledChoice(msgspec.Struct, kw_only=True):
    """One sampled answer; `ids` and `logprobs` are None if the engine gave none.

    Args:
        prompt_ids: of this choice alone, if a request held several prompts.
        weight_versions: vLLM's spans of `ids`, each {"version", "start", "end"}.
        told_experts: as the engine tells them; `experts`: read (`CallTask`).
        calls_dropped: whether the agent gets the first of its calls only.
        returned: the message that the agent gets instead, if it is another.
        hooked: what a hook did to it.
    """

    index: int
    message: Message
    ids: list[Any] | None = None
    logprobs: list[Any] | None = None
    prompt_ids: list[Any] | None = None
    weight_versions: list[Any] | None = None
    told_experts: Any = None
    experts: RoutedExperts | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    calls_dropped: bool = False
    returned: Message | None = None
    hooked: HookEvent | None = None


class EngineAnswer(msgspec.Struct, kw_only=True):
    """The answers to one request.

    Args:
        images: offset, length and grid of each image in the prompt, if the engine says it.
        prompt_tokens, completion_tokens: the engine's own counts, the latter over all choices."""

    choices: list[SampledChoice]
    prompt_ids: list[Any] | None = None
    completion_tokens: int | None = None
    prompt_tokens: int | None = None
    model: str = ""
    images: list[Any] | None = None

    def tokens(self) -> int:
        """Returns the number of completion tokens: the engine's count, or else the number of
        ids."""
        if self.completion_tokens is not None:
            return self.completion_tokens
        return sum(len(choice.ids or choice.logprobs or ()) for choice in self.choices)


def parse_answer(answer: dict[str, Any]) -> EngineAnswer:
    """Parses a whole chat answer. Raises EngineGarbage: it is not a chat answer."""
    check_answer(answer)
    choices = []
    for choice in answer["choices"]:
        choices.append(
            SampledChoice(
                index=choice.get("index", 0),
                message=choice["message"],
                ids=list_or_none(choice.get("token_ids")),
                logprobs=logprobs_of(choice),
                prompt_ids=list_or_none(choice.get("prompt_token_ids")),
                weight_versions=list_or_none(choice.get("weight_versions")),
                told_experts=choice.pop(EXPERTS, None),
                finish_reason=choice.get("finish_reason"),
                stop_reason=choice.get("stop_reason"),
            )
        )
    return EngineAnswer(
        choices=choices,
        prompt_ids=list_or_none(answer.get("prompt_token_ids")),
        completion_tokens=usage_count(answer, "completion_tokens"),
        prompt_tokens=usage_count(answer, "prompt_tokens"),
        model=answer.get("model") or "",
        images=list_or_none(answer.pop(IMAGES, None)),
    )


def logprobs_of(choice: dict[str, Any]) -> list[Any] | None:
    """Returns the sampled tokens' logprobs of a chat or text completion choice."""
    held = choice.get("logprobs")
    if not isinstance(held, dict):
        return None
    content = held.get("content")
    if isinstance(content, list):
        return [entry.get("logprob") if isinstance(entry, dict) else None for entry in content]
    return list_or_none(held.get("token_logprobs"))


def usage_count(answer: dict[str, Any], name: str) -> int | None:
    """Returns the engine's count of `completion_tokens` or `prompt_tokens`, if it gave one."""
    usage = answer.get("usage")
    count = usage.get(name) if isinstance(usage, dict) else None
    return count if isinstance(count, int) else None


def list_or_none(value: Any) -> list[Any] | None:
    return value if isinstance(value, list) else None


_BROKEN_OFF = (None, "", "abort", "error")
"""Reasons of an answer that the engine did not finish."""


MOST_BYTES = 2**28
"""Experts that the record of one rollout may hold; calls beyond have none (`experts_missing`)."""


async def read_all_experts(
    engine_answer: EngineAnswer, calls: Iterable[Call], sent_ids: Sequence[int] | None, start: int
) -> None:
    """Reads the experts of all choices, in a thread: there may be megabytes of them.

    An answer that the engine broke off may lack them.

    Args:
        calls: those recorded before.
        sent_ids: the prompt, for engines that do not echo it.
        start: position of the first token whose experts were asked for.
    """
    room = MOST_BYTES - sum(call.experts.ids.nbytes for call in calls if call.experts)
    for choice in engine_answer.choices:
        text, choice.told_experts = choice.told_experts, None
        prompt = choice.prompt_ids or engine_answer.prompt_ids or sent_ids
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
