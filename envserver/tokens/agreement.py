"""Compares our rendering of conversations with the engine's, on a few small examples."""

from __future__ import annotations

from collections.abc import Iterable

from envserver_records.errors import TemplateRefused

from ..models.probe import Echo
from .chat_format import ChatFormat
from .refusal import Refused

_OTHER_TEMPLATE = "Does the engine run with a --chat-template of its own?"


def disagreement(chat_format: ChatFormat, echoes: Iterable[Echo]) -> str | None:
    """Returns a sentence that says how our prompts differ from the engine's, or None if they are
    equal."""
    for echo in echoes:
        kind = "with tools" if echo.tools else "without tools"
        try:
            ours = chat_format.prompt_ids(echo.messages, echo.tools or None, {})
        except (TemplateRefused, Refused) as error:
            return f"The template here refuses a conversation {kind} ({error}). {_OTHER_TEMPLATE}"
        if ours != echo.prompt_ids:
            return (
                f"A conversation {kind} is rendered to {len(ours)} tokens here and to "
                f"{len(echo.prompt_ids)} different ones by the engine. {_OTHER_TEMPLATE}"
            )
    return None
