"""Compares what a model has in its context with the template's current rendering of the messages.

A conversation that is continued token by token alternates between contexts (written by the
template) and turns (sampled). Every context must occur in the new rendering, in order, from its
beginning to its end; what is between two of them is how the template shows the turn. Differences
are classified by text only: no template's syntax is known here except for the usual tags around
reasoning.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

from envserver_records.records import Message

Change = Literal["exact", "appended", "whitespace", "calls", "edited"]
"""exact: no visible change; appended: text was added after the content; whitespace: runs of
whitespace differ, or whitespace at the ends; calls: the same tool calls in another format (order of
keys, ids); edited: anything else."""

TEXT_PARTS = ("text", "input_text", "output_text")
"""Types of content parts that are plain text."""


class AnswerContent(NamedTuple):
    """What is compared of an assistant message; `calls`: (id, name, arguments as compact JSON)."""

    content: str
    calls: tuple[tuple[str, str, str], ...]


class Replay(NamedTuple):
    change: Change
    extra: str = ""


def change_of(was: AnswerContent, now: AnswerContent, *, ended: bool, tail: str) -> Replay:
    """Classifies the change from the answer `was` to `now`, as the agent sent it back.

    `ended`: the model ended its turn with an end token, after which nothing can be appended;
    `tail`: what was sampled beyond the content: the stop string and the rest of its last token.
    """
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
    calls = message.get("tool_calls")
    return AnswerContent(
        text_of(message.get("content")),
        tuple(_call_of(call) for call in calls) if isinstance(calls, list) else (),
    )


def content_key(answer: AnswerContent) -> Hashable:
    """Returns a key that is equal for answers that differ only in whitespace or calls' format."""
    return " ".join(answer.content.split()), tuple(_meaning(answer))


def text_of(content: Any) -> str:
    """Returns a content's text: parts joined by newlines as engines do, other parts as JSON."""
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


canonical = json.JSONEncoder(separators=(",", ":")).encode
"""Returns compact ASCII JSON. The order of keys is kept, since templates show it."""


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


def _same_words(text: str, other: str) -> bool:
    return text.split() == other.split()


def _appended(was: str, now: str, tail: str) -> Replay:
    """Returns the text after content and tail; an agent may have put back only the stop string."""
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
    """Returns where in `text` the words of `prefix`, and whitespace after them, end, or None."""
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


Difference = Literal["whitespace", "calls", "think", "lossy_detok", "other"]
"""whitespace: runs of whitespace differ; calls: tool calls are formatted differently; think: only
one side has the reasoning; lossy_detok: the tokens hold what their text cannot show; other:
anything else."""

UNREADABLE = "\ufffd"
"""The replacement character, to which invalid UTF-8 is decoded."""
THINK_TAGS = (
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("<reasoning>", "</reasoning>"),
    ("<seed:think>", "</seed:think>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|channel>thought", "<channel|>"),
)
"""Tags around reasoning, for engines that do not separate it from the answer."""


class Segment(NamedTuple):
    """One call's addition to a conversation: context and a sampled turn.

    Args:
        context: text from the end of the previous turn (or the beginning) to the answer.
        sampled: the completion's text, special tokens included.
        specials: special tokens that were sampled inside the answer.
        tail: what was sampled beyond the answer's content, see `change_of`.
    """

    context: str
    sampled: str
    answer: AnswerContent
    reasoning: str = ""
    specials: tuple[str, ...] = ()
    tail: str = ""


def compare(
    segments: Sequence[Segment], suffix: str, shown: str, head: Callable[[], str]
) -> list[set[Difference]]:
    """Returns the differences in each of `segments`, up to the first with "other".

    Args:
        segments: of one conversation, from its beginning.
        suffix: the context after the last segment.
        shown: the template's rendering of the whole conversation.
        head: returns the generation prompt, with which contexts end. A later rendering may change
            it together with its turn, as with a think block.
    """
    if shown == "".join(segment.context + segment.sampled for segment in segments) + suffix:
        return [set() for _ in segments]
    found = list(_compare_each(segments, suffix, shown, ""))
    if "other" in found[-1]:
        found = list(_compare_each(segments, suffix, shown, head()))
    return found


def _compare_each(
    segments: Sequence[Segment], suffix: str, shown: str, head: str
) -> Iterator[set[Difference]]:
    contexts = [segment.context.removesuffix(head) for segment in segments]
    if not shown.startswith(contexts[0]):
        yield {"other"}
        return
    at = len(contexts[0])
    for number, segment in enumerate(segments):
        begins = segment.context[len(contexts[number]) :]
        last = number + 1 == len(segments)
        following = suffix if last else contexts[number + 1]
        end = _end(shown, at, begins + segment.sampled, following, last)
        if end is None:
            yield {"other"}
            return
        differences = _differences(segment, begins, shown[at:end])
        yield differences
        if "other" in differences:
            return
        at = end + len(following)


