"""A worker's requests about its attempt, other than model calls.

A malformed result fails the attempt with WorkerGarbage; broken text, depth and size of an output
are cleaned instead, and the rollout's flags say so. All that it writes is bounded.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import msgspec
import orjson
import structlog
from envserver_records.cleaning import Change, clean, clean_text
from envserver_records.errors import (
    AgentError,
    ConflictError,
    EngineError,
    Failure,
    InputError,
    LimitReached,
    RewardError,
    SandboxError,
    ServiceError,
    TooLargeError,
    WorkerGarbage,
    by_kind,
)
from envserver_records.records import text_of
from envserver_records.timings import MOST_TIMINGS, Stream

from ..environment import NO_REWARDS
from .attempts import PostedReward, ProxyAttempt, ended

T = TypeVar("T")
_MAX_LOG_BYTES = 64 * 1024
_MAX_MESSAGE = 4000
_MAX_DETAIL = 32_000
_MOST_LINES = 500
MAX_METRICS = 200
"""More metrics of one rollout are left out."""
MAX_METRIC_NAME = 100
"""Metrics with longer names, in characters, are left out."""
_FLAGS: dict[Change, str] = {"cut": "result_cut_off", "replaced": "result_text_replaced"}

_log = structlog.get_logger("envserver.worker")

_FAILURES = by_kind(
    *(LimitReached, AgentError, RewardError, EngineError, SandboxError, ServiceError)
)
"""The kinds of failures that a worker may post. Deaths of workers are detected by the pool."""


class _Posted(msgspec.Struct):
    kind: str
    message: str
    detail: dict[str, Any] = msgspec.field(default_factory=dict)


class _Result(msgspec.Struct, forbid_unknown_fields=True):
    """An output (possibly null), or a failure, maybe with what the agent had until then.

    `tools`: name, start and seconds of each call that ran in the worker; `printed`: time, stream,
    text.
    """

    output: Any = msgspec.UNSET
    changes: set[Change] = msgspec.field(default_factory=set)
    failure: _Posted | None = None
    metrics: dict[str, float] = msgspec.field(default_factory=dict)
    tools: list[tuple[str, float, float]] = msgspec.field(default_factory=list)
    printed: list[tuple[float, Stream, str]] = msgspec.field(default_factory=list)


class _Line(msgspec.Struct):
    event: str
    facts: dict[str, Any] = msgspec.field(default_factory=dict)


_result = msgspec.json.Decoder(_Result)
_line = msgspec.json.Decoder(_Line)
_rewards = msgspec.json.Decoder(list[PostedReward])
_UNDECODABLE = (msgspec.DecodeError, RecursionError, UnicodeDecodeError)


def job_of(attempt: ProxyAttempt) -> bytes:
    """Returns what a worker needs to run the attempt, as JSON: never a hidden part or a key."""
    spec = attempt.spec
    job = {
        "rollout_id": spec.rollout_id,
        "attempt": spec.attempt,
        "env": spec.env,
        "env_reference": spec.env_reference,
        "env_config": spec.env_config,
        "task": {"id": spec.task.id, "public": spec.task.public},
        "model": spec.model,
        "deadline": spec.deadline,
        "max_turns": spec.limits.max_turns,
        "harness": msgspec.to_builtins(spec.harness),
    }
    try:
        return orjson.dumps(job)
    except TypeError as error:
        message = f"The public part of task {spec.task.id!r} is not JSON: {error}."
        raise AgentError(message, bug=f"A bug in the environment: {message}") from None


def record_body(attempt: ProxyAttempt) -> dict[str, Any]:
    """Returns the answer to `GET record`: what an external agent has done so far."""
    answered = [call for call in attempt.calls if call.delivered != "none" and call.choice == 0]
    trained = [call for call in answered if call.trained] or answered
    last = trained[-1].message if trained else {}
    return {
        "calls": len(answered),
        "limit": attempt.limit,
        "text": text_of(last),
        "pending": bool(last.get("tool_calls")),
    }


def take_result(attempt: ProxyAttempt, body: bytes) -> None:
    """Handles `POST result`: sets the attempt's `output`, `metrics` and `failure`, once."""
    if attempt.sealed or attempt.posted:
        raise ConflictError("This attempt has a result already, or has ended.")
    try:
        result = _read_result(_without_key(attempt, body))
        failure = _failure(result)
    except _UNDECODABLE as error:
        raise _garbage(attempt, str(error)) from None
    attempt.posted = True
    attempt.failure = failure
    attempt.metrics = _bounded_metrics(attempt, result.metrics)
    for name, began, seconds in result.tools[:MOST_TIMINGS]:
        attempt.timeline.note("tool", name, began, seconds)
    for at, stream, text in result.printed[-_MOST_LINES:]:
        attempt.timeline.printed(at, stream, text)
    if result.output is not msgspec.UNSET:
        attempt.output, changes = clean(result.output)
        attempt.flags |= {_FLAGS[change] for change in changes | result.changes}


