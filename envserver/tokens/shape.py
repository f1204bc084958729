"""Finds where a chat template puts an answer and what comes after it, using marker words.

A conversation's shape is its roles, calls and tools without their text. Whether a template keeps
messages whole and in order depends only on the shape, so it is checked once for each shape and
remembered on the format.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from envserver_records.errors import TemplateRefused
from envserver_records.records import Message

from .chat_format import ChatFormat
from .images import is_image
from .refusal import Refused

# Mixed case, letters and digits: no template splits them, and one that changes case is detected.
# Descending: a template that sorts is detected, too.
_ANSWER = "zQ7answer4Kx"
_LATER = "yQ7later"
_EARLIER = "xQ7earlier"

_ENDS = "\0"
"""Marks the keys of `known_end`, and divides what is known."""
_PUNCTUATION = " \t\r\n\"'`,:>)]}"
"""Text that may end a value or an argument list rather than a call."""


class Turn(NamedTuple):
    """An answer in its conversation: the messages before it and those that the agent added after
    it."""

    history: list[Message]
    assistant: Message
    new: list[Message]
    tools: list[dict[str, Any]] | None
    kwargs: Mapping[str, Any]

    @property
    def calls(self) -> list[dict[str, Any]]:
        """The answer's tool calls."""
        calls = self.assistant.get("tool_calls") or []
        if not isinstance(calls, list):
            raise Refused("unusual_message")
        return calls


def tail(format: ChatFormat, turn: Turn) -> str:
    """Returns what the template writes after the answer's content, or, if it has calls, after the
    value of an argument of the last call.
    Raises Refused: answer_not_rendered, calls_not_rendered, answer_repeated; and as `render`.
    """
    messages = [*turn.history, _stand_in(turn), *turn.new]
    return _behind(_render(format, turn, messages, generation_prompt=True), bool(turn.calls))


def check(format: ChatFormat, turn: Turn, head: str, stop: str) -> str:
    """Checks that the template keeps messages after the answer in order and ends it with `head`.

    Args:
        head: beginning of the tail, up to and with the first `stop`.
        stop: the text of the token that ends the answer.

    Returns:
        What every call ends with before `stop`, whatever its arguments; empty without calls.

    Raises:
        Refused: messages_moved: messages are dropped, changed, repeated or moved;
            end_moves: the answer's end depends on what comes after it.
    """
    key = _key(turn, head)
    found = format.shapes.get(key)
    if found is None:
        _check_order(format, turn)
        found = _check_end(format, turn, head, stop)
        format.remember(key, found)
        format.remember(_key(turn, _ENDS + stop), f"{head.removesuffix(stop)}{_ENDS}{found}")
    return found


def known_end(format: ChatFormat, turn: Turn, stop: str) -> tuple[str, str] | None:
    """Returns what the template writes between an answer and `stop`, and the result of `check`,
    if a conversation of this shape was checked; else None."""
    known = format.shapes.get(_key(turn, _ENDS + stop))
    if known is None:
        return None
    closers, _, call_end = known.partition(_ENDS)
    return closers, call_end


def call_opener(format: ChatFormat, turn: Turn) -> str:
    """Returns what a tool call begins with, without whitespace; "" if nothing marks calls."""
    key = _key(turn._replace(history=[], assistant={}, new=[]), "opener")
    found = format.shapes.get(key)
    if found is None:
        found = _find_opener(format, turn)
        format.remember(key, found)
    return found


def _render(
    format: ChatFormat, turn: Turn, messages: list[Message], *, generation_prompt: bool
) -> str:
    try:
        return format.render(messages, turn.tools, turn.kwargs, generation_prompt=generation_prompt)
    except TemplateRefused:
        raise Refused("template_refuses") from None


def _behind(text: str, calls: bool) -> str:
    _, found, after = text.partition(_ANSWER)
    if not found:
        raise Refused("calls_not_rendered" if calls else "answer_not_rendered")
    if _ANSWER in after:
        raise Refused("answer_repeated")
    return after


def _stand_in(turn: Turn) -> Message:
    """Returns the answer without its reasoning and with `_ANSWER` in place of its last text."""
    message: Message = {
        name: turn.assistant[name] for name in ("content", "name") if name in turn.assistant
    }
    if not turn.calls:
        return {**message, "role": "assistant", "content": _ANSWER}
    last = turn.calls[-1]
    try:
        arguments = json.loads(last["function"]["arguments"] or "{}")
    except (ValueError, RecursionError):  # the template is given an empty object
        arguments = {}
    except (TypeError, KeyError):
        raise Refused("unusual_message") from None
    name = [*arguments][-1] if isinstance(arguments, dict) and arguments else "argument"
    function = {**last["function"], "arguments": json.dumps({name: _ANSWER})}
    calls = [*turn.calls[:-1], {**last, "function": function}]
    return {**message, "role": "assistant", "tool_calls": calls}


