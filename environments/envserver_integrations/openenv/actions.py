"""What the model sees of an observation, and what its answers are as actions. Pure.

A server whose actions name a tool (`tool_name`) offers its tools to the model. Another one whose
actions have one field of text gets the model's text there. Any other one is acted on by one tool,
`act`, that takes the fields of its actions.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final, Literal

from envserver import Message

Mode = Literal["tools", "text", "act"]
ACT: Final = "act"
_OURS: Final = ("type", "metadata", "tool_name", "arguments", "tool_calls")
"""Fields of actions that no text goes into."""
_ABOUT: Final = ("done", "reward", "metadata")
_PLACE: Final = re.compile(r"\{(\w+)\}")


def mode_of(schema: Mapping[str, Any]) -> Mode:
    """Returns how a server with this schema of actions is acted on."""
    if "tool_name" in _properties(schema):
        return "tools"
    return "text" if text_field(schema) else "act"


def text_field(schema: Mapping[str, Any]) -> str | None:
    """Returns the only field of text; None: there is none, or there are other fields."""
    fields = [name for name in _properties(schema) if name not in _OURS]
    if len(fields) != 1 or _properties(schema)[fields[0]].get("type") != "string":
        return None
    return fields[0]


def act_tool(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the tool whose arguments are an action."""
    kept = {key: value for key, value in schema.items() if key not in ("title", "description")}
    fields = {name: one for name, one in _properties(schema).items() if name != "metadata"}
    return _function(
        ACT,
        str(schema.get("description") or "Takes the next action."),
        {**kept, "type": "object", "properties": fields},
    )


def tools_of(listed: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the tools of an answer to `list_tools`, in OpenAI's form."""
    tools = listed.get("tools")
    return [
        _function(
            str(one.get("name", "")),
            str(one.get("description") or ""),
            one.get("input_schema") or one.get("inputSchema") or {"type": "object"},
        )
        for one in (tools if isinstance(tools, list) else [])
        if isinstance(one, dict)
    ]


def filled(template: str, answer: str) -> dict[str, Any]:
    """Returns the action of a JSON template in which "{answer}" stands for the model's text."""
    made = json.loads(template)
    if not isinstance(made, dict):
        raise ValueError("it is not a JSON object")
    found = _filled(made, answer)
    assert isinstance(found, dict)
    return found


def conversation(observation: Mapping[str, Any]) -> list[Message] | None:
    """Returns the messages that an observation carries, as envserver's servers give them."""
    messages = observation.get("messages")
    if not isinstance(messages, list) or not messages or "available_tools" not in observation:
        return None
    alike = all(isinstance(one, dict) and "role" in one for one in messages)
    return messages if alike else None


def text_of_observation(observation: Mapping[str, Any], template: str) -> str:
    """Returns an observation as text.

    Args:
        template: with fields of the observation in braces; "": its only field, or all as JSON.
    """
    if template:
        return _PLACE.sub(lambda found: _as_text(observation.get(found[1])), template)
    fields = {
        name: value
        for name, value in observation.items()
        if name not in _ABOUT and value not in (None, "", [], {})
    }
    if len(fields) == 1:
        return _as_text(next(iter(fields.values())))
    return json.dumps(fields, ensure_ascii=False) if fields else ""


def text_of_result(observation: Mapping[str, Any]) -> str:
    """Returns what a tool returned, or its error, as text."""
    error = observation.get("error")
    if error:
        return f"Error: {error.get('message', error) if isinstance(error, dict) else error}"
    result = observation.get("result")
    if not isinstance(result, dict):
        return _as_text(result)
    if result.get("data") is not None:
        return _as_text(result["data"])
    content = result.get("content")
    if isinstance(content, list):
        return "\n".join(str(one.get("text", "")) for one in content if isinstance(one, dict))
    return _as_text(result)


def _properties(schema: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    found = schema.get("properties")
    return {
        name: one if isinstance(one, dict) else {}
        for name, one in (found if isinstance(found, dict) else {}).items()
        if name != "metadata"
    }


def _function(name: str, description: str, parameters: Any) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }


def _filled(part: Any, answer: str) -> Any:
    if isinstance(part, str):
        return part.replace("{answer}", answer)
    if isinstance(part, dict):
        return {key: _filled(value, answer) for key, value in part.items()}
    if isinstance(part, list):
        return [_filled(value, answer) for value in part]
    return part


def _as_text(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
