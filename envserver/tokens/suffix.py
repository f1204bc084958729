"""Computes what follows a sampled answer in the next call's prompt, leaving the answer as it is.

The template says what it writes after the answer (see `tail`). The model has sampled the beginning
of the tail, up to its end-of-turn token, or was cut off before it; the rest is the suffix. Only the
tail is encoded, from the end-of-turn token on: text before that token never affects what follows
it. Where the whole rendering begins with the recorded text, that proves the rest; else anything
uncertain is refused: templates that move, drop, repeat or change messages, answers whose end is not
where the template has it, calls that were cut off.
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
from .prepare import Refused

# A conversation's shape is its roles, calls and tools without their text. Whether a template keeps
# messages whole and in order depends only on the shape, so it is checked once for each shape and
# remembered on the format.

# Mixed case, letters and digits: no template splits them, and one that changes case is detected.
# Descending: a template that sorts is detected, too.
_ANSWER = "zQ7answer4Kx"
_LATER = "yQ7later"
_EARLIER = "xQ7earlier"

_PUNCTUATION = " \t\r\n\"'`,:>)]}"
"""Text that may end a value or an argument list rather than a call."""


class Turn(NamedTuple):
    """An answer in its conversation: the messages before it, and those that came after it."""

    history: list[Message]
    assistant: Message
    new: list[Message]
    tools: list[dict[str, Any]] | None
    kwargs: Mapping[str, Any]

    @property
    def calls(self) -> list[dict[str, Any]]:
        calls = self.assistant.get("tool_calls") or []
        if not isinstance(calls, list):
            raise Refused("unusual_message")
        return calls


def tail(format: ChatFormat, turn: Turn) -> str:
    """Returns what the template writes after the content, or an argument of the last call."""
    messages = [*turn.history, _stand_in(turn), *turn.new]
    return _behind(_render(format, turn, messages, generation_prompt=True), bool(turn.calls))


def check(format: ChatFormat, turn: Turn, head: str, stop: str) -> str:
    """Checks that the template keeps messages after the answer in order and ends it with `head`.

    `head`: beginning of the tail, with the first `stop`, the text of the token that ends the
    answer. Returns what every call ends with before `stop`, whatever its arguments; empty without
    calls.
    """
    key = _key(turn, head)
    found = format.shapes.get(key)
    if found is None:
        _check_order(format, turn)
        found = _check_end(format, turn, head, stop)
        format.remember(key, found)
    return found


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


def _shared(text: str, other: str) -> str:
    pairs = enumerate(zip(text, other, strict=False))
    return text[: next((at for at, (a, b) in pairs if a != b), min(len(text), len(other)))]


def without_space(text: str) -> str:
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
    roles = [_role(message) for message in turn.history]
    given = [_role(message) for message in turn.new]
    names = sorted(turn.assistant)
    said = (_role(turn.assistant), bool(turn.assistant.get("content")), names)
    variables = json.dumps(dict(turn.kwargs), sort_keys=True, default=repr) if turn.kwargs else ""
    shape = repr((roles, said, given, bool(turn.tools), variables, head))
    return hashlib.blake2b(shape.encode(errors="surrogatepass"), digest_size=16).digest()


def _role(message: Message) -> tuple[Any, ...]:
    content = message.get("content")
    kinds = tuple(map(is_image, content)) if isinstance(content, list) else content is None
    return (message.get("role"), kinds, len(message.get("tool_calls") or ()))


class Completion(NamedTuple):
    ids: list[int]
    finish_reason: str
    stop_reason: int | str | None


class Suffix(NamedTuple):
    """The tokens after the completion; all of them are context.

    `closing`: the part at the beginning of `text` that belongs to the answer although the model did
    not sample it: what the agent appended and, if it was cut off, the template's end of the turn.
    """

    text: str
    ids: list[int]
    closing: str


def suffix(
    format: ChatFormat,
    turn: Turn,
    completion: Completion,
    extra: str = "",
    shown: str | None = None,
) -> Suffix:
    """Returns the suffix: parent.prompt + completion + suffix is the prompt of the next call.

    Args:
        turn: `tools` and `kwargs` are the same for the call and the next one.
        extra: text that the agent appended to the answer.
        shown: what the template renders after the completion, if its rendering of all messages
            begins with the prompt and the completion word for word, which proves the suffix; None:
            it is found out.
    """
    if not turn.new or any(message.get("role") == "assistant" for message in turn.new):
        raise Refused("answer_not_sampled")
    if turn.kwargs.get("add_generation_prompt") is False:
        raise Refused("no_generation_prompt")
    stop = _stop_token(format, completion)
    if stop is None:
        return _after_cut(format, turn, completion.ids, extra)
    if extra:
        raise Refused("extra_after_end")
    return _after_end(format, turn, completion.ids, stop, shown)


def _stop_token(format: ChatFormat, completion: Completion) -> int | None:
    """Returns the sampled token that ended the turn, or None if the answer was cut off."""
    ids, finish, reason = completion
    if not ids:
        raise Refused("nothing_sampled")
    if finish not in ("stop", "tool_calls", "length"):
        raise Refused("end_unknown")
    last = ids[-1]
    known, special = last in format.stop_ids, format.vocabulary.is_special(last)
    if finish == "length":
        if known:  # the engine had to go on after it
            raise Refused("end_unknown")
        return None
    if isinstance(reason, str):
        return last if known else None
    if isinstance(reason, int):
        if last != reason:
            raise Refused("end_unknown")
        return last if known or special else None
    # An answer with calls ends by `tool_calls` even if it was cut off.
    if not known and finish == "stop" and not special:
        raise Refused("end_unknown")
    return last if known or finish == "stop" else None


def _after_end(
    format: ChatFormat, turn: Turn, ids: list[int], stop: int, shown: str | None
) -> Suffix:
    vocabulary = format.vocabulary
    text = vocabulary.added_text(stop)
    if text is None or not vocabulary.stands_alone(stop):
        raise Refused("no_boundary")
    following = _following(format, turn, ids, text) if shown is None else shown
    rest = format.encode(text + following)
    if rest[:1] != [stop]:
        raise Refused("no_boundary")
    return Suffix(following, rest[1:], "")


def _following(format: ChatFormat, turn: Turn, ids: list[int], stop: str) -> str:
    """Returns what the template writes after `stop`, whose tail the model must have sampled."""
    closers, found, following = tail(format, turn).partition(stop)
    if not found:
        raise Refused("stop_not_rendered")
    call_end = check(format, turn, closers + stop, stop)
    said = format.decode(ids[-len(closers.encode()) - 9 : -1])
    if turn.calls:
        if not without_space(said).endswith(without_space(call_end)):
            raise Refused("call_end")
    elif not said.endswith(closers):
        raise Refused("closer_not_sampled")
    return following


def _after_cut(format: ChatFormat, turn: Turn, ids: list[int], extra: str) -> Suffix:
    """Returns the suffix of an answer cut by length or a stop string: the template ends it."""
    if turn.calls or _in_call(format, turn, ids):
        raise Refused("truncated_in_call")
    vocabulary = format.vocabulary
    behind = tail(format, turn)
    boundary = vocabulary.find_added(behind)
    if boundary is None:
        raise Refused("no_boundary")
    stop = vocabulary.special_id(boundary.group())
    if stop is None or not vocabulary.stands_alone(stop):
        raise Refused("no_boundary")
    check(format, turn, behind[: boundary.end()], boundary.group())
    missing = extra + behind[: boundary.start()]
    rest = format.encode(behind[boundary.start() :])
    if rest[:1] != [stop]:
        raise Refused("no_boundary")
    between = _continue(format, ids, missing) if missing else []
    return Suffix(extra + behind, between + rest, missing + boundary.group())


def _in_call(format: ChatFormat, turn: Turn, ids: list[int]) -> bool:
    opener = call_opener(format, turn) if turn.tools else ""
    return bool(opener) and opener in without_space(format.decode(ids))


def _continue(format: ChatFormat, ids: list[int], text: str) -> list[int]:
    """Returns ids that append `text` to `ids`, which were sampled and stay as they are."""
    near = ids[-16:]
    said = format.decode(near)
    for stem in ("", "x", "."):  # SentencePiece puts a space before what begins a text
        before, both = format.encode(stem), format.encode(stem + text)
        added = both[len(before) :]
        if both == before + added and format.decode(near + added) == said + text:
            return added
    raise Refused("extra_not_encodable")