def _check_order(format: ChatFormat, turn: Turn) -> None:
    words: list[str] = []
    new = [_marked(message, _LATER, words) for message in turn.new]
    messages = [*_earlier(turn), _stand_in(turn), *new]
    text = _render(format, turn, messages, generation_prompt=True)
    after = _behind(text, bool(turn.calls))
    places = [after.find(word) for word in words]
    if (
        -1 in places
        or places != sorted(places)
        or any(text.count(word) != 1 for word in words)
        or _EARLIER in after
    ):
        raise Refused("messages_moved")


def _check_end(format: ChatFormat, turn: Turn, head: str, stop: str) -> str:
    earlier = _earlier(turn)
    alone = _render(format, turn, [*earlier, _stand_in(turn)], generation_prompt=False)
    end = _behind(alone, bool(turn.calls))
    # Some templates end an answer by what opens the next message: alone, it has no end.
    closers = head.removesuffix(stop)
    if not end.startswith(head) and end != closers:
        raise Refused("end_moves")
    if not turn.calls:
        return ""
    other = _render(format, turn, [*earlier, _other_call(turn)], generation_prompt=False)
    rest = end[len(closers) :]
    common = _shared(end[::-1], other.rpartition(_ANSWER)[2][::-1])[::-1]
    if _ANSWER not in other or not common.endswith(rest):
        return closers
    return common.removesuffix(rest).lstrip(_PUNCTUATION)


def _other_call(turn: Turn) -> Message:
    """Returns the answer with another last call: another name and id, no arguments."""
    last = turn.calls[-1]
    function = {"name": _ANSWER, "arguments": "{}"}
    calls = [*turn.calls[:-1], {**last, "id": "B" * len(last["id"]), "function": function}]
    return {**_stand_in(turn), "tool_calls": calls}


def _find_opener(format: ChatFormat, turn: Turn) -> str:
    question = {"role": "user", "content": "x"}
    function = {"name": _ANSWER, "arguments": "{}"}
    call = {"id": "B" * 9, "type": "function", "function": function}
    said = {"role": "assistant", "content": _ANSWER}
    called = {"role": "assistant", "content": None, "tool_calls": [call]}
    try:
        texts = [
            _render(format, turn, [question, message], generation_prompt=False)
            for message in (said, called)
        ]
    except Refused:
        return ""
    if _ANSWER not in texts[1]:
        return ""
    opener = texts[1].partition(_ANSWER)[0][len(_shared(*texts)) :].strip()
    marker = format.vocabulary.find_added(opener)
    if marker is not None and marker.start() == 0:
        return without_space(marker.group())
    opener = opener.partition("{")[0] or opener
    return without_space(opener) if any(map(str.isalnum, opener)) else ""


def _shared(one: str, other: str) -> str:
    """Returns the common prefix."""
    pairs = enumerate(zip(one, other, strict=False))
    return one[: next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))]


def without_space(text: str) -> str:
    """Returns `text` without whitespace."""
    return "".join(text.split())


def _earlier(turn: Turn) -> list[Message]:
    """Returns the history with a marker word in place of each message's text."""
    words: list[str] = []
    return [
        _marked(message, _EARLIER, words) if message.get("content") else message
        for message in turn.history
    ]


def _marked(message: Message, word: str, words: list[str]) -> Message:
    """Returns `message` with a new marker word for each of its texts, added to `words`."""

    def next_word() -> str:
        words.append(f"{word}{9_999_999 - len(words)}k")
        return words[-1]

    content = message.get("content")
    marked = dict(message)
    for reasoning in ("reasoning", "reasoning_content"):
        if isinstance(message.get(reasoning), str):
            marked[reasoning] = f"{word}0k"
    if isinstance(content, list):
        marked["content"] = [
            {**part, "text": next_word()} if isinstance(part, dict) and "text" in part else part
            for part in content
        ]
    elif content is not None:
        marked["content"] = next_word()
    return marked


def _key(turn: Turn, head: str) -> bytes:
    """Returns a digest of everything that the checks depend on."""
    asked = [_role(message) for message in turn.history]
    given = [_role(message) for message in turn.new]
    names = sorted(turn.assistant)
    said = (_role(turn.assistant), bool(turn.assistant.get("content")), names)
    variables = json.dumps(dict(turn.kwargs), sort_keys=True, default=repr) if turn.kwargs else ""
    shape = repr((asked, said, given, bool(turn.tools), variables, head))
    return hashlib.blake2b(shape.encode(errors="surrogatepass"), digest_size=16).digest()


def _role(message: Message) -> tuple[Any, ...]:
    content = message.get("content")
    kinds = tuple(map(is_image, content)) if isinstance(content, list) else content is None
    return (message.get("role"), kinds, len(message.get("tool_calls") or ()))
