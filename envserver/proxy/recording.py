"""What an engine answered -> Calls.

A call is exact only if the ids of its prompt, the ids of its completion and a logprob for each of
these are there and agree with each other and with the engine's own count; otherwise it is flagged,
never mended.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec
import numpy as np
from envserver_records.records import Call, Dialect, Message, VersionSpan
from numpy.typing import NDArray

from ..tokens.invariants import LOGPROB_ROUNDING
from ..tokens.prompts import PromptPlan
from .exchange import Choice, Exchange
from .source import VERSION_PLACE

_INT32_MAX = 2**31 - 1
_LEAST_LOGPROB = float(np.finfo(np.float32).min)
_CALL_OPENERS = ("<tool_call>", "<function=", "[TOOL_CALLS]", "<|python_tag|>", "<|tool_call>")
"""What engines leave in the text of a call that they could not parse."""
_NUMBER_AT_END = re.compile(r"(?<![\d.])(\d{1,9})$")


class Circumstances(msgspec.Struct, frozen=True, kw_only=True):
    """What all calls of one exchange share; the fields are those of Call.

    Args:
        asked_model: the name that the engine was sent (`model` may hold a place for the version).
        first_version, last_version: the policy's at the start and at the end.
        prompt: how the prompt came to be.
        follows_policy: whether the policy samples, so that what the engine says of versions counts.
        names_versions: whether the engine has said the number of a version before: one that says
            none then was started again, with the weights that it starts with.
    """

    model: str
    asked_model: str
    agent: str | None
    dialect: Dialect
    digest: bytes
    messages: list[Message]
    tools: list[dict[str, Any]]
    sampling: dict[str, Any]
    streamed: bool
    started_at: float
    seconds: float
    seconds_to_first: float | None
    first_version: int
    last_version: int
    prompt: PromptPlan
    flags: list[str]
    trained: bool = True
    follows_policy: bool = True
    names_versions: bool = False

    @property
    def is_named(self) -> bool:
        """Whether the engine was asked for one version by its name, and no other may answer."""
        return VERSION_PLACE in self.model


def calls_of(exchange: Exchange, given: Circumstances, broken: str | None = None) -> list[Call]:
    """One Call per choice, in order of the choices; `index` is set when they are committed.

    They are not delivered until `mark_delivered` says so.

    Args:
        broken: "disconnect" or "error" when the exchange ended before the engine's answer did: such
            calls hold what had arrived, and lack nothing that was promised.
    """
    shared = [*given.flags, *given.prompt.flags]
    if broken is None and not _count_agrees(exchange):
        shared.append("logprob_count_mismatch")
    if given.is_named and exchange.model not in ("", given.asked_model):
        shared.append("other_model_served")
    return [_call(exchange, choice, given, shared, broken) for choice in exchange.choices]


def _call(
    exchange: Exchange,
    choice: Choice,
    given: Circumstances,
    shared: list[str],
    broken: str | None,
) -> Call:
    plan = given.prompt
    echoed = exchange.prompt_ids if choice.prompt_ids is None else choice.prompt_ids
    prompt_ids = _ids(plan.ids if echoed is None else echoed)
    ids, logprobs = _sampled(exchange, choice)
    finish = broken or choice.finish_reason or ""
    size = 0 if ids is None else len(ids)
    counts = given.follows_policy and not given.is_named
    spans = choice.weight_versions if counts else None
    told = _told_versions(spans, size, begun_before_any=given.first_version < 0)
    versions = told or _bracketed(size, given)
    flags = [
        *shared,
        *_token_flags(prompt_ids, ids, logprobs, broken),
        *_finish_flags(finish, choice, given),
        *_version_flags(versions, given, told is not None),
    ]
    if counts and given.names_versions and choice.weight_versions and told is None:
        flags.append("weights_lost")
    if plan.ids is not None and echoed is not None and echoed != plan.ids:
        flags.append("prompt_mismatch")
    flags.append("undelivered_completion")
    return Call(
        index=-1,
        model=given.model,
        prompt_ids=np.empty(0, np.int32) if prompt_ids is None else prompt_ids,
        completion_ids=np.empty(0, np.int32) if ids is None else ids,
        logprobs=np.empty(0, np.float32) if logprobs is None else logprobs,
        versions=versions,
        exact=(
            prompt_ids is not None
            and ids is not None
            and logprobs is not None
            and "logprob_count_mismatch" not in flags
        ),
        finish_reason=finish,
        message=choice.message,
        messages=given.messages,
        tools=given.tools,
        sampling=given.sampling,
        agent=given.agent,
        trained=given.trained,
        choice=choice.index,
        stop_reason=choice.stop_reason,
        eot_sampled=finish in ("stop", "tool_calls") and not isinstance(choice.stop_reason, str),
        delivered="none",
        dialect=given.dialect,
        streamed=given.streamed,
        body_digest=given.digest,
        planned_parent=plan.parent,
        edge=plan.edge,
        refusal=plan.refusal,
        served_model=exchange.model,
        told_tokens=_told_tokens(exchange, choice, prompt_ids, ids),
        started_at=given.started_at,
        seconds=given.seconds,
        seconds_to_first=given.seconds_to_first,
        flags=_distinct(flags),
    )


def _told_tokens(
    exchange: Exchange,
    choice: Choice,
    prompt_ids: NDArray[np.int32] | None,
    ids: NDArray[np.int32] | None,
) -> tuple[int, int]:
    """The engine's counts where there are no ids; those of all choices stand at the first."""
    if choice.index:
        return (0, 0)
    prompt = 0 if prompt_ids is not None else exchange.prompt_tokens or 0
    return (prompt, 0 if ids is not None else exchange.completion_tokens or 0)


