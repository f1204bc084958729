"""Holds a conversation once, not once for each of its calls, until its rollout ends.

Each request shares the messages, tools and fields that equal those of an earlier recorded one, and
each prompt the token ids that it begins with. The memory of requests is counted as Python holds it,
and bounded; not that of token ids, which turns and the model's context bound.
"""

from __future__ import annotations

from collections.abc import Iterator
from sys import getsizeof
from typing import Any

import numpy as np
import orjson
from envserver_records.records import Tokens

from .bounds import InFlight
from .dialects.base import ModelRequest

_COMPARED = 4
"""How many conversations of an attempt may take turns and still be held once each."""
_GROWTH = 1.5
"""How much larger than its prompt an array of ids is made: what is added next finds place in it."""
_LARGE = 1024
"""Strings of fewer bytes are counted each time that they occur."""


class RecordedPrompts:
    """The ids of prompts. One that begins with a whole earlier one is written behind it in the same
    array; both are views of it. So a conversation takes two to five times its last prompt."""

    def __init__(self) -> None:
        self._latest: list[_Growing] = []

    def share(self, ids: Tokens) -> Tokens:
        """Returns equal ids, which are read-only."""
        growing = next((each for each in self._latest if each.begins(ids)), None) or _Growing(ids)
        latest = [each for each in self._latest if each is not growing]
        self._latest = [growing, *latest[: _COMPARED - 1]]
        return growing.view(ids)


class _Growing:
    """An array of which the first `used` ids are those of prompts."""

    def __init__(self, ids: Tokens) -> None:
        self._ids = np.empty(int(_GROWTH * len(ids)), np.int32)
        self._used = 0

    def begins(self, ids: Tokens) -> bool:
        """Whether `ids` begin with all that is used, or the other way round."""
        size = min(self._used, len(ids))
        return np.array_equal(self._ids[:size], ids[:size])

    def view(self, ids: Tokens) -> Tokens:
        size = len(ids)
        if size > len(self._ids):
            larger = np.empty(int(_GROWTH * size), np.int32)
            larger[: self._used] = self._ids[: self._used]
            self._ids = larger
        if size > self._used:
            self._ids[self._used : size] = ids[self._used :]
            self._used = size
        view = self._ids[:size]
        view.flags.writeable = False
        return view


class KeptRequest:
    """The parts of a request that later ones may share; it has `shared` messages of `earlier`."""

    def __init__(self, request: ModelRequest, earlier: KeptRequest | None, shared: int) -> None:
        self.dialect = request.dialect
        self.messages, self.tools = request.messages, request.tools
        self.fields, self.body = request.fields, request.body
        known = earlier.are_texts[:shared] if earlier is not None else []
        self.are_texts: list[bool] = [
            *known,
            *(_is_text(message, 4) for message in self.messages[shared:]),
        ]
        """Whether each message holds texts only: no equal one is written otherwise."""
        is_whole = earlier is not None and shared == len(earlier.messages)
        self.goes_on: KeptRequest | None = earlier if is_whole else None
        self.size = 0
        """Bytes that it takes in the record beyond what it shares."""

    def prefix(self, messages: list[Any]) -> int:
        """Returns how many messages both lists begin with."""
        for at, (message, mine) in enumerate(zip(messages, self.messages, strict=False)):
            if message is not mine and (
                message != mine or not (self.are_texts[at] or _alike(message, mine))
            ):
                return at
        return min(len(messages), len(self.messages))

    def parts(self) -> Iterator[Any]:
        yield self.tools
        yield from self.fields.values()
        yield from self.body.values()


