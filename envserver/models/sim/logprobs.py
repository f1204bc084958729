"""The log-probability of a token after a prefix, as a pure function of their ids.

In flow token ids, out flow float32 numbers in (-6, 0). What always holds: the number depends on the
ids before the token and on the token alone, so sampling and re-scoring give the same bits on every
machine and in pieces of any size (64-bit integers, then a table; no floating point of the CPU).

The numbers look like a confident model's (mean about -0.55) but are no distribution: over the whole
vocabulary they do not sum to one.

A prefix is known by its fold, the sum of mix(id) * BASE**position modulo 2**64. Folds add up, so
the fold of a prompt comes from the folds of its pieces without touching their tokens again.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from envserver_records.records import Logprobs
from numpy.typing import NDArray

_MASK = (1 << 64) - 1
_BASE = 0x9E3779B97F4A7C15
_BINS = 4096
_DRAWS = 16

U64 = NDArray[np.uint64]


def _mixed(values: U64) -> U64:
    """Scrambles 64-bit numbers bijectively (the finalizer of splitmix64)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: U64 = values ^ (values >> np.uint64(31))
    return mixed


def _table() -> Logprobs:
    """Returns log-probabilities at evenly spaced quantiles: mostly near zero, with a tail."""
    quantile = (np.arange(_BINS, dtype=np.float64) + 0.5) / _BINS
    return (-(0.001 + 3.0 * quantile**6 - 0.15 * np.log1p(-quantile))).astype(np.float32)


class Logits:
    """The logprob function, for ids below `vocabulary_size`, prefixes up to `max_length` tokens."""

    def __init__(self, vocabulary_size: int, max_length: int) -> None:
        self.vocabulary_size = vocabulary_size
        every = np.arange(1, vocabulary_size + 1, dtype=np.uint64)
        self._mix = _mixed(every * np.uint64(0xD6E8FEB86659FD93))
        self._salt = _mixed(every * np.uint64(0xA0761D6478BD642F))
        powers = np.full(max_length + 1, _BASE, dtype=np.uint64)
        powers[0] = 1
        self._powers = np.cumprod(powers, dtype=np.uint64)
        self._table = _table()

    def fold(self, ids: Sequence[int]) -> int:
        """Returns the fold of `ids` as a whole prefix."""
        tokens = np.asarray(ids, dtype=np.intp)
        return int((self._mix[tokens] * self._powers[: len(tokens)]).sum(dtype=np.uint64))

    def joined(self, fold: int, length: int, next_fold: int) -> int:
        """Returns the fold of `length` tokens with fold `fold`, followed by others with
        `next_fold`."""
        return (fold + int(self._powers[length]) * next_fold) & _MASK

    def score(self, fold: int, length: int, ids: Sequence[int]) -> Logprobs:
        """Returns logprobs `[len(ids)]` of `ids` after a prefix with this length and fold."""
        tokens = np.asarray(ids, dtype=np.intp)
        return self._look_up(self._before(fold, length, tokens), tokens)

    def alternatives(
        self, fold: int, length: int, ids: Sequence[int], count: int
    ) -> list[list[tuple[int, float]]]:
        """Returns per position up to `count` other tokens, all less likely than the actual one.

        Each has the logprob that `score` would give it there, the most likely first. They are drawn
        from the vocabulary by the prefix; more likely tokens are not listed.
        """
        tokens = np.asarray(ids, dtype=np.intp)
        before = self._before(fold, length, tokens)
        chosen = self._look_up(before, tokens)
        steps = np.arange(1, _DRAWS * count + 1, dtype=np.uint64) * np.uint64(_BASE)
        seeds = before[:, None] + steps[None, :]
        drawn = (_mixed(seeds) % np.uint64(self.vocabulary_size)).astype(np.intp)
        scores = self._look_up(before[:, None], drawn)
        rows = []
        for best, names, values in zip(
            chosen.tolist(), drawn.tolist(), scores.tolist(), strict=True
        ):
            lower = {name: value for name, value in zip(names, values, strict=True) if value < best}
            rows.append(sorted(lower.items(), key=lambda item: (-item[1], item[0]))[:count])
        return rows

    def _before(self, fold: int, length: int, tokens: NDArray[np.intp]) -> U64:
        steps = self._mix[tokens] * self._powers[length : length + len(tokens)]
        before: U64 = np.cumsum(steps, dtype=np.uint64) - steps + np.uint64(fold)
        return before

    def _look_up(self, before: U64, tokens: NDArray[np.intp]) -> Logprobs:
        bins = _mixed(before ^ self._salt[tokens]) >> np.uint64(52)
        return self._table[bins.astype(np.intp)]