def _sampled(
    exchange: Exchange, choice: Choice
) -> tuple[NDArray[np.int32] | None, NDArray[np.float32] | None]:
    """Its ids and their logprobs. Where nothing was sampled, nothing is missing: vLLM says nothing
    about a call that is aborted before its first token."""
    ids = _ids([] if choice.ids is None and exchange.completion_tokens == 0 else choice.ids)
    empty = ids is not None and not ids.size
    return ids, _logprobs([] if choice.logprobs is None and empty else choice.logprobs)


def names_version(exchange: Exchange) -> bool:
    """Whether the engine said a version by its number."""
    return any(
        _number(span.get("version")) >= 0
        for choice in exchange.choices
        for span in choice.weight_versions or ()
        if isinstance(span, dict)
    )


def mark_delivered(calls: list[Call]) -> None:
    """The client has the whole answer."""
    for call in calls:
        call.delivered = "full"
        call.flags = [flag for flag in call.flags if flag != "undelivered_completion"]


def mark_replayed(calls: list[Call]) -> None:
    """The answer was given again to a retry."""
    for call in calls:
        call.replayed = True
        call.flags = _distinct([*call.flags, "client_retry_replayed"])


def _bracketed(size: int, given: Circumstances) -> list[VersionSpan]:
    """One span: the version that was asked for, else that at the time of the exchange.

    Where the policy changed during the exchange it is the lower one: never newer than the truth.
    """
    if given.is_named and given.follows_policy:
        version = max(0, given.first_version)
    else:
        version = min(given.first_version, given.last_version)
    return [VersionSpan(version, 0, size)] if size else []


def _told_versions(
    spans: list[Any] | None, size: int, *, begun_before_any: bool
) -> list[VersionSpan] | None:
    """The engine's spans where they have numbers and cover [0, size); else None.

    Args:
        begun_before_any: the first version may have come while the call was at the engine: what
            was sampled before it has none, and is of -1.
    """
    told: list[VersionSpan] = []
    at = 0
    for span in spans or ():
        if not isinstance(span, dict):
            return None
        number, start, end = _number(span.get("version")), span.get("start"), span.get("end")
        is_known = number >= 0 or (begun_before_any and all(one.version < 0 for one in told))
        if not is_known or start != at or type(end) is not int or end < at:
            return None
        told.append(VersionSpan(number, at, end))
        at = end
    return told if told and told[-1].version >= 0 and at == size else None


def _number(version: Any) -> int:
    """The whole number at the end of a version's name (`17`, `step-17`, `policy@17`), else -1."""
    if type(version) is int:
        return version if 0 <= version <= _INT32_MAX else -1
    found = _NUMBER_AT_END.search(version) if isinstance(version, str) else None
    return int(found[1]) if found else -1


def _version_flags(spans: list[VersionSpan], given: Circumstances, told: bool) -> list[str]:
    versions = {span.version for span in spans}
    changed = given.first_version != given.last_version and not given.is_named
    flags = []
    if len(versions) > 1 or (changed and not told):
        flags.append("mixed_versions")
    if -1 in versions and given.last_version >= 0:
        flags.append("version_unknown")
    return flags


def _count_agrees(exchange: Exchange) -> bool:
    if exchange.completion_tokens is None or any(c.ids is None for c in exchange.choices):
        return True
    return sum(len(c.ids or ()) for c in exchange.choices) == exchange.completion_tokens


def _token_flags(
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


def _finish_flags(finish: str, choice: Choice, given: Circumstances) -> list[str]:
    if finish == "length":
        in_call = bool(given.tools) and _begins_a_call(choice.message)
        return ["truncated_length", *(["truncated_in_tool_call"] if in_call else [])]
    if finish in ("abort", "error", ""):
        return ["finish_abort"]
    return ["stop_string_tail"] if isinstance(choice.stop_reason, str) else []


def _begins_a_call(message: Message) -> bool:
    """Whether an answer that was cut off holds a tool call, or what is left of one as text."""
    content = message.get("content")
    if message.get("tool_calls") or not isinstance(content, str):
        return bool(message.get("tool_calls"))
    return any(opener in content for opener in _CALL_OPENERS)


def _ids(values: list[Any] | None) -> NDArray[np.int32] | None:
    """`values` as ids; None unless every one is a whole number that can be one."""
    if values is None or not set(map(type, values)) <= {int}:
        return None
    try:
        ids = np.asarray(values, dtype=np.int64)
    except OverflowError:
        return None
    if ids.size and not 0 <= ids.min() <= ids.max() <= _INT32_MAX:
        return None
    return ids.astype(np.int32)


def _logprobs(values: list[Any] | None) -> NDArray[np.float32] | None:
    """`values` as logprobs; None unless every one is a number that can be one."""
    if values is None or not set(map(type, values)) <= {int, float}:
        return None
    if values and not _LEAST_LOGPROB <= min(values) <= max(values) <= LOGPROB_ROUNDING:
        return None
    return np.asarray(values, dtype=np.float32)


def _distinct(flags: list[str]) -> list[str]:
    return list(dict.fromkeys(flags))
