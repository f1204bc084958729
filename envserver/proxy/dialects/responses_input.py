"""Converts the input items of OpenAI's responses API to chat messages. Pure.

What the model said in one answer comes back as several items (reasoning, a message, function calls)
and becomes one assistant message again. Developer messages become system messages, since chat
templates drop roles that they do not know.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from envserver_records.records import Message

from .answers import ToolCall
from .conversation import Conversation, Part, image_part, text_part
from .media import data_url, detail
from .reading import bad, objects, string
from .responses_tools import flat_name

_TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
"""Types of text content parts, with the field that holds the text."""

Find = Callable[[str], dict[str, Any] | None]
"""Finds an earlier output item by its id."""


def messages_of(given: Any, find: Find) -> list[Message]:
    """Returns the messages in field `input`.
    Raises InputError: an item is not supported; `place` names it.
    """
    reading = _Reading()
    if isinstance(given, str):
        reading.message({"role": "user", "content": given}, "input")
        return reading.messages()
    if not isinstance(given, list) or not given:
        raise bad("input", "must be a text or a list of at least one item")
    for index, item in enumerate(given):
        place = f"input[{index}]"
        if not isinstance(item, dict):
            raise bad(place, "must be an object")
        reading.item(_resolved(item, place, find), place)
    return reading.messages()


def _resolved(item: dict[str, Any], place: str, find: Find) -> dict[str, Any]:
    """Returns `item`, or the item that it refers to."""
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
                raise bad(f"{place}.type", f"{str(kind)[:80]!r} is not supported")

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
                raise bad(f"{place}.role", f"cannot be {str(role)[:80]!r}")

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
        """Whether `more` can be added: no part that must come after it is present yet."""
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
    """Returns the content of `item` in field `name`: a string or a list of parts."""
    given = item.get(name)
    if isinstance(given, str):
        return [text_part(given)]
    if not isinstance(given, list):
        raise bad(f"{place}.{name}", "must be a text or a list of parts")
    return [_part(part, f"{place}.{name}[{index}]") for index, part in enumerate(given)]


def _part(part: Any, place: str) -> Part:
    if not isinstance(part, dict):
        raise bad(place, "must be an object")
    kind = part.get("type")
    if isinstance(kind, str) and kind in _TEXTS:
        return text_part(string(part, _TEXTS[kind], place))
    if kind != "input_image":
        raise bad(f"{place}.type", f"{str(kind)[:80]!r} is not supported")
    if part.get("image_url") is None:
        raise bad(place, "must hold its image as image_url: files are not stored here")
    url = data_url(part["image_url"], "image", f"{place}.image_url")
    given = part.get("detail")
    return image_part(url, None if given is None else detail(given, f"{place}.detail"))
