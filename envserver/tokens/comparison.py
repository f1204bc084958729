"""What a model has in its context against what the chat template shows for the same messages now.

A conversation that is continued token by token is, as text, contexts (put there by the template)
and turns (sampled) by turns. Every context must stand in the new rendering, in order, from its
beginning to its end; what stands between two of them is how the template shows the turn there.
Where that differs from what was sampled the difference gets names. Texts only: no template's syntax
is known here but for the usual tags around reasoning.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

from .edits import AnswerContent

Difference = Literal["whitespace", "calls", "think", "lossy_detok", "other"]
"""whitespace: its runs; calls: the tool calls are written otherwise; think: reasoning is there on
one side only; lossy_detok: the sampled tokens say what their text cannot; other: anything else."""

UNREADABLE = "\ufffd"
"""What bytes that are no text are decoded to."""
THINK_TAGS = (
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("<reasoning>", "</reasoning>"),
    ("<seed:think>", "</seed:think>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|channel>thought", "<channel|>"),
)
"""What models put around reasoning, for where the engine does not tell it from the answer."""


class Segment(NamedTuple):
    """What one call added to a context.

    Args:
        context: text from the end of the turn before (or from the beginning) to the answer.
        sampled: the completion's text, special tokens included.
        answer: as the agent got it.
        reasoning: as the engine told it apart.
        specials: special tokens that were sampled inside the answer.
        tail: what was sampled beyond the answer's content, see `edits.classify`.
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
    """The differences in each of `stretches`, up to the first that has "other"; empty sets: none.

    Args:
        stretches: of one conversation, from its beginning.
        suffix: the context that follows the last of them, up to its end.
        shown: the template's rendering of the whole.
        head: gives the generation prompt, with which a context ends. In later renderings it may be
            changed together with the turn that it opens, as by a think block in it.
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
    """Where the turn that begins at `at` ends, None if what follows it is not there."""
    if last:
        end = len(shown) - len(following)
        return end if end >= at and shown.endswith(following) else None
    if shown.startswith(turn, at) and shown.startswith(following, at + len(turn)):
        return at + len(turn)
    end = shown.find(following, at)
    return end if end >= 0 else None


def _differences(segment: Segment, begins: str, shown: str) -> set[Difference]:
    """How `shown` differs from what was sampled behind `begins`."""
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
    """They differ in nothing but what the returned answer could not say: broken UTF-8, special
    tokens, and what was sampled beyond the content, or the end of that."""
    for piece in (*segment.specials, UNREADABLE):
        sampled, shown = sampled.replace(piece, ""), shown.replace(piece, "")
    sampled, shown, tail = _pressed(sampled), _pressed(shown), _pressed(segment.tail)
    return sampled.startswith(shown) and shown.startswith(sampled.removesuffix(tail))


def _thinks_otherwise(shown: str, block: _Block | None, empty: _Block | None) -> bool:
    """Reasoning, or tags for it, are in one of the two only."""
    if block is None or not block.inner:
        return (block is None) != (empty is None)
    return _pressed(block.inner) not in _pressed(shown)


class _Block(NamedTuple):
    """Reasoning in a text, [start, end) with its tags; `inner` without them."""

    start: int
    end: int
    inner: str


def _think_block(text: str, reasoning: str, begin: int) -> _Block | None:
    """The reasoning of a turn.

    A turn whose opening tag is missing thinks from `begin`, one whose closing tag is to its end.
    """
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
    """Tags with nothing between them."""
    for opening, closing in THINK_TAGS:
        start = text.find(opening)
        end = text.find(closing, start)
        if start >= 0 and end >= 0 and not text[start + len(opening) : end].strip():
            return _Block(start, end + len(closing), "")
    return None


def _cut(text: str, block: _Block | None) -> str:
    return text if block is None else text[: block.start] + text[block.end :]


def _shows(shown: str, answer: AnswerContent) -> bool:
    """`shown` has the answer's content and each call's name and arguments, in whatever form."""
    pressed = _pressed(shown)
    content = _cut(answer.content, _think_block(answer.content, "", 0))
    said = [[content], *([name] for _, name, _ in answer.calls)]
    said += [forms for _, _, arguments in answer.calls for forms in _leaves(arguments)]
    return all(any(_pressed(form) in pressed for form in forms) for forms in said)


def _leaves(arguments: str) -> Iterator[list[str]]:
    """For each key and plain value in a call's arguments the ways in which it may be written."""
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
