"""Reads what happened in an agent's steps from the calls the proxy recorded. Pure.

The agent's process writes a trace for people; the model's code might falsify it, so no reward
depends on it. Here the conversation counts: the model read each step's outcome in the next request,
in forms that only the agent writes (the first line of an observation, the first word of a tool's
result), never in a program's output or a page's text. Steps that are missing in it, though the
proxy counted their calls, count as malformed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from envserver import Message

from .agents.prompts import FAILED, NO_CALL, NO_CODE, PLAN, PLANNED, TOOL_FAILED


@dataclass(frozen=True)
class Trail:
    """The steps of an agent, without plans.

    Args:
        malformed: had neither code nor a call, or are missing in the recording.
        failed: the other steps whose code or tools failed.
        observed: all observations that the model read.
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
    replies = [[*map(_text, reply)] for plan, reply in _turns(messages) if not plan]
    missing = max(0, turns - sum(message.get("role") == "assistant" for message in messages))
    ended = Counter(map(_outcome, replies))
    return Trail(
        steps=len(replies) + missing,
        malformed=ended["malformed"] + missing,
        failed=ended["failed"],
        observed="\n".join(text for reply in replies for text in reply),
    )


def _turns(messages: Sequence[Message]) -> Iterator[tuple[bool, list[Message]]]:
    """Yields for each answer of the model whether it is a plan, and the replies that followed."""
    starts = [at for at, message in enumerate(messages) if message.get("role") == "assistant"]
    ends = [*starts, len(messages)][1:]
    for at, end in zip(starts, ends, strict=True):
        reply = list(messages[at + 1 : end])
        asked = _text(messages[at - 1]) if at else ""
        planned = bool(reply) and _text(reply[0]).startswith(PLANNED)
        yield planned or asked.endswith(PLAN), reply


def _outcome(reply: list[str]) -> Literal["fine", "malformed", "failed"]:
    if any(text.startswith((NO_CODE, NO_CALL)) for text in reply):
        return "malformed"
    return "failed" if any(text.startswith((FAILED, TOOL_FAILED)) for text in reply) else "fine"


def _text(message: Message) -> str:
    content = message.get("content")
    if isinstance(content, list):
        return "\n".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""
