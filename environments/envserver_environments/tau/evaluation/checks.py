"""Single checks on a conversation: was a call made, was a text said. Pure functions.

`Strictness.UPSTREAM` is tau2-bench's rule, with its holes (src/tau2/evaluator there): a call with
fewer arguments than expected matches, whoever made it, and "5" is found in "50". `STRICT` closes
them: all expected arguments, of the right side, and whole words and numbers.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping, Sequence
from typing import Any

from envserver import pass_hat_k

from ..tasks import Action, TauMessage, has_text


class Strictness(enum.Enum):
    """The rules of a check."""

    UPSTREAM = "upstream"
    STRICT = "strict"


def calls_of(messages: Sequence[TauMessage]) -> list[Mapping[str, Any]]:
    """Returns all calls of a conversation, of both sides, in order."""
    return [call for message in messages for call in message.get("tool_calls") or ()]


def action_matches(
    actions: Sequence[Action],
    messages: Sequence[TauMessage],
    strictness: Strictness = Strictness.UPSTREAM,
) -> list[bool]:
    """Returns for each expected action whether any call of the conversation matches it."""
    calls = calls_of(messages)
    return [any(same_call(action, call, strictness) for call in calls) for action in actions]


def same_call(
    action: Action, call: Mapping[str, Any], strictness: Strictness = Strictness.UPSTREAM
) -> bool:
    """Returns whether `call` (name, arguments, requestor) is the expected `action`.

    Only `compare_args` count, none if that is empty. If it is unset, upstream compares the
    arguments that the call has; strictly, those that the action has.
    """
    if action.name != call["name"] or not isinstance(call["arguments"], Mapping):
        return False
    arguments: Mapping[str, Any] = call["arguments"]
    strict = strictness is Strictness.STRICT
    if strict and call.get("requestor", "assistant") != action.requestor:
        return False
    compared = action.compare_args
    if compared is None:
        compared = list(action.arguments if strict else arguments)
    return _part(arguments, compared) == _part(action.arguments, compared)


def _part(arguments: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if name in names}


def information_given(
    expected: Sequence[str],
    messages: Sequence[TauMessage],
    strictness: Strictness = Strictness.UPSTREAM,
) -> list[bool]:
    """Returns for each expected text whether any message of the assistant has it.

    Case is ignored. Upstream removes commas from the messages (so that a text with a comma is never
    found) and matches the text anywhere; strictly, commas are ignored only in numbers, and the text
    must not be part of a longer word or number.
    """
    said = [m["content"] for m in messages if m["role"] == "assistant" and has_text(m)]
    is_in = _is_said_strictly if strictness is Strictness.STRICT else _is_said
    return [any(is_in(info, content) for content in said) for info in expected]


def _is_said(info: str, content: str) -> bool:
    return info.lower() in content.lower().replace(",", "")


def _is_said_strictly(info: str, content: str) -> bool:
    wanted = _without_thousands_commas(info.strip().casefold())
    text = _without_thousands_commas(content.casefold())
    if not wanted:
        return True
    before = r"(?<![\w.])(?<!\d,)" if wanted[0].isalnum() else ""
    after = r"(?!\w)(?!\.\d)" if wanted[-1].isalnum() else ""
    return re.search(before + re.escape(wanted) + after, text) is not None


def _without_thousands_commas(text: str) -> str:
    return re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text)


def is_success(reward: float) -> bool:
    """Does a trial count as a success for pass^k?"""
    return abs(reward - 1.0) <= 1e-6


def pass_hat_ks(rewards: Mapping[str, Sequence[float]]) -> dict[int, float]:
    """pass^k for every k that all tasks allow, the mean over the tasks.

    Args:
        rewards: of each task's attempts, in [0, 1]; a success is 1.
    """
    fewest = min((len(attempts) for attempts in rewards.values()), default=0)
    if not fewest:
        raise ValueError("Each task needs at least one attempt.")
    return {
        k: sum(
            pass_hat_k(len(attempts), sum(map(is_success, attempts)), k)
            for attempts in rewards.values()
        )
        / len(rewards)
        for k in range(1, fewest + 1)
    }
