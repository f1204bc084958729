"""Computes what follows a sampled answer in the prompt of the next call, leaving the answer as it
is.

The template says what it writes after the answer (the tail, see `shape`). The model has sampled the
beginning of the tail, up to its end-of-turn token, or was cut off before it; the rest is the
suffix.
Only the tail is encoded, from the end-of-turn token on: text before that token never affects what
follows it.

Anything uncertain is refused: templates that move, drop, repeat or change messages, answers whose
end is not where the template has it, calls that were cut off.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from envserver_records.records import Message

from .chat_format import ChatFormat
from .refusal import Refused
from .shape import Turn, call_opener, check, known_end, tail, without_space


class Completion(NamedTuple):
    """An engine's sample, as recorded: see `records.Call`."""

    ids: list[int]
    finish_reason: str
    stop_reason: int | str | None


class Suffix(NamedTuple):
    """The tokens after the completion; all of them are context.

    `text` and `ids` hold all of it. `closing` is the part at the beginning of `text` that belongs
    to the
    answer although the model did not sample it: what the agent appended and, if the answer was cut
        off,
    the template's end of the turn.
    """

    text: str
    ids: list[int]
    closing: str


def suffix(
    format: ChatFormat,
    *,
    history: list[Message],
    assistant: Message,
    new: list[Message],
    tools: list[dict[str, Any]] | None,
    kwargs: Mapping[str, Any],
    completion: Completion,
    extra: str = "",
    shown: str | None = None,
) -> Suffix:
    """Returns the suffix: parent.prompt + completion + suffix is the prompt of the next call.

    Args:
        format: the model's.
        history: the messages of the call that sampled the completion.
        assistant: the message that it gave.
        new: the messages that the agent added after it; not empty, without assistant messages.
        tools, kwargs: the same for the call and the next one.
        completion: what was sampled.
        extra: text that the agent appended to the answer.
        shown: what the template renders after the completion, if its rendering of all messages
            begins with the prompt and the completion word for word; None: it is found out.

    Raises:
        Refused: exactness cannot be shown; the reason is one word.
    """
    if not new or any(message.get("role") == "assistant" for message in new):
        raise Refused("answer_not_sampled")
    if kwargs.get("add_generation_prompt") is False:
        raise Refused("no_generation_prompt")
    turn = Turn(history, assistant, new, tools, kwargs)
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
        if known:  # the engine was told to go on after it
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
    """Returns the suffix of an answer that the model ended with `stop`."""
    vocabulary = format.vocabulary
    text = vocabulary.added_text(stop)
    if text is None or not vocabulary.stands_alone(stop):
        raise Refused("no_boundary")
    known = None if shown is None else known_end(format, turn, text)
    if known is None:
        closers, found, shown = tail(format, turn).partition(text)
        if not found:
            raise Refused("stop_not_rendered")
        call_end = check(format, turn, closers + text, text)
    else:
        closers, call_end = known
    if turn.calls:
        said = without_space(format.decode(ids[-len(closers.encode()) - 9 : -1]))
        if not said.endswith(without_space(call_end)):
            raise Refused("call_end")
    elif closers and not format.decode(ids[-len(closers.encode()) - 9 : -1]).endswith(closers):
        raise Refused("closer_not_sampled")
    following = shown or ""
    rest = format.encode(text + following)
    if rest[:1] != [stop]:
        raise Refused("no_boundary")
    return Suffix(following, rest[1:], "")


def _after_cut(format: ChatFormat, turn: Turn, ids: list[int], extra: str) -> Suffix:
    """Returns the suffix of an answer that ended by length or a stop string: the template ends
    it."""
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
    """Returns whether the model had begun a tool call."""
    opener = call_opener(format, turn) if turn.tools else ""
    return bool(opener) and opener in without_space(format.decode(ids))


def _continue(format: ChatFormat, ids: list[int], text: str) -> list[int]:
    """Returns ids that append `text` to `ids`, whose own tokens were sampled and stay as they
    are."""
    near = ids[-16:]
    said = format.decode(near)
    for stem in ("", "x", "."):  # SentencePiece puts a space before what begins a text
        before, both = format.encode(stem), format.encode(stem + text)
        added = both[len(before) :]
        if both == before + added and format.decode(near + added) == said + text:
            return added
    raise Refused("extra_not_encodable")
