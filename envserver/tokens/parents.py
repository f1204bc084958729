"""Looks up the recorded calls of one attempt that a later call may continue."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from typing import Any, NamedTuple

import msgspec
import numpy as np
from envserver_records.records import Call, Message

from .comparison import Segment
from .edits import Change, Replay, answer_of, change_of, content_key
from .vocabulary import Vocabulary


class Parent(msgspec.Struct, kw_only=True, eq=False):
    """A recorded call, and what it added to its conversation.

    Args:
        before: the call that its prompt continues.
        ended: whether the model ended its turn itself, not the token limit or a stop string.
        kwargs: of the chat template.
        head: the generation prompt, once computed.
    """

    call: Call
    segment: Segment
    ended: bool
    before: Parent | None
    kwargs: Mapping[str, Any]
    head: str | None = None

    def path(self) -> list[Parent]:
        """Returns the calls of its conversation, first to last, itself included."""
        path = [self]
        while path[-1].before is not None:
            path.append(path[-1].before)
        return path[::-1]

    def same_tokens(self, other: Parent) -> bool:
        """Returns whether continuing either gives the same prompt."""
        return np.array_equal(
            self.call.completion_ids, other.call.completion_ids
        ) and np.array_equal(self.call.prompt_ids, other.call.prompt_ids)


class Match(NamedTuple):
    """A call whose answer appears in a request, and how that answer was changed."""

    parent: Parent
    replay: Replay


class Parents:
    """Calls, by the requests that they answered."""

    def __init__(self) -> None:
        self._by_request: dict[bytes, list[Parent]] = {}
        self._by_index: dict[int, Parent] = {}
        self._answers: set[Hashable] = set()

    def add(self, request: bytes, parent: Parent) -> None:
        """Adds a call; `request` is the last hash of its request's chain."""
        self._by_request.setdefault(request, []).append(parent)
        self._by_index[parent.call.index] = parent
        self._answers.add(content_key(parent.segment.answer))

    def by_index(self, index: int) -> Parent | None:
        """Returns the attempt's call `index`."""
        return self._by_index.get(index)

    def matches(self, request: bytes, replayed: Message) -> list[Match]:
        """Returns the calls that answered `request` and may have produced `replayed`.

        The least changed come first (the shortest appended text first), then those that reached the
        agent, then the latest.
        """
        now = answer_of(replayed)
        found = [
            Match(p, change_of(p.segment.answer, now, ended=p.ended, tail=p.segment.tail))
            for p in reversed(self._by_request.get(request, []))
        ]
        return sorted(found, key=_rank)

    def was_answered(self, message: Message) -> bool:
        """Returns whether any call of the attempt gave this answer, to any request."""
        return content_key(answer_of(message)) in self._answers


_CHANGES: tuple[Change, ...] = ("exact", "whitespace", "appended", "calls", "edited")


def _rank(match: Match) -> tuple[int, int, bool]:
    change, extra = match.replay
    return _CHANGES.index(change), len(extra), match.parent.call.delivered == "none"


def is_ambiguous(chosen: Match, accepted: Collection[Match]) -> bool:
    """Returns whether another match is as good as the chosen one but has different tokens."""
    return any(
        _rank(match) == _rank(chosen) and not match.parent.same_tokens(chosen.parent)
        for match in accepted
        if match is not chosen
    )


def segment_of(call: Call, context: str, vocabulary: Vocabulary) -> tuple[Segment, bool]:
    """Returns what `call` added after `context`, and whether the model ended its turn itself."""
    ids = call.completion_ids.tolist()
    sampled = vocabulary.decode(ids)
    stopped_by = call.stop_reason if isinstance(call.stop_reason, str) else None
    ended = stopped_by is None and call.finish_reason in _ENDED
    specials = vocabulary.special_ids.intersection(ids[:-1] if ended else ids)
    answer = answer_of(call.engine_message)
    segment = Segment(
        context=context,
        sampled=sampled,
        answer=answer,
        reasoning=reasoning_of(call.engine_message),
        specials=tuple({vocabulary.decode([id]) for id in specials}),
        tail="" if stopped_by is None else _tail(call, vocabulary, stopped_by, answer.content),
    )
    return segment, ended


_ENDED = ("stop", "tool_calls")


def reasoning_of(message: Message) -> str:
    """Returns a message's reasoning field, or ""."""
    for name in ("reasoning", "reasoning_content"):
        if isinstance(message.get(name), str) and message[name]:
            return str(message[name])
    return ""


def _tail(call: Call, vocabulary: Vocabulary, stop: str, content: str) -> str:
    """Returns the sampled text from the stop string on, or after it if the content includes it.

    The search starts near the last token, which ended the answer: the string may occur earlier too.
    """
    ids = call.completion_ids.tolist()
    before, sampled = vocabulary.decode(ids[:-1]), vocabulary.decode(ids)
    at = sampled.find(stop, max(0, len(before) - len(stop) + 1))
    if at < 0:  # several tokens came at once
        at = sampled.rfind(stop)
    if at < 0:
        return ""
    return sampled[at + len(stop) :] if content.endswith(stop) else sampled[at:]
