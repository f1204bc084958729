"""Sends a probe's tiny requests and reads their answers.

In flow an engine's unvalidated answers; out flow small structs, or `NotSupported` with a sentence
that says what the engine lacks. An engine that is down or too slow is another matter:
EngineUnavailable and EngineTimeout pass through. Fields are where vLLM has them.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any, TypeVar

import msgspec
import structlog
from envserver_records.errors import (
    EngineError,
    EngineGarbage,
    EngineRefused,
    EngineTimeout,
    EngineUnavailable,
)

from .engine import Engine

_SECONDS = 300.0
"""An engine that compiles at its first call, or shares a busy machine, takes minutes for it."""
_TELL_SECONDS = 10.0
_SIMULATED_TRIES = 6
_TIE = 0.05
"""Two tokens with logprobs this close may swap ranks between requests: a GPU sums in another order
when other requests run in parallel. Neither can then have a probability above one half."""
_HALF = math.log(0.5)
_ROUNDING = 0.1
"""Mean difference of logprobs from which on two models gave them."""

_log = structlog.get_logger("envserver.engine")

T = TypeVar("T")
Token = tuple[str, tuple[int, ...]]
"""A token as chat answers name it: its text, and its bytes."""


class NotSupported(Exception):
    """The engine lacks an ability; the text is a sentence that says why."""


class TopToken(msgspec.Struct, frozen=True):
    """One of the likeliest tokens at a place."""

    logprob: float
    token: str = ""
    bytes: list[int] | None = None


class ScoredToken(msgspec.Struct, frozen=True):
    """A sampled token's logprob, and those of the likeliest ones in its place."""

    logprob: float
    top_logprobs: list[TopToken] | None = None


class Logprobs(msgspec.Struct, frozen=True):
    """Logprobs of one choice: `content` in chat and generate, `token_logprobs` in completions."""

    content: list[ScoredToken] | None = None
    token_logprobs: list[float | None] | None = None

    def values(self) -> list[float]:
        """Returns one number for each token, without nulls."""
        if self.content is not None:
            return [scored.logprob for scored in self.content]
        return [logprob for logprob in self.token_logprobs or () if logprob is not None]


class ProbeMessage(msgspec.Struct, frozen=True):
    """An assistant message, parsed by the engine."""

    content: Any = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[Any] | None = None

    @property
    def has_reasoning(self) -> bool:
        """Whether the engine separated reasoning from content."""
        return bool(self.reasoning or self.reasoning_content)

    def same(self, other: ProbeMessage) -> bool:
        """Returns whether both say the same."""
        ours = (self.content or "", self.reasoning or self.reasoning_content or "")
        theirs = (other.content or "", other.reasoning or other.reasoning_content or "")
        return ours == theirs and len(self.tool_calls or ()) == len(other.tool_calls or ())


class ProbeChoice(msgspec.Struct, frozen=True):
    """One choice of an answer; `prompt_token_ids` is here in completions only."""

    message: ProbeMessage | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    logprobs: Any = None
    finish_reason: str | None = None
    weight_versions: list[Any] | None = None
    routed_experts: str | None = None

    def scores(self) -> list[float]:
        """Returns the sampled tokens' logprobs; [] if they do not have vLLM's form."""
        return self._logprobs().values()

    def lacks(self) -> list[str]:
        """Returns what is missing for an exact record."""
        if not self.token_ids:
            return ["token_ids"]
        return [] if len(self.scores()) == len(self.token_ids) else ["a logprob for each token"]

    def first_place(self) -> dict[Token, float]:
        """Returns the logprobs of the likeliest first tokens, by their text.

        Texts that occur twice are left out: parts of a character may all decode to nothing.
        """
        content = self._logprobs().content
        tops = (content[0].top_logprobs if content else None) or []
        texts = [(top.token, tuple(top.bytes or ())) for top in tops]
        once = [(text, top) for text, top in zip(texts, tops, strict=True) if texts.count(text) < 2]
        return {text: top.logprob for text, top in once}

    def _logprobs(self) -> Logprobs:
        try:
            return msgspec.convert(self.logprobs or {}, Logprobs)
        except msgspec.ValidationError:
            return Logprobs()


class ProbeAnswer(msgspec.Struct, frozen=True):
    """The answer of a sampling endpoint."""

    choices: list[ProbeChoice]
    prompt_token_ids: list[int] | None = None
    model: Any = None


