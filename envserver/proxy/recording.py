"""What an engine answered -> Calls.

`Exchange` is the common form of a whole answer and of a collected stream. A call is exact only if
the ids of its prompt, the ids of its completion and a logprob for each of these are there and agree
with each other and with the engine's own count; otherwise it is flagged, never mended.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..errors import EngineGarbage
from ..records import Call, Message, VersionSpan

_INT32_MAX = 2**31 - 1


class Choice(msgspec.Struct, kw_only=True):
    """One answer. `ids`, `logprobs` None: the engine gave none."""

    index: int
    message: Message
    ids: list[Any] | None = None
    logprobs: list[Any] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class Exchange(msgspec.Struct, kw_only=True):
    """One request's answers. `completion_tokens` is the engine's own count over all choices."""

    choices: list[Choice]
    prompt_ids: list[Any] | None = None
    completion_tokens: int | None = None

    def tokens(self) -> int:
        """Completion tokens, by the engine's count or else by the ids."""
        if self.completion_tokens is not None:
            return self.completion_tokens
        return sum(len(choice.ids or choice.logprobs or ()) for choice in self.choices)


class Circumstances(msgspec.Struct, frozen=True, kw_only=True):
    """What all calls of one exchange share. Versions are those at its start and at its end."""

    model: str
    agent: str | None
    messages: list[Message]
    tools: list[dict[str, Any]]
    sampling: dict[str, Any]
    streamed: bool
    started_at: float
    seconds: float
    first_version: int
    last_version: int
    flags: list[str]


def exchange_of(answer: dict[str, Any]) -> Exchange:
    """The exchange in a whole chat answer.

    Raises:
        EngineGarbage: it is no chat answer.
    """
    given = answer.get("choices")
    if not isinstance(given, list) or not given:
        raise EngineGarbage("The engine's answer holds no choices.")
    choices = []
    for position, choice in enumerate(given):
        if not isinstance(choice, dict) or not isinstance(choice.get("message"), dict):
            raise EngineGarbage("A choice in the engine's answer holds no message.")
        index = choice.get("index")
        choices.append(
            Choice(
                index=index if isinstance(index, int) else position,
                message=choice["message"],
                ids=_list(choice.get("token_ids")),
                logprobs=logprobs_of(choice),
                finish_reason=_text(choice.get("finish_reason")),
                stop_reason=_stop_reason(choice.get("stop_reason")),
            )
        )
    return Exchange(
        choices=choices,
        prompt_ids=_list(answer.get("prompt_token_ids")),
        completion_tokens=completion_tokens_of(answer),
    )


def calls_of(exchange: Exchange, given: Circumstances, broken: str | None = None) -> list[Call]:
    """One Call per choice, in order of the choices; `index` is set when they are committed.

    Args:
        broken: "disconnect" or "error" when the exchange ended before the engine's answer did: such
            calls hold what had arrived, are not delivered, and lack nothing that was promised.
    """
    prompt_ids = _ids(exchange.prompt_ids)
    shared = list(given.flags)
    if given.first_version != given.last_version:
        shared.append("mixed_versions")
    if broken is None and not _count_agrees(exchange):
        shared.append("logprob_count_mismatch")
    version = min(given.first_version, given.last_version)
    calls = []
    for choice in exchange.choices:
        ids, logprobs = _ids(choice.ids), _logprobs(choice.logprobs)
        finish = broken or choice.finish_reason or ""
        own = _choice_flags(prompt_ids, ids, logprobs, broken) + _finish_flags(finish)
        size = 0 if ids is None else len(ids)
        exact = (
            prompt_ids is not None
            and ids is not None
            and logprobs is not None
            and len(ids) == len(logprobs)
            and "logprob_count_mismatch" not in shared
        )
        calls.append(
            Call(
                index=-1,
                model=given.model,
                prompt_ids=np.empty(0, np.int32) if prompt_ids is None else prompt_ids,
                completion_ids=np.empty(0, np.int32) if ids is None else ids,
                logprobs=np.empty(0, np.float32) if logprobs is None else logprobs,
                versions=[VersionSpan(version, 0, size)] if size else [],
                exact=exact,
                finish_reason=finish,
                message=choice.message,
                messages=given.messages,
                tools=given.tools,
                sampling=given.sampling,
                agent=given.agent,
                choice=choice.index,
                stop_reason=choice.stop_reason,
                streamed=given.streamed,
                started_at=given.started_at,
                seconds=given.seconds,
                flags=_union(shared, own),
            )
        )
    if broken is not None:
        mark_undelivered(calls)
    return calls


def mark_undelivered(calls: list[Call]) -> None:
    """The client was gone before it had the whole answer."""
    for call in calls:
        call.delivered = "none"
        call.flags = _union(call.flags, ["undelivered_completion"])


def logprobs_of(choice: dict[str, Any]) -> list[Any] | None:
    """The logprobs in a choice of a chat answer or chunk, None when there are none."""
    held = choice.get("logprobs")
    content = held.get("content") if isinstance(held, dict) else None
    if not isinstance(content, list):
        return None
    return [entry.get("logprob") if isinstance(entry, dict) else None for entry in content]


def completion_tokens_of(answer: dict[str, Any]) -> int | None:
    """The engine's own count of completion tokens."""
    usage = answer.get("usage")
    count = usage.get("completion_tokens") if isinstance(usage, dict) else None
    return count if isinstance(count, int) else None


def _count_agrees(exchange: Exchange) -> bool:
    if exchange.completion_tokens is None or any(c.ids is None for c in exchange.choices):
        return True
    return sum(len(c.ids or ()) for c in exchange.choices) == exchange.completion_tokens


def _choice_flags(
    prompt_ids: NDArray[np.int32] | None,
    ids: NDArray[np.int32] | None,
    logprobs: NDArray[np.float32] | None,
    broken: str | None,
) -> list[str]:
    flags = []
    if broken is None and (prompt_ids is None or ids is None):
        flags.append("missing_token_ids")
    if broken is None and logprobs is None:
        flags.append("missing_logprobs")
    if ids is not None and logprobs is not None and len(ids) != len(logprobs):
        flags.append("logprob_count_mismatch")
    return flags


def _finish_flags(finish: str) -> list[str]:
    if finish == "length":
        return ["truncated_length"]
    return ["finish_abort"] if finish in ("abort", "error", "") else []


def _ids(values: list[Any] | None) -> NDArray[np.int32] | None:
    """`values` as ids; None unless every one is a whole number that can be one."""
    if values is None:
        return None
    if not values:
        return np.empty(0, np.int32)
    try:
        array = np.asarray(values)
    except (ValueError, OverflowError):
        return None
    if array.ndim != 1 or array.dtype.kind != "i":
        return None
    if int(array.min()) < 0 or int(array.max()) > _INT32_MAX:
        return None
    return array.astype(np.int32)


def _logprobs(values: list[Any] | None) -> NDArray[np.float32] | None:
    """`values` as logprobs; None unless every one is a finite number."""
    if values is None:
        return None
    if not all(isinstance(value, float | int) for value in values):
        return None
    array = np.asarray(values, dtype=np.float32)
    return array if bool(np.isfinite(array).all()) else None


def _union(one: list[str], other: list[str]) -> list[str]:
    return list(dict.fromkeys([*one, *other]))


def _list(value: Any) -> list[Any] | None:
    return value if isinstance(value, list) else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _stop_reason(value: Any) -> int | str | None:
    return value if isinstance(value, int | str) else None
