"""Fields of the engine's chat API that other dialects come to."""

from __future__ import annotations

from typing import Any

from .reading import bad, mapping

_PASSED = ("temperature", "top_p", "top_k", "seed", "chat_template_kwargs")
"""Have the same name in every dialect, or are an engine's own that an agent may add to it."""


def engine_fields(body: dict[str, Any]) -> dict[str, Any]:
    """The fields that are passed on as they stand."""
    mapping(body, "chat_template_kwargs")
    return {name: body[name] for name in _PASSED if body.get(name) is not None}


def effort_fields(effort: Any, place: str) -> dict[str, Any]:
    """How much the model is to reason, where the agent says so.

    Raises:
        InputError: `effort`, which stands at `place`, is no text.
    """
    if effort is None:
        return {}
    if not isinstance(effort, str):
        raise bad(place, "must be a text")
    return {"reasoning_effort": effort}
