"""Fields of the engine's chat API that several dialects fill. Pure.

Nothing goes on that is not named here: each object is built anew from its known fields.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .checks import EFFORT, LONG_TEXT, NAME, Check, an_object, flag, kept, refuse_others
from .reading import bad, mapping, objects, string

_PASSED = ("seed", "chat_template_kwargs")
"""An engine's own fields that agents may add in every dialect."""
_FUNCTION: dict[str, Check] = {
    "name": NAME,
    "description": LONG_TEXT,
    "parameters": an_object,
    "strict": flag,
}
_SCHEMA: dict[str, Check] = {
    "name": NAME,
    "description": LONG_TEXT,
    "schema": an_object,
    "strict": flag,
}
_TAG = ("type", "format", "structures", "triggers")
"""Fields of vLLM's `structural_tag`, which only `tokens.constraints` all allows."""


def engine_fields(body: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields that are passed on unchanged."""
    return {name: body[name] for name in _PASSED if body.get(name) is not None}


def effort_fields(effort: Any, place: str) -> dict[str, Any]:
    """Returns the field for the reasoning effort, if the agent sets one.
    Raises InputError: `effort`, found at `place`, is not a short string.
    """
    if effort is None:
        return {}
    EFFORT(effort, place)
    return {"reasoning_effort": effort}


def own_tools(body: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """Yields the tools in field `tools` with their places, without a provider's own web search,
    which clients offer by default: nothing here could run it.
    """
    for index, tool in enumerate(objects(body, "tools")):
        if not str(tool.get("type")).startswith("web_search"):
            yield tool, f"tools[{index}]"


def function_tool(function: dict[str, Any], place: str) -> dict[str, Any]:
    """Returns a tool of the chat API from the fields of `function`, which is found at `place`."""
    string(function, "name", place)
    return {"type": "function", "function": kept(function, _FUNCTION, place)}


def schema_format(schema: dict[str, Any], place: str) -> dict[str, Any]:
    """Returns the form of an answer that follows `schema`, which is found at `place`.
    Raises InputError: a field is unknown or has another type.
    """
    refuse_others(schema, _SCHEMA, place)
    return {"type": "json_schema", "json_schema": kept(schema, _SCHEMA, place)}


def response_format(form: dict[str, Any], place: str) -> dict[str, Any]:
    """Returns the form of an answer as the chat API writes it.
    Raises InputError: its type is unknown, or a field is unknown or has another type.
    """
    match form.get("type"):
        case "text" | "json_object" as kind:
            refuse_others(form, ("type",), place)
            return {"type": kind}
        case "json_schema":
            refuse_others(form, ("type", "json_schema"), place)
            return schema_format(mapping(form, "json_schema", place), f"{place}.json_schema")
        case "structural_tag":
            refuse_others(form, _TAG, place)
            return form
        case kind:
            raise bad(f"{place}.type", f"cannot be {str(kind)[:80]!r}")
