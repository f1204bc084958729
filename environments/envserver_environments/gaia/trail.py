"""Reads what happened in an agent's steps from the calls the proxy recorded. Pure.

The process of the agent writes a trace for people; code of the model might falsify it, so no reward
hangs on it. Here the conversation counts: each step's outcome stands in it, for the model was told
it with the next request, in forms that only the agent writes (the first line of an observation, the
first word of a tool's result), never what a program printed or a page said. Steps that are missing
in it, though the proxy counted their calls, are taken for unusable.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from envserver import Message

from .agents.prompts import FAILED, NO_CALL, NO_CODE, PLAN, TOOL_FAILED


@dataclass(frozen=True)
class Trail:
    """Steps of an agent, plans not counted.

    Args:
        malformed: held neither code nor a call, or are missing in what was recorded.
        failed: of the rest, those whose code or tools failed.
        observed: all that the model was told of its steps.
    """

    steps: int = 0
    malformed: int = 0
    failed: int = 0
    observed: str = ""


def trail_of(messages: Sequence[Message], turns: int) -> Trail:
    """The steps in a conversation.

    Args:
        messages: as recorded: the last request's, and the last answer.
        turns: calls of the model, as the proxy counted them.
    """
    replies = [_texts(reply) for plan, reply in _turns(messages) if not plan]
    missing = max(0, turns - sum(message.get("role") == "assistant" for message in messages))
    ended = Counter(map(_outcome, replies))
    return Trail(
        steps=len(replies) + missing,
        malformed=ended["malformed"] + missing,
        failed=ended["failed"],
        observed="\n".join(text for reply in replies for text in reply),
    )


def _turns(messages: Sequence[Message]) -> Iterator[tuple[bool, list[Message]]]:
    """Of each answer of the model: whether it was asked for a plan, and what it was told then."""
    starts = [at for at, message in enumerate(messages) if message.get("role") == "assistant"]
    ends = [*starts, len(messages)][1:]
    for at, end in zip(starts, ends, strict=True):
        asked = _text(messages[at - 1]) if at else ""
        yield asked.endswith(PLAN), list(messages[at + 1 : end])


def _outcome(reply: list[str]) -> Literal["fine", "malformed", "failed"]:
    if any(text.startswith((NO_CODE, NO_CALL)) for text in reply):
        return "malformed"
    return "failed" if any(text.startswith((FAILED, TOOL_FAILED)) for text in reply) else "fine"


def _texts(reply: list[Message]) -> list[str]:
    return [_text(message) for message in reply]


def _text(message: Message) -> str:
    content = message.get("content")
    if isinstance(content, list):
        return "\n".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""
