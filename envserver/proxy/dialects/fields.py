"""Fields of the engine's chat API that several dialects fill."""

from __future__ import annotations

from typing import Any

from .reading import bad

_PASSED = ("seed", "chat_template_kwargs")
"""An engine's own fields that agents may add in every dialect."""


def engine_fields(body: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields that are passed on unchanged."""
    return {name: body[name] for name in _PASSED if body.get(name) is not None}


def effort_fields(effort: Any, place: str) -> dict[str, Any]:
    """Returns the field for the reasoning effort, if the agent sets one.

    Raises:
        InputError: `effort`, found at `place`, is not a string.
    """
    if effort is None:
        return {}
    if not isinstance(effort, str):
        raise bad(place, "must be a text")
    return {"reasoning_effort": effort}
