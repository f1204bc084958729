"""Turns an engine's answer into Calls.

A call is exact only if it has the prompt's ids, the completion's ids and a logprob for each of
these, and if they agree with each other and with the engine's own count. A call that is not exact
is flagged, never repaired.
"""

from __future__ import annotations

import re
from array import array
from typing import Any

import msgspec
import numpy as np
from envserver_records.images import ImageSpan
from envserver_records.records import Call, Message, VersionSpan
from envserver_records.sampling import LEAST_LOGPROB, LOGPROB_ROUNDING
from envserver_records.timings import HookEvent
from numpy.typing import NDArray

from ..tokens.history import PromptPlan
from ..tokens.images import folded, placed, spans
from .endpoint import VERSION_PLACEHOLDER
from .engine_answer import EngineAnswer, SampledChoice

_INT32_MAX = 2**31 - 1
_LEAST_NUMBER = float(np.finfo(np.float32).min)
_CALL_OPENERS = ("<tool_call>", "<function=", "[TOOL_CALLS]", "<|python_tag|>", "<|tool_call>")
"""Markers that stay in the text when an engine could not parse a tool call."""
_NUMBER_AT_END = re.compile(r"(?<![\d.])(\d{1,9})$")


NO_IDS = np.empty(0, np.int32)
NO_LOGPROBS = np.empty(0, np.float32)


class CallContext(msgspec.Struct, frozen=True, kw_only=True):
    """What all calls of one engine answer have in common.

    Args:
        call: has the fields that they share, as far as they are known before the answer.
        asked_model: the name that was requested (`call.model` may hold a placeholder).
        first_version, last_version: the policy version at the start and at the end.
        follows_policy: whether the policy samples, so that the engine's version numbers count.
        images: SHA-256 of each image of the request, in order.
        folded: the prompt with one `image_token` for each of them, if it is known.
        names_versions: whether the engine has reported a version number before. If it reports none
            afterwards, it was restarted and has lost the published weights.
    """

    call: Call
    prompt: PromptPlan
    asked_model: str
    first_version: int
    last_version: int
    follows_policy: bool
    names_versions: bool
    images: list[str]
    folded: list[int] | None
    image_token: int | None
    wants_experts: bool

    @property
    def is_named(self) -> bool:
        """Whether the request named a version, so that no other version may answer."""
        return VERSION_PLACEHOLDER in self.call.model


def calls_of(
    engine_answer: EngineAnswer, context: CallContext, broken: str | None = None
) -> list[Call]:
    """Returns one Call per choice, undelivered; `index` is set when they are committed.

    `broken`: "disconnect" or "error" if the exchange ended before the engine's answer did. Such
    calls hold what had arrived and get no flags for missing fields.
    """
    shared = [*context.call.flags, *context.prompt.flags, *map(_hook_flag, context.call.hooks)]
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
    plan, hooked = context.prompt, [] if choice.hooked is None else [choice.hooked]
    echoed = engine_answer.prompt_ids if choice.prompt_ids is None else choice.prompt_ids
    if isinstance(echoed, np.ndarray):  # the plan's own: the engine saw what was sent
        echoed = None
    prompt_ids = plan.ids if echoed is None else _ids(echoed)
    ids, logprobs = _sampled(engine_answer, choice)
    finish = broken or choice.finish_reason or ""
    size = 0 if ids is None else len(ids)
    counts = context.follows_policy and not context.is_named
    spans = choice.weight_versions if counts else None
    reported = _reported_versions(spans, size, begun_before_any=context.first_version < 0)
    versions = reported or _bracketed(size, context)
    flags = [
        *shared,
        *_token_flags(prompt_ids, ids, logprobs, broken),
        *(["extreme_logprob"] if logprobs is not None and _is_extreme(logprobs) else []),
        *_finish_flags(finish, choice, context),
        *(["parallel_calls_dropped"] if choice.calls_dropped else []),
        *_version_flags(versions, context, reported is not None),
        *map(_hook_flag, hooked),
    ]
    if counts and context.names_versions and choice.weight_versions and reported is None:
        flags.append("weights_lost")
    if context.wants_experts and choice.experts is None and size:
        flags.append("experts_missing")
    images = _images(engine_answer, context, prompt_ids)
    if images is None:
        flags.append("images_unplaced")
    if echoed is not None and _is_other(echoed, images, context):
        flags.append("prompt_mismatch")
    flags.append("undelivered_completion")
    return msgspec.structs.replace(
        context.call,
        prompt_ids=NO_IDS if prompt_ids is None else prompt_ids,
        completion_ids=NO_IDS if ids is None else ids,
        logprobs=NO_LOGPROBS if logprobs is None else logprobs,
        versions=versions,
        exact=(
            prompt_ids is not None
            and ids is not None
            and logprobs is not None
            and "logprob_count_mismatch" not in flags
        ),
        finish_reason=finish,
        message=choice.message if choice.returned is None else choice.returned,
        sampled_message=None if choice.returned is None else choice.message,
        hooks=context.call.hooks + hooked,
        choice=choice.index,
        stop_reason=choice.stop_reason,
        eot_sampled=finish in ("stop", "tool_calls") and not isinstance(choice.stop_reason, str),
        served_model=engine_answer.model,
        told_tokens=_told_tokens(engine_answer, choice, prompt_ids, ids),
        flags=_distinct(flags),
        images=images or [],
        experts=choice.experts,
    )


