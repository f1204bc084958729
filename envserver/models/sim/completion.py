"""Finds where an answer ends, and its tokens and logprobs.

Follows vLLM: a stop string cuts the text, but all sampled tokens stay, including the one that
completed the stop string; the end-of-turn token and stop tokens have no text.
"""

from __future__ import annotations

from bisect import bisect_left

import msgspec

from .tokenizer import Prompt, SimTokenizer


class Ending(msgspec.Struct, frozen=True, kw_only=True):
    """Conditions that end an answer early.

    Args:
        max_tokens: at least 1.
        stops: stop strings, none empty.
        stop_token_ids: ids that end the answer.
        keep_stop: whether the text keeps the stop string or the stop token.
    """

    max_tokens: int
    stops: list[str] = []
    stop_token_ids: frozenset[int] = frozenset()
    keep_stop: bool = False


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """One answer. `finish` is "stop" or "length"; `stop_reason` the stop string or token id."""

    text: str
    ids: list[int]
    logprobs: list[float]
    finish: str
    stop_reason: int | str | None
    key: str


def completed(
    tokenizer: SimTokenizer, prompt: Prompt, sampled: list[int], ending: Ending, key: str
) -> Completion:
    """Returns the answer `sampled` after `prompt`, up to what ends it first.

    If the ids do not end with the end-of-turn token, they were cut off already.
    """
    ids, finish, reason = _cut(sampled, ending, tokenizer.im_end)
    silent = reason is not None and not ending.keep_stop
    text, ends = tokenizer.offsets(ids[:-1] if silent else ids)
    stop = first_stop(text, ending.stops)
    if stop is not None:
        start, end, stop_string = stop
        ids, finish, reason = ids[: bisect_left(ends, end) + 1], "stop", stop_string
        text = text[: end if ending.keep_stop else start]
    logprobs = tokenizer.logits.score(prompt.fold, len(prompt.ids), ids).tolist()
    return Completion(
        text=text, ids=ids, logprobs=logprobs, finish=finish, stop_reason=reason, key=key
    )


def _cut(ids: list[int], ending: Ending, im_end: int) -> tuple[list[int], str, int | str | None]:
    """Returns the ids up to a stop token or the limit, how they end, and the stop token."""
    for place, index in enumerate(ids[: ending.max_tokens] if ending.stop_token_ids else ()):
        if index in ending.stop_token_ids and index != im_end:
            return ids[: place + 1], "stop", index
    ids = ids[: ending.max_tokens]
    return ids, "stop" if ids[-1] == im_end else "length", None


def first_stop(text: str, stops: list[str]) -> tuple[int, int, str] | None:
    """Returns start, end and text of the stop string completed first; ties: the first listed."""
    found = [(text.find(stop), stop) for stop in stops]
    spans = [(start, start + len(stop), stop) for start, stop in found if start >= 0]
    return min(spans, key=lambda span: span[1], default=None)
