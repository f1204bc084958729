"""What follows a sampled answer in the prompt of the next call, without touching the answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ..records import Message
from .chat_format import ChatFormat
from .refusal import Refused


class Completion(NamedTuple):
    """What an engine sampled, as recorded: see `records.Call`."""

    ids: list[int]
    finish_reason: str
    stop_reason: int | str | None


class Suffix(NamedTuple):
    """What stands behind the completion.

    `text` and `ids` are all of it; `closing` is the beginning of `text` that the model did not
    sample although it belongs to its turn: text that the agent appended and the template's own
    close, where the answer was cut off. All of it is context.
    """

    text: str
    ids: list[int]
    closing: str


def suffix(
    format: ChatFormat,
    *,
    history: list[Message],
    assistant: Message,
    new: list[Message],
    tools: list[dict[str, Any]] | None,
    kwargs: Mapping[str, Any],
    completion: Completion,
    extra: str = "",
) -> Suffix:
    """parent.prompt + completion + this = the prompt of the next call.

    Args:
        format: the model's.
        history: the messages of the call that sampled the completion.
        assistant: the message that it gave.
        new: what the agent has put behind it; not empty, no assistant message among it.
        tools, kwargs: of the call and of the next one alike.
        completion: what was sampled.
        extra: text that the agent appended to the answer.

    Raises:
        Refused: exactness cannot be shown; the reason is one word.
    """
    raise Refused("not_yet")
