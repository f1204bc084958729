"""Classifies how an agent changed an answer before sending it back. Pure.

In: the recorded answer, and the assistant message in its place in a later request. Out: a Change.
Equivalent forms are equal: reasoning is ignored (templates decide about it), content parts are
their text, missing content is empty, and arguments of tool calls are compared as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Hashable
from typing import Any, Literal, NamedTuple

from envserver_records.records import Message

Change = Literal["exact", "appended", "whitespace", "calls", "edited"]
"""exact: no visible change; appended: text was added after the content; whitespace: runs of
whitespace differ, or whitespace at the ends; calls: the same tool calls in another format (order of
keys, ids); edited: anything else."""

TEXT_PARTS = ("text", "input_text", "output_text")
"""Types of content parts that are plain text."""


class AnswerContent(NamedTuple):
    """The comparable part of an assistant message.

    `calls`: (id, name, arguments as compact JSON).
    """

    content: str
    calls: tuple[tuple[str, str, str], ...]


class Replay(NamedTuple):
    """How an answer came back; `extra` is the appended text."""

    change: Change
    extra: str = ""


def classify(recorded: Message, replayed: Message, *, ended: bool = True, tail: str = "") -> Replay:
    """Classifies the change from the answer `recorded` to `replayed`, as the agent sent it back.

    Args:
        ended: the model ended its turn with an end token, after which nothing can be appended.
        tail: what was sampled beyond the content: the stop string and the rest of its last token.
    """
    return change_of(answer_of(recorded), answer_of(replayed), ended=ended, tail=tail)


def change_of(was: AnswerContent, now: AnswerContent, *, ended: bool, tail: str) -> Replay:
    """Does the work of `classify`, on reduced messages."""
    if was == now:
        return Replay("exact")
    if was.calls != now.calls:
        same = _meaning(was) == _meaning(now) and _same_words(was.content, now.content)
        return Replay("calls") if same else _EDITED
    if _same_words(was.content, now.content):
        return Replay("whitespace")
    if ended or was.calls or not (was.content.strip() or tail):
        return _EDITED
    return _appended(was.content, now.content, tail)


_EDITED = Replay("edited")


def answer_of(message: Message) -> AnswerContent:
    """Returns the comparable part of `message`."""
    calls = message.get("tool_calls")
    return AnswerContent(
        text_of(message.get("content")),
        tuple(_call_of(call) for call in calls) if isinstance(calls, list) else (),
    )


def content_key(answer: AnswerContent) -> Hashable:
    """Returns a key that is equal for answers that differ only in whitespace or in the format of
    calls."""
    return " ".join(answer.content.split()), tuple(_meaning(answer))


def text_of(content: Any) -> str:
    """Returns the text of a message's content.

    None is empty, text parts are joined by newlines as engines do, and other parts appear as
    JSON."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n".join(_part_text(part) for part in content)
    return canonical(content)


def _part_text(part: Any) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and part.get("type") in TEXT_PARTS:
        text = part.get("text")
        if isinstance(text, str):
            return text
    return canonical(part)


def canonical(value: Any) -> str:
    """Returns `value` as compact ASCII JSON. The order of keys is kept, since templates show it."""
    return _compact(value)


_compact = json.JSONEncoder(separators=(",", ":")).encode


def _call_of(call: Any) -> tuple[str, str, str]:
    if not isinstance(call, dict):
        return "", "", canonical(call)
    function = call.get("function")
    if not isinstance(function, dict):
        return str(call.get("id") or ""), "", canonical(call)
    return (
        str(call.get("id") or ""),
        str(function.get("name") or ""),
        compact_arguments(function.get("arguments")),
    )


def compact_arguments(arguments: Any) -> str:
    """Returns a tool call's arguments as compact JSON; text that is not JSON is returned
    unchanged."""
    if not isinstance(arguments, str):
        return canonical(arguments or {})
    try:
        return canonical(json.loads(arguments)) if arguments.strip() else "{}"
    except (ValueError, RecursionError):
        return arguments


def _meaning(answer: AnswerContent) -> list[tuple[str, str]]:
    """Returns the calls without ids and with sorted keys."""
    return [(name, _sorted(arguments)) for _, name, arguments in answer.calls]


def _sorted(arguments: str) -> str:
    try:
        return json.dumps(json.loads(arguments), sort_keys=True)
    except (ValueError, RecursionError):
        return arguments


def _same_words(one: str, other: str) -> bool:
    return one.split() == other.split()


def _appended(was: str, now: str, tail: str) -> Replay:
    """Finds text after the content and tail; an agent may also have put back only the stop
    string."""
    end = _words_end(was, now)
    if end is None:
        return _EDITED
    rest = now[end:]
    after = _words_end(tail, rest)
    if after is not None:
        return Replay("appended", rest[after:])
    back = rest.strip()
    return Replay("appended") if back and tail.strip().startswith(back) else _EDITED


def _words_end(prefix: str, text: str) -> int | None:
    """Returns where in `text` the words of `prefix` end, or None if it does not begin with them.

    Whitespace after them is included if the text has it too.
    """
    at = 0
    for number, word in enumerate(prefix.split()):
        begin = at
        while at < len(text) and text[at].isspace():
            at += 1
        if (number and at == begin) or not text.startswith(word, at):
            return None
        at += len(word)
    blanks = prefix[len(prefix.rstrip()) :]
    return at + len(blanks) if text.startswith(blanks, at) else at
