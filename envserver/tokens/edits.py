"""How an agent changed an answer before sending it back.

In: the answer as it was recorded and the assistant message that stands in its place in a later
request. Out: one word. Only forms that mean the same are equal: reasoning is left out (templates
decide what becomes of it), content parts are their text, absent content is empty, arguments of tool
calls are compared as JSON. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Hashable
from typing import Any, Literal, NamedTuple

from envserver_records.records import Message

Change = Literal["exact", "appended", "whitespace", "calls", "edited"]
"""exact: nothing that a template shows; appended: text was added behind the content; whitespace:
runs of whitespace differ, or some at its ends; calls: the same tool calls, written otherwise (order
of keys, ids); edited: anything else."""

TEXT_PARTS = ("text", "input_text", "output_text")
"""Kinds of content parts that are text and nothing else."""


class AnswerContent(NamedTuple):
    """What counts of an assistant message. `calls`: (id, name, arguments as compact JSON) each."""

    content: str
    calls: tuple[tuple[str, str, str], ...]


class Replay(NamedTuple):
    """What became of an answer; `extra` is the text added where it was appended to."""

    change: Change
    extra: str = ""


def classify(recorded: Message, replayed: Message, *, ended: bool = True, tail: str = "") -> Replay:
    """What an agent did to the answer `recorded` when it sent it back as `replayed`.

    Args:
        ended: the model ended its turn with a token of its own; nothing can be appended behind it.
        tail: what was sampled beyond the content: the stop string, and what came in its last token.
    """
    return change_of(answer_of(recorded), answer_of(replayed), ended=ended, tail=tail)


def change_of(was: AnswerContent, now: AnswerContent, *, ended: bool, tail: str) -> Replay:
    """`classify` for messages that have been reduced to what counts."""
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
    """What counts of `message`."""
    calls = message.get("tool_calls")
    return AnswerContent(
        text_of(message.get("content")),
        tuple(_call_of(call) for call in calls) if isinstance(calls, list) else (),
    )


def content_key(answer: AnswerContent) -> Hashable:
    """Equal for answers that differ in whitespace only, or in how their tool calls are written."""
    return " ".join(answer.content.split()), tuple(_meaning(answer))


def text_of(content: Any) -> str:
    """The text of a message's content: None is empty, text parts are joined line by line as engines
    do, and what is no text stands there as JSON."""
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
    """`value` as compact JSON, in ASCII; the order of keys is kept, since templates show it."""
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
    """A tool call's arguments, text or object, as compact JSON; text that is no JSON stays."""
    if not isinstance(arguments, str):
        return canonical(arguments or {})
    try:
        return canonical(json.loads(arguments)) if arguments.strip() else "{}"
    except (ValueError, RecursionError):
        return arguments


def _meaning(answer: AnswerContent) -> list[tuple[str, str]]:
    """Its calls without ids and with sorted keys."""
    return [(name, _sorted(arguments)) for _, name, arguments in answer.calls]


def _sorted(arguments: str) -> str:
    try:
        return json.dumps(json.loads(arguments), sort_keys=True)
    except (ValueError, RecursionError):
        return arguments


def _same_words(one: str, other: str) -> bool:
    return one.split() == other.split()


def _appended(was: str, now: str, tail: str) -> Replay:
    """Text behind the content and the tail; an agent may put back the stop string only."""
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
    """Where in `text` the words of `prefix` end if it begins with them, else None.

    The whitespace behind them counts as theirs where the text has it too.
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