def refuse_result(attempt: ProxyAttempt) -> None:
    """Handles a result that is too large to be read: the attempt has none, and is scored so."""
    if not (attempt.sealed or attempt.posted):
        attempt.posted = True
        attempt.flags.add(_FLAGS["cut"])


def take_log(attempt: ProxyAttempt, body: bytes) -> None:
    """Handles `POST log`: a line for the server's log; those beyond the budget are counted."""
    if attempt.sealed:
        raise ended()
    if len(body) > _MAX_LOG_BYTES:
        raise TooLargeError(f"A log line is over {_MAX_LOG_BYTES} bytes.")
    if not attempt.log_budget.take(len(body), time.monotonic()):
        attempt.log_lines_dropped += 1
        return
    line = _read(_line.decode, attempt, body, "This is not a log line")
    facts = "".join(f" {name}={value}" for name, value in line.facts.items())
    attempt.timeline.printed(time.time(), "log", clean_text(line.event + facts))
    _log.info(
        line.event,
        rollout_id=attempt.spec.rollout_id,
        attempt=attempt.spec.attempt,
        env=attempt.spec.env,
        facts=line.facts,
    )


def take_actions(attempt: ProxyAttempt, body: bytes) -> None:
    """Handles `POST actions`: adds readable steps to the attempt (see `actions`)."""
    if attempt.sealed or attempt.posted:
        raise ended()
    _read(attempt.steps.take, attempt, body, "These are not steps")


def take_rewards(attempt: ProxyAttempt, body: bytes) -> None:
    """Handles `POST rewards`: sets the rewards of turns, before the result is posted."""
    if attempt.sealed or attempt.posted:
        raise ended()
    if attempt.spec.isolation == "sandboxed" or attempt.spec.harness is not None:
        raise ConflictError(NO_REWARDS)
    attempt.turn_rewards = _read(_rewards.decode, attempt, body, "These are not rewards of turns")


def _read(decode: Callable[[bytes], T], attempt: ProxyAttempt, body: bytes, wrong: str) -> T:
    try:
        return decode(_without_key(attempt, body))
    except _UNDECODABLE as error:
        raise InputError(f"{wrong}: {error}.") from None


def _without_key(attempt: ProxyAttempt, body: bytes) -> bytes:
    """Removes the key, which errors of HTTP libraries quote with the attempt's address."""
    return body.replace(attempt.key.encode(), b"***")


def _read_result(body: bytes) -> _Result:
    try:
        return _result.decode(body)
    except RecursionError:
        return _Result(output=None, changes={"cut"})
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return _read_broken_text(body, error)


def _read_broken_text(body: bytes, error: Exception) -> _Result:
    """Reads a result whose texts are not valid Unicode, which Python's parser accepts."""
    try:
        value = json.loads(body.decode(errors="replace"), parse_constant=_no_constant)
    except RecursionError:
        return _Result(output=None, changes={"cut"})
    except ValueError:
        raise error from None
    value, changes = clean(value)
    result = msgspec.convert(value, _Result)
    result.changes |= changes | {"replaced"}
    return result


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _failure(result: _Result) -> Failure | None:
    posted = result.failure
    if posted is None:
        if result.output is msgspec.UNSET:
            raise msgspec.ValidationError("`output` or `failure` is needed")
        return None
    known = _FAILURES.get(posted.kind)
    if known is None:
        raise msgspec.ValidationError(f"{posted.kind[:80]!r} is not a kind of failure")
    return Failure(
        kind=known.kind,
        blame=known.blame,
        outcome=known.outcome,
        message=clean_text(posted.message[:_MAX_MESSAGE]),
        detail=clean(posted.detail, _MAX_DETAIL).value,
    )


def _bounded_metrics(attempt: ProxyAttempt, metrics: dict[str, float]) -> dict[str, float]:
    """Returns the metrics within the limits; a flag says that others were left out."""
    fit = [name for name in metrics if len(name) <= MAX_METRIC_NAME and name.isprintable()]
    kept = {name: metrics[name] for name in fit[:MAX_METRICS]}
    if len(kept) < len(metrics):
        attempt.flags.add("metrics_left_out")
    return kept


def _garbage(attempt: ProxyAttempt, reason: str) -> InputError:
    attempt.posted = True
    attempt.failure = WorkerGarbage(f"The worker's result is malformed: {reason}.").failure()
    return InputError(attempt.failure.message)
