"""Tools of OpenAI's responses API as tools of the chat API, and the names of their calls. Pure.

A chat has no namespaces: the tool `save` of the namespace `mcp__env` is `mcp__env__save` to the
engine, and its calls have both names again in the agent's answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from .fields import function_tool, own_tools
from .reading import bad, objects, string

_JOINT = "__"


def tools_of(body: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the tools in the chat API's format; only the allowed ones if the agent limits them.
    Raises InputError: a tool is not one of the agent's own functions.
    """
    tools = [function_tool(tool, place) for tool, place in _functions(body)]
    choice = body.get("tool_choice")
    if not isinstance(choice, dict) or choice.get("type") != "allowed_tools":
        return tools
    allowed = objects(choice, "tools", needed=True)
    names = {flat_name(tool, f"tool_choice.tools[{i}]") for i, tool in enumerate(allowed)}
    unknown = names - {tool["function"]["name"] for tool in tools}
    if unknown:
        raise bad("tool_choice.tools", f"names unknown tools: {sorted(unknown)}")
    return [tool for tool in tools if tool["function"]["name"] in names]


def flat_name(holder: dict[str, Any], place: str) -> str:
    """Returns the engine's name for the function that `name` and `namespace` of `holder` name.
    Raises InputError: one of them is not a text.
    """
    name = string(holder, "name", place)
    if holder.get("namespace") is None:
        return name
    return string(holder, "namespace", place) + _JOINT + name


def names_of(body: dict[str, Any], flat: str) -> dict[str, str]:
    """Returns the fields that name the function in an answer to `body`.

    Args:
        flat: the engine's name for it; one that the agent did not offer stays as it is.
    """
    for space in _spaces(body):
        prefix = space["name"] + _JOINT
        name = flat.removeprefix(prefix)
        if name != flat and any(tool.get("name") == name for tool in space["tools"]):
            return {"name": name, "namespace": space["name"]}
    return {"name": flat}


def _functions(body: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """Yields the fields of each function, with its place."""
    taken: set[str] = set()
    for tool, place in own_tools(body):
        match tool.get("type"):
            case "function":
                functions = [(tool, place)]
            case "namespace":
                string(tool, "name", place)
                inner = enumerate(objects(tool, "tools", needed=True))
                functions = [(one, f"{place}.tools[{number}]") for number, one in inner]
            case kind:
                raise _not_own(kind, place)
        for function, at in functions:
            if function.get("type") != "function":
                raise _not_own(function.get("type"), at)
            known = {name: value for name, value in function.items() if value is not None}
            if function is not tool:
                known["name"] = flat_name({**function, "namespace": tool["name"]}, at)
                if known["name"] in taken:
                    raise bad(f"{at}.name", f"is taken: {known['name'][:80]!r} is another tool")
            taken.add(str(known.get("name")))
            yield known, at


def _spaces(body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    return (tool for tool in body.get("tools") or () if tool.get("type") == "namespace")


def _not_own(kind: Any, place: str) -> Exception:
    return bad(
        f"{place}.type",
        f"{str(kind)[:80]!r} is not supported: all tools must be the agent's own functions",
    )
