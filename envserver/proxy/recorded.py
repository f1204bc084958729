"""What the requests of one attempt hold in memory until its rollout ends, counted and bounded.

In: each request before the engine is asked. Out: the same request, whose messages, tools and fields
are those of an earlier recorded request where they are equal: a conversation is held once, not once
for each of its calls. What is new is counted as Python holds it. Token ids are not counted: turns
and the model's context bound them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from sys import getsizeof
from typing import Any

import orjson

from .bounds import InFlight
from .model_request import ModelRequest

_COMPARED = 4
"""How many conversations of an attempt may take turns and still be held once each."""
_LARGE = 1024
"""Strings of fewer bytes are counted each time that they occur."""


class Kept:
    """The space that one request takes in the record; give it back with `end` if none is needed."""

    def __init__(self, record: RecordedRequests, request: ModelRequest, size: int) -> None:
        self._record = record
        self._request = request
        self._size = size

    def end(self, *, recorded: bool) -> None:
        """The request has ended. `recorded`: its calls are in the record."""
        if recorded:
            self._record.latest.append(self._request)
        else:
            self._record.give_back(self._size)


class RecordedRequests:
    """The requests in the record of one attempt.

    Args:
        in_flight: the attempt's bounds.
    """

    def __init__(self, in_flight: InFlight) -> None:
        self.latest: deque[ModelRequest] = deque(maxlen=_COMPARED)
        self._in_flight = in_flight
        self._ended = False

    def take(self, request: ModelRequest) -> Kept:
        """Takes the space that `request` needs beyond what it shares with recorded ones.

        Raises:
            LimitReached: the record of this attempt is full.
            OverBound: those of all attempts are.
        """
        shared = self._share(request)
        most = self._in_flight.bounds.max_recorded_bytes
        new = (request.messages[shared:], request.tools, request.fields, request.body)
        size = size_of(*_without(new, self.latest), most=most)
        self._in_flight.keep(size)
        return Kept(self, request, size)

    def give_back(self, size: int) -> None:
        if not self._ended:
            self._in_flight.keep(-size)

    def clear(self) -> None:
        """The attempt has ended: its runner holds the record now."""
        self._ended = True
        self.latest.clear()
        self._in_flight.keep(-self._in_flight.recorded)

    def _share(self, request: ModelRequest) -> int:
        """Replaces what an earlier request holds as well; returns how many messages it does."""
        lengths = [(_prefix(request.messages, one.messages), one) for one in self.latest]
        if not lengths:
            return 0
        shared, earlier = max(lengths, key=lambda pair: pair[0])
        # A new list: that of the dialect may be kept elsewhere.
        request.messages = [*earlier.messages[:shared], *request.messages[shared:]]
        if _same(request.tools, earlier.tools):
            request.tools = earlier.tools
        for mine, its in ((request.fields, earlier.fields), (request.body, earlier.body)):
            for name, value in mine.items():
                if name in its and _same(value, its[name]):
                    mine[name] = its[name]
        return shared


def _without(new: tuple[Any, ...], latest: deque[ModelRequest]) -> Iterator[Any]:
    """Yields what `latest` do not hold."""
    held = {id(part) for one in latest for part in _parts(one)}
    for value in new:
        values = value.values() if isinstance(value, dict) else (value,)
        yield from (one for one in values if id(one) not in held)


def _parts(request: ModelRequest) -> Iterator[Any]:
    yield request.tools
    yield from request.fields.values()
    yield from request.body.values()


def _prefix(messages: list[Any], earlier: list[Any]) -> int:
    """Returns how many messages both lists begin with."""
    for at, (one, other) in enumerate(zip(messages, earlier, strict=False)):
        if not _same(one, other):
            return at
    return min(len(messages), len(earlier))


def _same(one: Any, other: Any) -> bool:
    """Returns whether both values are written alike in JSON: 1, 1.0 and true are equal in Python
    only."""
    if one is other:
        return True
    if one != other:
        return False
    if isinstance(one, dict) and set(map(type, one.values())) == {str}:
        return list(one) == list(other)
    try:
        return orjson.dumps(one) == orjson.dumps(other)
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
