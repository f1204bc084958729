"""Finds how the engine renders prompts, by comparing ours with its own on small conversations.

An engine may give variables to every template (vLLM's `--default-chat-template-kwargs`); it does
not say which. A format agrees with it only if it renders each conversation to the engine's ids.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import orjson
from envserver_records.errors import TemplateRefused

from ..models.probe import Echo
from .chat_format import ChatFormat
from .refusal import Refused

SETTING: Final = "--openai.default_template_kwargs"
_TRIED: Final = (False, True, "none", "low", "medium", "high")
"""Values that templates know for their own variables: switches, and efforts of reasoning."""


def agreeing(
    chat_format: ChatFormat, echoes: Sequence[Echo], told: Mapping[str, Any] | None
) -> tuple[ChatFormat | None, str]:
    """Returns `chat_format` with the variables by which it renders as the engine does.

    Args:
        told: the engine's default variables; None: no variable, or else a single one, is tried.

    Returns:
        The format, or None and a sentence that says how prompts differ and what may help.
    """
    first = chat_format.with_defaults(told or {})
    difference = _disagreement(first, echoes)
    if difference is None:
        return first, ""
    others = (chat_format.with_defaults(one) for one in _candidates(chat_format))
    found = next((one for one in others if _disagreement(one, echoes) is None), None)
    if told is None:
        return found, "" if found else f"{difference} {_hint(chat_format)}"
    if found is not None:
        text = orjson.dumps(found.defaults).decode()
        return None, f"{difference} They are equal with {SETTING} '{text}'."
    return None, f"{difference} Are these the engine's {SETTING}? {_hint(chat_format)}"


def _candidates(chat_format: ChatFormat) -> Iterator[dict[str, Any]]:
    yield {}
    for value in _TRIED:
        for name in chat_format.own_variables:
            yield {name: value}


def _hint(chat_format: ChatFormat) -> str:
    names = ", ".join(chat_format.own_variables)
    variables = f"Its template reads the variables {names}. " if names else ""
    return (
        f"If the engine runs with --default-chat-template-kwargs, give the same to {SETTING}; if "
        "with --chat-template, name a folder with that template by --tokens.tokenizer. "
        f"{variables}"
    ).strip()


def _disagreement(chat_format: ChatFormat, echoes: Sequence[Echo]) -> str | None:
    """Returns a sentence that says how our prompts differ from the engine's, None if they are
    equal."""
    for echo in echoes:
        kind = "with tools" if echo.tools else "without tools"
        try:
            ours = chat_format.prompt_ids(echo.messages, echo.tools or None, {})
        except (TemplateRefused, Refused) as error:
            return f"The template here refuses a conversation {kind} ({error})."
        if ours != echo.prompt_ids:
            return (
                f"A conversation {kind} is rendered to {len(ours)} tokens here and to "
                f"{len(echo.prompt_ids)} different ones by the engine."
            )
    return None
