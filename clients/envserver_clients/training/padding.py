"""Puts examples into padded arrays, a few rows at a time.

In: examples of any lengths. Out: micro-batches of rows of similar length. What always holds: every
example is in exactly one micro-batch, and padding is never trained.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from envserver_records.images import RowImage
from numpy.typing import NDArray

from .examples import Example


@dataclass(frozen=True)
class Padded:
    """B rows, padded on the right to the longest, T; targets are tokens 1..T.

    Args:
        tokens: int64[B, T].
        attention: int64[B, T], 0 in the padding.
        mask: float32[B, T-1], 1 where the target is trained.
        logprobs: float32[B, T-1], those of the targets where mask is 1, else 0.
        fresh: uint8[B, T-1], 1 where the learning policy's own version sampled the target.
        temperatures: float32[B, T-1], at which the target was sampled, else 1.
        raw: uint8[B, T-1], 1 where the target's logprob is from before the temperature.
        weights: float32[B].
        advantages: float32[B], or float32[B, T-1] if turns have their own.
        first: index of the first trained target in any row; earlier ones need no logits.
        places: int64[B, 2], the line that each row is computed in and where it starts there, if
            several short rows share a line; None: each row has its own.
        images: those of each row, in the order of their tokens.
        filler: nothing is learned from it, and it is not counted.
        experts: int16[B, T, layers, experts per token], -1: unknown; None: no row has any.
    """

    tokens: NDArray[np.int64]
    attention: NDArray[np.int64]
    mask: NDArray[np.float32]
    logprobs: NDArray[np.float32]
    fresh: NDArray[np.uint8]
    temperatures: NDArray[np.float32]
    raw: NDArray[np.uint8]
    advantages: NDArray[np.float32]
    weights: NDArray[np.float32]
    first: int
    places: NDArray[np.int64] | None = None
    images: Sequence[Sequence[RowImage]] = ()
    filler: bool = False
    experts: NDArray[np.int16] | None = None


def micro_batches(
    examples: Sequence[Example],
    most_tokens: int,
    *,
    packed: bool = False,
    blank: Example | None = None,
) -> Iterator[Padded]:
    """Yields the examples, longest first, in parts of at most `most_tokens` tokens with padding.

    A longer example is alone. With the longest first, a lack of memory shows at once.

    Args:
        packed: short examples share lines that are as long as the longest example of the part.
        blank: added to parts without an image, so that every part has one.
    """
    part: list[Example] = []
    places: list[tuple[int, int]] = []
    used: list[int] = []  # tokens in each line
    for example in longest_first(examples):
        own, longest = len(example.tokens), len(part[0].tokens) if part else 0
        fitting = (at for at, tokens in enumerate(used) if tokens + own <= longest)
        line = next(fitting, None) if packed else None
        if line is None:
            if part and longest * (len(used) + 1) > most_tokens:
                yield padded(_with(blank, part), places if packed else None)
                part, places, used = [], [], []
            line = len(used)
            used.append(0)
        part.append(example)
        places.append((line, used[line]))
        used[line] += own
    if part:
        yield padded(_with(blank, part), places if packed else None)


def _with(blank: Example | None, part: list[Example]) -> list[Example]:
    return part if blank is None or any(one.images for one in part) else [*part, blank]


def longest_first(examples: Sequence[Example]) -> list[Example]:
    """Returns the examples by falling length; the order of equal ones is kept."""
    return sorted(examples, key=lambda one: -len(one.tokens))


def filler(blank: Example | None = None) -> Padded:
    """Returns a micro-batch of weight 0, for a rank that has fewer of them than others.

    Args:
        blank: see `micro_batches`.
    """
    logprobs, mask = np.zeros(2, np.float32), np.array([0, 1], np.uint8)
    row = Example(np.zeros(2, np.int32), mask, logprobs, advantage=0.0, weight=0.0)
    return replace(padded(_with(blank, [row])), filler=True)


def padded(examples: Sequence[Example], places: Sequence[tuple[int, int]] | None = None) -> Padded:
    """Returns these examples (at least one) as one micro-batch; see `Padded.places`."""
    shape = (len(examples), max(len(example.tokens) for example in examples))
    tokens, attention = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    mask, logprobs = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
    fresh, raw = np.zeros(shape, np.uint8), np.zeros(shape, np.uint8)
    temperatures = np.ones(shape, np.float32)
    for row, example in enumerate(examples):
        length = len(example.tokens)
        tokens[row, :length] = example.tokens
        attention[row, :length] = 1
        mask[row, :length] = example.mask
        logprobs[row, :length] = np.where(example.mask, example.logprobs, 0.0)
        if example.fresh is not None:
            fresh[row, :length] = example.fresh
        if example.temperatures is not None:
            temperatures[row, :length] = example.temperatures
        if example.raw is not None:
            raw[row, :length] = example.raw
    trained = np.flatnonzero(mask[:, 1:].any(axis=0))
    return Padded(
        tokens=tokens,
        attention=attention,
        mask=mask[:, 1:],
        logprobs=logprobs[:, 1:],
        fresh=fresh[:, 1:],
        temperatures=temperatures[:, 1:],
        raw=raw[:, 1:],
        advantages=_advantages(examples, shape),
        weights=np.array([example.weight for example in examples], np.float32),
        first=int(trained[0]) if trained.size else 0,
        places=None if places is None else np.array(places, np.int64),
        experts=_experts(examples, shape),
        images=[example.images for example in examples],
    )


def _experts(examples: Sequence[Example], shape: tuple[int, int]) -> NDArray[np.int16] | None:
    tables = [example.experts for example in examples]
    if (known := next((table for table in tables if table is not None), None)) is None:
        return None
    found = np.full((*shape, *known.shape[1:]), -1, np.int16)
    for row, table in enumerate(tables):
        if table is not None:
            found[row, : len(table)] = table
    return found


def _advantages(examples: Sequence[Example], shape: tuple[int, int]) -> NDArray[np.float32]:
    if all(example.token_advantages is None for example in examples):
        return np.array([example.advantage for example in examples], np.float32)
    found = np.zeros(shape, np.float32)
    for row, example in enumerate(examples):
        own = example.token_advantages
        found[row, : len(example.tokens)] = example.advantage if own is None else own
    return found[:, 1:]
