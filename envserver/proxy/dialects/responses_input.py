"""Converts a request of OpenAI's responses API, its items and tools, to the chat API. Pure.

What the model said in one answer comes back as several items and becomes one assistant message
again. Developer messages become system messages, since chat templates drop roles that they do not
know.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from envserver_records.records import Message

from .base import (
    TEXTS,
    bad,
    effort_fields,
    engine_fields,
    function_tool,
    impossible,
    mapping,
    named_choice,
    object_part,
    objects,
    own_tools,
    schema_format,
    string,
    unsupported,
)
from .conversation import Conversation, Part, ToolCall, data_url, detail, image_part, text_part

# A chat has no namespaces: the tool `save` of the namespace `mcp__env` is `mcp__env__save` to the
# engine, and its calls have both names again in the agent's answer.

_JOINT = "__"
_NOT_OWN = ": all tools must be the agent's own functions"


def tools_of(body: dict[str, Any]) -> list[dict[str, Any]]:
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
    name = string(holder, "name", place)
    if holder.get("namespace") is None:
        return name
    return string(holder, "namespace", place) + _JOINT + name


def names_of(body: dict[str, Any], flat: str) -> dict[str, str]:
    """Returns the fields that name the function in an answer; `flat`: the engine's name for it."""
    for space in body.get("tools") or ():
        if space.get("type") != "namespace":
            continue
        prefix = space["name"] + _JOINT
        name = flat.removeprefix(prefix)
        if name != flat and any(tool.get("name") == name for tool in space["tools"]):
            return {"name": name, "namespace": space["name"]}
    return {"name": flat}