class ProbeClient:
    """Sends one probe's requests, all to one replica.

    Args:
        model: the name that the engine serves.
    """

    def __init__(self, engine: Engine, model: str) -> None:
        self._engine = engine
        self.model = model
        # The in-process simulated engine fails at random and does not retry by itself.
        self._tries = _SIMULATED_TRIES if engine.kind == "sim" else 1

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """The answer to one request. Raises EngineError: any subclass."""
        for left in reversed(range(self._tries)):
            try:
                with _told_if_slow(path):
                    return await self._engine.post(
                        path,
                        {"model": self.model, **body},
                        rollout_id="probe",
                        timeout_seconds=_SECONDS,
                    )
            except (EngineUnavailable, EngineGarbage):
                if not left:
                    raise
        raise AssertionError("there is at least one try")

    async def may(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Like `post`, for an optional ability."""
        try:
            return await self.post(path, body)
        except EngineError as error:
            _raise_if_down(error)
            raise NotSupported(f"{path} {refusal(error)}") from None

    async def get(self, path: str) -> dict[str, Any] | None:
        """Returns the answer to a GET, or None if the engine has none.
        Raises EngineUnavailable, EngineTimeout: it does not answer.
        """
        try:
            return await self._engine.get(path)
        except EngineError as error:
            _raise_if_down(error)
            return None

    async def has_metrics(self) -> bool:
        """Returns whether /metrics serves Prometheus text.
        Raises EngineUnavailable, EngineTimeout: it does not answer.
        """
        try:
            await self._engine.get("/metrics")
        except EngineGarbage as error:
            # An Engine reads JSON only; its error quotes the beginning of the text.
            return "# HELP" in error.message or "# TYPE" in error.message
        except EngineError as error:
            _raise_if_down(error)
        return False


def _raise_if_down(error: EngineError) -> None:
    """Raises errors that say nothing about the engine's abilities."""
    status = error.detail.get("status", 0)
    unknown = status == HTTPStatus.NOT_IMPLEMENTED or 300 <= status < 400
    if isinstance(error, EngineTimeout | EngineUnavailable) and not unknown:
        raise error


def refusal(error: EngineError) -> str:
    """Returns what the engine did, with its message, as the end of a sentence."""
    status = error.detail.get("status")
    words = error.message.removeprefix(f"The engine refused the request (HTTP {status}): ")
    verb = f"is refused (HTTP {status})" if isinstance(error, EngineRefused) else "fails"
    return sentence(f"{verb}: {words}")


def sentence(words: str) -> str:
    """Returns `words` with a full stop."""
    words = words.strip()
    return words if words.endswith((".", "!", "?", "…")) else f"{words}."


def read(answer: dict[str, Any], path: str) -> ProbeAnswer:
    """Reads the parts of an answer that the probe needs.
    Raises NotSupported: a field has another type than vLLM's, or there is no choice.
    """
    found = convert(answer, ProbeAnswer, path)
    if not found.choices:
        raise NotSupported(f"{path} answers without a choice.")
    return found


def convert(value: Any, kind: type[T], path: str) -> T:
    """Converts `value` to `kind`. Raises NotSupported: it is something else."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise NotSupported(f"{path} answers in a form that is not vLLM's ({error}).") from None


def same_tokens(ours: ProbeChoice, theirs: ProbeChoice) -> bool:
    """Returns whether two greedy answers to one prompt agree, up to a tie of two tokens.

    Args:
        ours, theirs: choices that lack nothing.
    """
    pairs = zip(ours.token_ids or (), theirs.token_ids or (), strict=False)
    for (our, their), one, other in zip(pairs, ours.scores(), theirs.scores(), strict=False):
        if our != their:
            return abs(one - other) < _TIE and min(one, other) <= _HALF
    return True


def same_scores(ours: ProbeChoice, theirs: ProbeChoice) -> bool:
    """Returns whether one model can have given two greedy answers to one prompt: the same tokens,
    up to a tie, with logprobs that differ by rounding only."""
    pairs = zip(ours.scores(), theirs.scores(), strict=False)
    away = [abs(one - other) for one, other in pairs]
    return same_tokens(ours, theirs) and sum(away) <= _ROUNDING * len(away)


@contextmanager
def _told_if_slow(path: str) -> Iterator[None]:
    """Logs once that an engine is waited for, as one that compiles or loads weights now."""
    told = {"path": path, "seconds": _TELL_SECONDS, "at_most": _SECONDS}
    timer = asyncio.get_running_loop().call_later(
        _TELL_SECONDS, lambda: _log.warning("engine_is_waited_for", **told)
    )
    try:
        yield
    finally:
        timer.cancel()
