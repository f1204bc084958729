"""Output items of OpenAI's responses API while they are streamed: the events of each. Pure.

Events have neither `output_index` nor `sequence_number` yet.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..model_request import ModelRequest
from .answers import ToolCall, new_id
from .responses_answer import (
    Item,
    Status,
    call_item,
    reasoning_item,
    reasoning_part,
    text_item,
    text_part,
)

Event = dict[str, Any]


class OpenText:
    """A message item that grows.

    Args:
        logprobs: those that have arrived and are not sent yet.
    """

    def __init__(self, logprobs: list[Any]) -> None:
        self._id = new_id("msg")
        self._texts: list[str] = []
        self._arrived = logprobs
        self._logprobs: list[Any] = []

    def begin(self) -> Iterator[Event]:
        """Returns its first events."""
        yield _added(text_item(self._id, "", []) | {"content": []})
        yield self._event("content_part.added", part=text_part("", []))

    def grow(self, text: str) -> Event:
        """The event for some more text."""
        self._texts.append(text)
        return self._event("output_text.delta", delta=text, logprobs=self._taken())

    def end(self, status: Status) -> Iterator[Event]:
        """Returns its last events; the very last holds the item."""
        self._taken()
        text = "".join(self._texts)
        item = text_item(self._id, text, self._logprobs) | {"status": status}
        yield self._event("output_text.done", text=text, logprobs=self._logprobs)
        yield self._event("content_part.done", part=item["content"][0])
        yield _done(item)

    def _taken(self) -> list[Any]:
        taken = [*self._arrived]
        self._arrived.clear()
        self._logprobs += taken
        return taken

    def _event(self, kind: str, **more: Any) -> Event:
        return {"type": f"response.{kind}", "item_id": self._id, "content_index": 0, **more}


class OpenReasoning:
    """A reasoning item that grows."""

    def __init__(self) -> None:
        self._id = new_id("rs")
        self._texts: list[str] = []

    def begin(self) -> Iterator[Event]:
        """Returns its first events."""
        yield _added(reasoning_item(self._id, "") | {"content": []})
        yield self._event("content_part.added", part=reasoning_part(""))

    def grow(self, text: str) -> Event:
        """The event for some more text."""
        self._texts.append(text)
        return self._event("reasoning_text.delta", delta=text)

    def end(self, status: Status) -> Iterator[Event]:
        """Returns its last events; the very last holds the item."""
        text = "".join(self._texts)
        yield self._event("reasoning_text.done", text=text)
        yield self._event("content_part.done", part=reasoning_part(text))
        yield _done(reasoning_item(self._id, text) | {"status": status})

    def _event(self, kind: str, **more: Any) -> Event:
        return {"type": f"response.{kind}", "item_id": self._id, "content_index": 0, **more}


class OpenCall:
    """A function call; it comes whole."""

    def __init__(self, call: ToolCall, request: ModelRequest) -> None:
        self._item = call_item(new_id("fc"), call, request)

    def begin(self) -> Iterator[Event]:
        """Returns its first events."""
        yield _added(self._item | {"arguments": ""})
        yield self._event("delta", delta=self._item["arguments"])

    def end(self, status: Status) -> Iterator[Event]:
        """Returns its last events; the very last holds the item."""
        yield self._event("done", arguments=self._item["arguments"])
        yield _done(self._item | {"status": status})

    def _event(self, kind: str, **more: Any) -> Event:
        name = f"response.function_call_arguments.{kind}"
        return {"type": name, "item_id": self._item["id"], **more}


OpenItem = OpenText | OpenReasoning | OpenCall


def _added(item: Item) -> Event:
    return {"type": "response.output_item.added", "item": item | {"status": "in_progress"}}


def _done(item: Item) -> Event:
    return {"type": "response.output_item.done", "item": item}