class RecordedRequests:
    def __init__(self, in_flight: InFlight) -> None:
        self._latest: list[KeptRequest] = []
        self._in_flight = in_flight
        self._ended = False

    def recall(self, body: dict[str, Any]) -> int:
        """Puts recorded messages in the place of equal ones of the chat API; returns how many."""
        messages = body.get("messages")
        if not isinstance(messages, list):
            return 0
        earlier, shared = self._nearest(messages, dialect="chat")
        if earlier is not None:
            messages[:shared] = earlier.messages[:shared]
        return shared

    def take(self, request: ModelRequest) -> KeptRequest:
        """Takes the space that `request` needs beyond what it shares with recorded ones."""
        earlier, shared = self._nearest(request.messages)
        if earlier is not None:
            _share(request, earlier, shared)
        made = KeptRequest(request, earlier, shared)
        held = {id(part) for part in earlier.parts()} if earlier is not None else set()
        new = [part for part in made.parts() if id(part) not in held]
        most = self._in_flight.bounds.max_recorded_bytes
        made.size = size_of(request.messages[shared:], *new, most=most)
        self._in_flight.keep(made.size)
        return made

    def hold(self, *values: Any) -> None:
        """Takes the space of JSON values that are in the record, too."""
        self._in_flight.keep(size_of(*values, most=self._in_flight.bounds.max_recorded_bytes))

    def end(self, request: KeptRequest, *, recorded: bool) -> None:
        """Lets later requests share what a recorded one has; gives back another one's space."""
        if self._ended:
            return
        if not recorded:
            self._in_flight.keep(-request.size)
            return
        latest = [earlier for earlier in self._latest if earlier is not request.goes_on]
        request.goes_on = None
        self._latest = [request, *latest[: _COMPARED - 1]]

    def clear(self) -> None:
        """Ends the attempt: its runner holds the record now."""
        self._ended = True
        self._latest = []
        self._in_flight.keep(-self._in_flight.recorded)

    def _nearest(
        self, messages: list[Any], dialect: str | None = None
    ) -> tuple[KeptRequest | None, int]:
        """Returns the request with which `messages` share most at their beginning, and how many."""
        best: tuple[KeptRequest | None, int] = (None, 0)
        for earlier in self._latest:
            if dialect is not None and earlier.dialect != dialect:
                continue
            shared = earlier.prefix(messages)
            if best[0] is None or shared > best[1]:
                best = (earlier, shared)
            if shared == len(earlier.messages):
                break
        return best


def _share(request: ModelRequest, earlier: KeptRequest, shared: int) -> None:
    # A new list: the dialect may keep its own.
    request.messages = [*earlier.messages[:shared], *request.messages[shared:]]
    if _same(request.tools, earlier.tools):
        request.tools = earlier.tools
    for mine, its in ((request.fields, earlier.fields), (request.body, earlier.body)):
        for name, value in mine.items():
            if name in its and _same(value, its[name]):
                mine[name] = its[name]


def _is_text(value: Any, levels: int) -> bool:
    """Returns whether `value` is a text, or holds nothing else within so many levels.

    Four levels: a message, a list in it, an item, an object in this. What is deeper, such as
    arguments, may have fields in any order.
    """
    if value is None or type(value) is str:
        return True
    if levels == 0 or not isinstance(value, dict | list):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return all(_is_text(item, levels - 1) for item in inner)


def _same(value: Any, other: Any) -> bool:
    return value is other or (value == other and _alike(value, other))


def _alike(value: Any, other: Any) -> bool:
    """Returns whether equal values are written alike in JSON: to Python 1, 1.0, true are equal."""
    if type(value) is str:
        return True
    try:
        return orjson.dumps(value) == orjson.dumps(other)
    except (TypeError, RecursionError):
        return False


def size_of(*values: Any, most: int) -> int:
    """Returns the bytes that JSON values take in memory; stops counting beyond `most`."""
    total = 0
    seen: set[int] = set()
    left = list(values)
    while left and total <= most:
        value = left.pop()
        size = getsizeof(value)
        if size > _LARGE:
            if id(value) in seen:
                continue
            seen.add(id(value))
        total += size
        if isinstance(value, dict):
            left.extend(value)
            left.extend(value.values())
        elif isinstance(value, list):
            left.extend(value)
    return total