def _functions(body: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    taken: set[str] = set()
    for tool, place in own_tools(body):
        match tool.get("type"):
            case "function":
                functions = [(tool, place)]
            case "namespace":
                string(tool, "name", place)
                inner = enumerate(objects(tool, "tools", needed=True))
                functions = [(function, f"{place}.tools[{number}]") for number, function in inner]
            case kind:
                raise unsupported(kind, place, _NOT_OWN)
        for function, at in functions:
            if function.get("type") != "function":
                raise unsupported(function.get("type"), at, _NOT_OWN)
            known = {name: value for name, value in function.items() if value is not None}
            if function is not tool:
                known["name"] = flat_name({**function, "namespace": tool["name"]}, at)
                if known["name"] in taken:
                    raise bad(f"{at}.name", f"is taken: {known['name'][:80]!r} is another tool")
            taken.add(str(known.get("name")))
            yield known, at


Find = Callable[[str], dict[str, Any] | None]
"""Finds an earlier output item by its id."""


def messages_of(given: Any, find: Find) -> list[Message]:
    reading = _Reading()
    if isinstance(given, str):
        reading.message({"role": "user", "content": given}, "input")
        return reading.messages()
    if not isinstance(given, list) or not given:
        raise bad("input", "must be a text or a list of at least one item")
    for index, item in enumerate(given):
        place = f"input[{index}]"
        reading.item(_resolved(object_part(item, place), place, find), place)
    return reading.messages()


def _resolved(item: dict[str, Any], place: str, find: Find) -> dict[str, Any]:
    reference = item.get("type") == "item_reference" or set(item) == {"id"}
    if not reference:
        return item
    found = find(string(item, "id", place))
    if found is None:
        raise bad(f"{place}.id", f"does not name an item of this attempt: {item['id'][:80]!r}")
    return found


class _Reading:
    """Reads items in order; the items of one answer are held until it is complete."""

    def __init__(self) -> None:
        self._conversation = Conversation()
        self._answer = _Answer()

    def item(self, item: dict[str, Any], place: str) -> None:
        kind = item.get("type") or ("message" if "role" in item else None)
        match kind:
            case "message":
                self.message(item, place)
            case "reasoning":
                self._add(_Answer(reasoning=_reasoning(item, place)))
            case "function_call":
                call_id, arguments = (string(item, n, place) for n in ("call_id", "arguments"))
                call = ToolCall(call_id, flat_name(item, place), arguments)
                self._add(_Answer(calls=[call]))
            case "function_call_output":
                self._end_answer()
                parts = _parts(item, "output", place)
                self._conversation.tool(string(item, "call_id", place), parts)
            case _:
                raise unsupported(kind, place)

    def message(self, item: dict[str, Any], place: str) -> None:
        parts = _parts(item, "content", place)
        match item.get("role"):
            case "assistant":
                self._add(_Answer(text=_texts(parts, place)))
            case "user":
                self._end_answer()
                self._conversation.user(parts)
            case "system" | "developer":
                self._end_answer()
                self._conversation.system(parts)
            case role:
                raise impossible(role, f"{place}.role")

    def messages(self) -> list[Message]:
        self._end_answer()
        return self._conversation.messages()

    def _add(self, more: _Answer) -> None:
        if not self._answer.goes_on_with(more):
            self._end_answer()
        self._answer.add(more)

    def _end_answer(self) -> None:
        answer, self._answer = self._answer, _Answer()
        if answer.begun:
            self._conversation.assistant(
                reasoning=answer.reasoning or "", text=answer.text or "", calls=answer.calls
            )


class _Answer:
    """One answer of the model: reasoning, then text, then calls; None for missing parts."""

    def __init__(
        self,
        reasoning: str | None = None,
        text: str | None = None,
        calls: list[ToolCall] | None = None,
    ) -> None:
        self.reasoning = reasoning
        self.text = text
        self.calls = calls or []

    @property
    def begun(self) -> bool:
        return self.reasoning is not None or self.text is not None or bool(self.calls)

    def goes_on_with(self, more: _Answer) -> bool:
        """Returns whether `more` can be added: no part that must come after it is present yet."""
        if more.reasoning is not None:
            return not self.begun
        return bool(more.calls) or (self.text is None and not self.calls)

    def add(self, more: _Answer) -> None:
        self.reasoning = self.reasoning if more.reasoning is None else more.reasoning
        self.text = self.text if more.text is None else more.text
        self.calls += more.calls


def _reasoning(item: dict[str, Any], place: str) -> str:
    """Returns the text of a reasoning item, or else its summary; encrypted text is left out."""
    for name in ("content", "summary"):
        parts = objects(item, name) if item.get(name) else []
        if parts:
            return "".join(
                string(part, "text", f"{place}.{name}[{i}]") for i, part in enumerate(parts)
            )
    return ""


def _texts(parts: list[Part], place: str) -> str:
    if any(part["type"] != "text" for part in parts):
        raise bad(f"{place}.content", "of an assistant can only be text")
    return "".join(part["text"] for part in parts)


def _parts(item: dict[str, Any], name: str, place: str) -> list[Part]:
    given = item.get(name)
    if isinstance(given, str):
        return [text_part(given)]
    if not isinstance(given, list):
        raise bad(f"{place}.{name}", "must be a text or a list of parts")
    return [_part(part, f"{place}.{name}[{index}]") for index, part in enumerate(given)]


def _part(part: Any, place: str) -> Part:
    kind = object_part(part, place).get("type")
    if isinstance(kind, str) and kind in TEXTS:
        return text_part(string(part, TEXTS[kind], place))
    if kind != "input_image":
        raise unsupported(kind, place)
    if part.get("image_url") is None:
        raise bad(place, "must hold its image as image_url: files are not stored here")
    url = data_url(part["image_url"], "image", f"{place}.image_url")
    given = part.get("detail")
    return image_part(url, None if given is None else detail(given, f"{place}.detail"))


_LOGPROBS = "message.output_text.logprobs"


def wants_logprobs(body: dict[str, Any]) -> bool:
    included = body.get("include") or []
    return _LOGPROBS in included or bool(_top_logprobs(body))


def fields_of(body: dict[str, Any], tools: list[dict[str, Any]]) -> dict[str, Any]:
    fields = engine_fields(body)
    if wants_logprobs(body):
        fields["top_logprobs"] = _top_logprobs(body)
    if tools:
        fields |= _tool_fields(body, tools)
    elif body.get("tool_choice") not in (None, "auto", "none"):
        raise bad("tool_choice", "needs tools")
    form = _response_format(mapping(mapping(body, "text"), "format", "text"))
    if form is not None:
        fields["response_format"] = form
    effort = mapping(body, "reasoning").get("effort")
    return fields | effort_fields(effort, "reasoning.effort")


def _tool_fields(body: dict[str, Any], tools: list[dict[str, Any]]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    choice = body.get("tool_choice")
    if choice is not None:
        fields["tool_choice"] = _tool_choice(choice, tools)
    if "parallel_tool_calls" in body:
        fields["parallel_tool_calls"] = body["parallel_tool_calls"]
    return fields


def _tool_choice(choice: Any, tools: list[dict[str, Any]]) -> Any:
    if choice in ("auto", "none", "required"):
        return choice
    kind = choice.get("type") if isinstance(choice, dict) else choice
    if kind == "allowed_tools":
        if choice.get("mode") not in ("auto", "required"):
            raise bad("tool_choice.mode", "must be auto or required")
        return choice["mode"]
    if kind != "function":
        raise bad("tool_choice", f"{str(kind)[:80]!r} is not supported")
    return named_choice(flat_name(choice, "tool_choice"), tools)


def _response_format(form: dict[str, Any]) -> dict[str, Any] | None:
    kind = form.get("type", "text")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "json_object"}
    if kind != "json_schema":
        raise unsupported(kind, "text.format")
    if not isinstance(form.get("schema"), dict):
        raise bad("text.format.schema", "must be an object")
    string(form, "name", "text.format")
    schema = {name: form[name] for name in form if name != "type" and form[name] is not None}
    return schema_format(schema, "text.format")


def _top_logprobs(body: dict[str, Any]) -> int:
    wanted: int = body.get("top_logprobs") or 0
    return wanted