def _images(
    engine_answer: EngineAnswer, context: CallContext, prompt_ids: NDArray[np.int32] | None
) -> list[ImageSpan] | None:
    """Returns the images of the prompt; None if it has some and their places are unknown."""
    if not context.images or prompt_ids is None:
        return []
    places = engine_answer.images
    if places is not None and len(places) == len(context.images):
        ranges = [(offset, length) for offset, length, _ in places]
        return spans(context.images, ranges, [grid for _, _, grid in places])
    if context.folded is None or context.image_token is None:
        return None
    found = placed(context.folded, prompt_ids.tolist(), context.image_token)
    return (
        None if found is None or len(found) != len(context.images) else spans(context.images, found)
    )


def _folded(echoed: list[Any], images: list[ImageSpan] | None, context: CallContext) -> list[Any]:
    if not images or context.image_token is None:
        return echoed
    return folded(echoed, [(image.offset, image.length) for image in images], context.image_token)


def _is_other(echoed: list[Any], images: list[ImageSpan] | None, context: CallContext) -> bool:
    planned = context.prompt.ids
    return planned is not None and _folded(echoed, images, context) != planned.tolist()


def _told_tokens(
    engine_answer: EngineAnswer,
    choice: SampledChoice,
    prompt_ids: NDArray[np.int32] | None,
    ids: NDArray[np.int32] | None,
) -> tuple[int, int]:
    """Returns the engine's (prompt, completion) counts for missing ids, on the first choice."""
    if choice.index:
        return (0, 0)
    prompt = 0 if prompt_ids is not None else engine_answer.prompt_tokens or 0
    return (prompt, 0 if ids is not None else engine_answer.completion_tokens or 0)


def _sampled(
    engine_answer: EngineAnswer, choice: SampledChoice
) -> tuple[NDArray[np.int32] | None, NDArray[np.float32] | None]:
    """Returns sampled ids and logprobs; vLLM sends neither if it aborts before the first token."""
    ids = _ids([] if choice.ids is None and engine_answer.completion_tokens == 0 else choice.ids)
    empty = ids is not None and not ids.size
    return ids, _logprobs([] if choice.logprobs is None and empty else choice.logprobs)


def names_version(engine_answer: EngineAnswer) -> bool:
    return any(
        _number(span.get("version")) >= 0
        for choice in engine_answer.choices
        for span in choice.weight_versions or ()
        if isinstance(span, dict)
    )


