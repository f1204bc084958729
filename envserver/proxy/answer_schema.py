"""The schema of a chat answer and of its chunks, as far as the proxy relies on it.

An engine's JSON is checked here once, before it is recorded and translated. Unknown fields pass.
Token ids and logprobs may be anything: faulty ones are flagged on the call, and the agent still
gets its answer.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from envserver_records.errors import EngineGarbage

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
