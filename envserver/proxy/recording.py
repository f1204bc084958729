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
from .endpoint import VERSION_PLACEHOLDER
from .engine_answer import EngineAnswer, SampledChoice

_INT32_MAX = 2**31 - 1
_LEAST_LOGPROB = float(np.finfo(np.float32).min)
_CALL_OPENERS = ("<tool_call>", "<function=", "[TOOL_CALLS]", "<|python_tag|>", "<|tool_call>")
"""What engines leave in the text of a call that they could not parse."""
_NUMBER_AT_END = re.compile(r"(?<![\d.])(\d{1,9})$")


class CallContext(msgspec.Struct, frozen=True, kw_only=True):
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
        return VERSION_PLACEHOLDER in self.model


def calls_of(
    engine_answer: EngineAnswer, context: CallContext, broken: str | None = None
) -> list[Call]:
    """One Call per choice, in order of the choices; `index` is set when they are committed.

    They are not delivered until `mark_delivered` says so.

    Args:
        broken: "disconnect" or "error" when the exchange ended before the engine's answer did: such
            calls hold what had arrived, and lack nothing that was promised.
    """
    shared = [*context.flags, *context.prompt.flags]
    if broken is None and not _count_agrees(engine_answer):
        shared.append("logprob_count_mismatch")
    if context.is_named and engine_answer.model not in ("", context.asked_model):
        shared.append("other_model_served")
    return [
        _call(engine_answer, choice, context, shared, broken) for choice in engine_answer.choices
    ]


def _call(
    engine_answer: EngineAnswer,
    choice: SampledChoice,
    context: CallContext,
    shared: list[str],
    broken: str | None,
) -> Call:
    plan = context.prompt
    echoed = engine_answer.prompt_ids if choice.prompt_ids is None else choice.prompt_ids
    prompt_ids = _ids(plan.ids if echoed is None else echoed)
    ids, logprobs = _sampled(engine_answer, choice)
    finish = broken or choice.finish_reason or ""
    size = 0 if ids is None else len(ids)
    counts = context.follows_policy and not context.is_named
    spans = choice.weight_versions if counts else None
    told = _told_versions(spans, size, begun_before_any=context.first_version < 0)
    versions = told or _bracketed(size, context)
    flags = [
        *shared,
        *_token_flags(prompt_ids, ids, logprobs, broken),
        *_finish_flags(finish, choice, context),
        *_version_flags(versions, context, told is not None),
    ]
    if counts and context.names_versions and choice.weight_versions and told is None:
        flags.append("weights_lost")
    if plan.ids is not None and echoed is not None and echoed != plan.ids:
        flags.append("prompt_mismatch")
    flags.append("undelivered_completion")
    return Call(
        index=-1,
        model=context.model,
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
        messages=context.messages,
        tools=context.tools,
        sampling=context.sampling,
        agent=context.agent,
        trained=context.trained,
        choice=choice.index,
        stop_reason=choice.stop_reason,
        eot_sampled=finish in ("stop", "tool_calls") and not isinstance(choice.stop_reason, str),
        delivered="none",
        dialect=context.dialect,
        streamed=context.streamed,
        body_digest=context.digest,
        planned_parent=plan.parent,
        edge=plan.edge,
        refusal=plan.refusal,
        served_model=engine_answer.model,
        told_tokens=_told_tokens(engine_answer, choice, prompt_ids, ids),
        started_at=context.started_at,
        seconds=context.seconds,
        seconds_to_first=context.seconds_to_first,
        flags=_distinct(flags),
    )


def _told_tokens(
    engine_answer: EngineAnswer,
    choice: SampledChoice,
    prompt_ids: NDArray[np.int32] | None,
    ids: NDArray[np.int32] | None,
) -> tuple[int, int]:
    """The engine's counts where there are no ids; those of all choices stand at the first."""
    if choice.index:
        return (0, 0)
    prompt = 0 if prompt_ids is not None else engine_answer.prompt_tokens or 0
    return (prompt, 0 if ids is not None else engine_answer.completion_tokens or 0)


def _sampled(
    engine_answer: EngineAnswer, choice: SampledChoice
) -> tuple[NDArray[np.int32] | None, NDArray[np.float32] | None]:
    """Its ids and their logprobs. Where nothing was sampled, nothing is missing: vLLM says nothing
    about a call that is aborted before its first token."""
    ids = _ids([] if choice.ids is None and engine_answer.completion_tokens == 0 else choice.ids)
    empty = ids is not None and not ids.size
    return ids, _logprobs([] if choice.logprobs is None and empty else choice.logprobs)


def names_version(engine_answer: EngineAnswer) -> bool:
    """Whether the engine said a version by its number."""
    return any(
        _number(span.get("version")) >= 0
        for choice in engine_answer.choices
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


def _bracketed(size: int, context: CallContext) -> list[VersionSpan]:
    """One span: the version that was asked for, else that at the time of the exchange.

    Where the policy changed during the exchange it is the lower one: never newer than the truth.
    """
    if context.is_named and context.follows_policy:
        version = max(0, context.first_version)
    else:
        version = min(context.first_version, context.last_version)
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


def _version_flags(spans: list[VersionSpan], context: CallContext, told: bool) -> list[str]:
    versions = {span.version for span in spans}
    changed = context.first_version != context.last_version and not context.is_named
    flags = []
    if len(versions) > 1 or (changed and not told):
        flags.append("mixed_versions")
    if -1 in versions and context.last_version >= 0:
        flags.append("version_unknown")
    return flags


def _count_agrees(engine_answer: EngineAnswer) -> bool:
    if engine_answer.completion_tokens is None or any(c.ids is None for c in engine_answer.choices):
        return True
    return sum(len(c.ids or ()) for c in engine_answer.choices) == engine_answer.completion_tokens


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


def _finish_flags(finish: str, choice: SampledChoice, context: CallContext) -> list[str]:
    if finish == "length":
        in_call = bool(context.tools) and _begins_a_call(choice.message)
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