def mark_delivered(calls: list[Call]) -> None:
    for call in calls:
        call.delivered = "full"
        call.flags = [flag for flag in call.flags if flag != "undelivered_completion"]


def mark_replayed(calls: list[Call]) -> None:
    for call in calls:
        call.replayed = True
        call.flags = _distinct([*call.flags, "client_retry_replayed"])


def _bracketed(size: int, context: CallContext) -> list[VersionSpan]:
    """Returns one span with the requested version, or else the lowest during the call."""
    if context.is_named and context.follows_policy:
        version = max(0, context.first_version)
    else:
        version = min(context.first_version, context.last_version)
    return [VersionSpan(version, 0, size)] if size else []


def _reported_versions(
    spans: list[Any] | None, size: int, *, begun_before_any: bool
) -> list[VersionSpan] | None:
    """Returns the engine's spans if they have numbers and cover [0, size), else None.

    `begun_before_any`: the first version may have been published during the call: -1 before it.
    """
    found: list[VersionSpan] = []
    at = 0
    for span in spans or ():
        if not isinstance(span, dict):
            return None
        number, start, end = _number(span.get("version")), span.get("start"), span.get("end")
        is_known = number >= 0 or (
            begun_before_any and all(segment.version < 0 for segment in found)
        )
        if not is_known or start != at or type(end) is not int or end < at:
            return None
        found.append(VersionSpan(number, at, end))
        at = end
    return found if found and found[-1].version >= 0 and at == size else None


def _number(version: Any) -> int:
    """Returns the integer at the end of a version name (`17`, `step-17`, `policy@17`), or -1."""
    if type(version) is int:
        return version if 0 <= version <= _INT32_MAX else -1
    found = _NUMBER_AT_END.search(version) if isinstance(version, str) else None
    return int(found[1]) if found else -1


def _version_flags(spans: list[VersionSpan], context: CallContext, reported: bool) -> list[str]:
    versions = {span.version for span in spans}
    changed = context.first_version != context.last_version and not context.is_named
    flags = []
    if len(versions) > 1 or (changed and not reported):
        flags.append("mixed_versions")
    if -1 in versions and context.last_version >= 0:
        flags.append("version_unknown")
    return flags


def _hook_flag(event: HookEvent) -> str:
    return f"{event.at}_{'changed' if event.changed else 'refused'}"


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
        in_call = bool(context.call.tools) and _begins_a_call(choice.message)
        return ["truncated_length", *(["truncated_in_tool_call"] if in_call else [])]
    if finish in ("abort", "error", ""):
        return ["finish_abort"]
    return ["stop_string_tail"] if isinstance(choice.stop_reason, str) else []


def _begins_a_call(message: Message) -> bool:
    content = message.get("content")
    if message.get("tool_calls") or not isinstance(content, str):
        return bool(message.get("tool_calls"))
    return any(opener in content for opener in _CALL_OPENERS)


def _ids(values: list[Any] | None) -> NDArray[np.int32] | None:
    """Returns `values` as token ids, or None if one is not a non-negative 32-bit integer."""
    if values is None or not set(map(type, values)) <= {int}:
        return None
    try:
        ids = np.frombuffer(array("i", values), dtype=np.int32)
    except OverflowError:
        return None
    return None if values and min(values) < 0 else ids


def _logprobs(values: list[Any] | None) -> NDArray[np.float32] | None:
    """Returns `values` as logprobs, or None if one is not a finite number of at most 0."""
    if values is None or not set(map(type, values)) <= {int, float}:
        return None
    if values and not _LEAST_NUMBER <= min(values) <= max(values) <= LOGPROB_ROUNDING:
        return None
    return np.asarray(values, dtype=np.float32)


def _is_extreme(logprobs: NDArray[np.float32]) -> bool:
    """Returns whether a logprob stands for minus infinity: no token is sampled with it."""
    return bool(np.fmin.reduce(logprobs, initial=0.0) < LEAST_LOGPROB)


def _distinct(flags: list[str]) -> list[str]:
    return list(dict.fromkeys(flags))