def _end(shown: str, at: int, turn: str, following: str, last: bool) -> int | None:
    """Returns where the turn that begins at `at` ends; None: its following context is missing."""
    if last:
        end = len(shown) - len(following)
        return end if end >= at and shown.endswith(following) else None
    if shown.startswith(turn, at) and shown.startswith(following, at + len(turn)):
        return at + len(turn)
    end = shown.find(following, at)
    return end if end >= 0 else None


def _differences(segment: Segment, begins: str, shown: str) -> set[Difference]:
    """Returns how `shown` differs from what was sampled after `begins`."""
    sampled = begins + segment.sampled
    if sampled == shown:
        return set()
    if _pressed(sampled) == _pressed(shown):
        return {"whitespace"}
    block, empty = _think_block(sampled, segment.reasoning, len(begins)), _empty_block(shown)
    silent, plain = _cut(sampled, block), _cut(shown, empty)
    if _pressed(silent) == _pressed(plain):
        return {"think"}
    if _same_sayable(sampled, shown, segment):
        return {"lossy_detok"}
    if _same_sayable(silent, plain, segment):
        return {"think", "lossy_detok"}
    if segment.answer.calls and _shows(shown, segment.answer):
        return {"calls", "think"} if _thinks_otherwise(shown, block, empty) else {"calls"}
    return {"other"}


def _pressed(text: str) -> str:
    return "".join(text.split())


def _same_sayable(sampled: str, shown: str, segment: Segment) -> bool:
    """Whether texts differ only in what the answer could not contain, and in its tail."""
    for piece in (*segment.specials, UNREADABLE):
        sampled, shown = sampled.replace(piece, ""), shown.replace(piece, "")
    sampled, shown, tail = _pressed(sampled), _pressed(shown), _pressed(segment.tail)
    return sampled.startswith(shown) and shown.startswith(sampled.removesuffix(tail))


def _thinks_otherwise(shown: str, block: _Block | None, empty: _Block | None) -> bool:
    if block is None or not block.inner:
        return (block is None) != (empty is None)
    return _pressed(block.inner) not in _pressed(shown)


class _Block(NamedTuple):
    """Reasoning in a text: [start, end) includes its tags, `inner` does not."""

    start: int
    end: int
    inner: str


def _think_block(text: str, reasoning: str, begin: int) -> _Block | None:
    """Without an opening tag, reasoning starts at `begin`; without a closing one, it has no end."""
    for opening, closing in THINK_TAGS:
        first, last = text.find(opening), text.rfind(closing)
        if first < 0 and last < 0:
            continue
        start = first if first >= 0 and (last < 0 or first < last) else begin
        stop, end = (last, last + len(closing)) if last >= 0 else (len(text), len(text))
        return _Block(start, end, text[start:stop].removeprefix(opening).strip())
    reasoning = reasoning.strip()
    start = text.find(reasoning, begin) if reasoning else -1
    return _Block(start, start + len(reasoning), reasoning) if start >= 0 else None


def _empty_block(text: str) -> _Block | None:
    for opening, closing in THINK_TAGS:
        start = text.find(opening)
        end = text.find(closing, start)
        if start >= 0 and end >= 0 and not text[start + len(opening) : end].strip():
            return _Block(start, end + len(closing), "")
    return None


def _cut(text: str, block: _Block | None) -> str:
    return text if block is None else text[: block.start] + text[block.end :]


def _shows(shown: str, answer: AnswerContent) -> bool:
    """Returns whether `shown` has the content and each call's name and arguments, in any format."""
    pressed = _pressed(shown)
    content = _cut(answer.content, _think_block(answer.content, "", 0))
    said = [[content], *([name] for _, name, _ in answer.calls)]
    said += [forms for _, _, arguments in answer.calls for forms in _leaves(arguments)]
    return all(any(_pressed(form) in pressed for form in forms) for forms in said)


def _leaves(arguments: str) -> Iterator[list[str]]:
    """Yields the possible spellings of each key and scalar in a call's arguments."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        yield [arguments]
        return
    stack = [value]
    while stack:
        value = stack.pop()
        if isinstance(value, dict):
            stack += [*value, *value.values()]
        elif isinstance(value, list):
            stack += value
        else:
            yield _forms(value)


def _forms(value: Any) -> list[str]:
    written = [json.dumps(value, ensure_ascii=False), json.dumps(value)]
    if isinstance(value, str):
        return [value, *(form[1:-1] for form in written)]
    return [str(value), *written]
