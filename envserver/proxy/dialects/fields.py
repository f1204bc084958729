"""Fields of the engine's chat API that other dialects come to."""

from __future__ import annotations

from typing import Any

from .reading import bad, mapping

_PASSED = ("temperature", "top_p", "top_k", "seed", "chat_template_kwargs")
"""Have the same name in every dialect, or are an engine's own that an agent may add to it."""


def engine_fields(request: dict[str, Any]) -> dict[str, Any]:
    """The fields that are passed on as they stand."""
    mapping(request, "chat_template_kwargs")
    return {name: request[name] for name in _PASSED if request.get(name) is not None}


def template_fields(fields: dict[str, Any], **variables: Any) -> dict[str, Any]:
    """`fields` with variables for the chat template; what the agent set itself stays."""
    own = fields.get("chat_template_kwargs") or {}
    return fields | {"chat_template_kwargs": variables | own}


def effort_fields(fields: dict[str, Any], effort: Any, place: str) -> dict[str, Any]:
    """`fields` with how much the model is to reason, as chat templates have it.

    Raises:
        InputError: `effort`, which stands at `place`, is no text.
    """
    if effort is None:
        return fields
    if not isinstance(effort, str):
        raise bad(place, "must be a text")
    thinking = template_fields(fields, enable_thinking=effort != "none")
    return template_fields(thinking, reasoning_effort=effort) | {"reasoning_effort": effort}
