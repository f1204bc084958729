"""Answers while they are sampled, their settings, and which of them join the batch and when.

Pure: no torch and no clock. A row belongs to the engine's thread, which only appends to its lists.
Waiting code reads them, and reads the row's end once `finish` is set. Rows join in order of arrival
as soon as a slot is free; none joins while sampling is paused. What always holds: a row is in
exactly one state: waiting, running or gone.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import msgspec

if TYPE_CHECKING:
    from .weights import Adapter


Ranked = list[tuple[int, float]]
"""Ids with their logprobs, the most likely first."""


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling settings, and the conditions that end an answer.

    Args:
        temperature: 0 takes the most likely token.
        top_k: 0 for all.
        seed: seed of the answer; the same seed, prompt and weights give the same answer.
        enders: ids that end the answer -> the `stop_reason` of each.
        stops: stop strings, none empty.
        top_logprobs: number of most likely tokens returned for each position.
        allowed: the only ids that may be sampled; None for all.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    enders: dict[int, int | None] = {}
    stops: tuple[str, ...] = ()
    skip_special_tokens: bool = True
    keep_stop: bool = False
    min_tokens: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    allowed: tuple[int, ...] | None = None
    top_logprobs: int = 0
    prompt_logprobs: int | None = None

    def times(self, count: int) -> list[Sampling]:
        """Returns the settings of several answers to one prompt: with a seed, each has its own."""
        if self.seed is None:
            return [self] * count
        return [
            msgspec.structs.replace(self, seed=self.seed + place) if place else self
            for place in range(count)
        ]

    @property
    def filters(self) -> bool:
        """Whether unlikely tokens are filtered out."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    def adjusts(self, sampled: int) -> bool:
        """Returns whether logits are changed before the token after `sampled` others is chosen."""
        return bool(
            self.presence_penalty
            or self.frequency_penalty
            or self.repetition_penalty != 1
            or self.logit_bias
            or self.allowed is not None
            or sampled < self.min_tokens
        )


class Row:
    """One answer.

    Args:
        prompt: ids, at least one.
        adapter: adapter to use; None: only the model's own weights.
        told: called, from the engine's thread, after each step that added to the row or ended it.
            Calls of one step come together.
    """

    def __init__(
        self,
        prompt: list[int],
        sampling: Sampling,
        *,
        adapter: Adapter | None = None,
        told: Callable[[], None] | None = None,
        eager: bool = False,
    ) -> None:
        self.prompt = prompt
        self.sampling = sampling
        self.adapter = adapter
        self.told = told
        self.eager = eager
        """Whether to call `told` after each token rather than only at the end."""
        self.seed = secrets.randbits(64) if sampling.seed is None else sampling.seed % (1 << 64)
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.tops: list[Ranked] = []
        self.scored: list[Ranked] | None = None
        """Logprobs of each prompt token but the first: the token itself, then the most likely ones.
        """
        self.starts: list[tuple[str, int]] = []
        """Versions of the weights, each with the index of the first token that it sampled."""
        self.stop_reason: int | str | None = None
        self.finish: str | None = None
        """stop, length, abort or error."""
        self.error: str = ""

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.ids

    def spans(self) -> list[dict[str, int | str]]:
        ends = [start for _, start in self.starts[1:]] + [len(self.ids)]
        return [
            {"version": version, "start": start, "end": end}
            for (version, start), end in zip(self.starts, ends, strict=True)
        ]

    def mark(self, version: str) -> None:
        if self.starts and self.starts[-1][1] == len(self.ids):
            self.starts.pop()
        if not self.starts or self.starts[-1][0] != version:
            self.starts.append((version, len(self.ids)))


PauseMode = Literal["abort", "wait", "keep"]


class Scheduler:
    """Decides which rows run.

    Args:
        most_rows: maximum number of rows that run at the same time.
        most_tokens: places of the padded cache: rows times the tokens of the longest row.
    """

    def __init__(self, most_rows: int, most_tokens: int) -> None:
        self.waiting: deque[Row] = deque()
        self.running: list[Row] = []
        self.paused: PauseMode | None = None
        self._most_rows = most_rows
        self._most_tokens = most_tokens

    @property
    def steps(self) -> bool:
        if self.paused == "keep":
            return False
        return bool(self.running) or self._next() is not None

    @property
    def share(self) -> float:
        """Share of the cache's places in use."""
        running = list(self.running)
        return self._places(running) / self._most_tokens if running else 0.0

    def submit(self, row: Row) -> None:
        self.waiting.append(row)

    def admitted(self) -> list[Row]:
        """Moves rows from the queue to the batch and returns them."""
        joining: list[Row] = []
        while (row := self._next()) is not None and self._fits(row):
            self.waiting.popleft()
            self.running.append(row)
            joining.append(row)
        return joining

    def displaced(self) -> list[Row]:
        """Returns the rows that must leave because others grew; they go to the front of the queue.

        The row that came last leaves first; one row always stays.
        """
        leaving: list[Row] = []
        while len(self.running) > 1 and self._places(self.running) > self._most_tokens:
            row = self.running.pop()
            self.waiting.appendleft(row)
            leaving.append(row)
        return leaving

    def remove(self, row: Row) -> bool:
        """Removes a row from the queue or the batch; returns whether it was running."""
        if row in self.running:
            self.running.remove(row)
            return True
        if row in self.waiting:
            self.waiting.remove(row)
        return False

    def _next(self) -> Row | None:
        """Returns the first row of the queue.

        During a pause that lets rows finish, only rows that had begun may continue.
        """
        row = self.waiting[0] if self.waiting else None
        if self.paused is None or (self.paused == "wait" and row is not None and row.ids):
            return row
        return None

    def _fits(self, row: Row) -> bool:
        if len(self.running) >= self._most_rows:
            return False
        return not self.running or self._places([*self.running, row]) <= self._most_tokens

    @staticmethod
    def _places(rows: list[Row]) -> int:
        return len(rows) * (1 + max(len(row.prompt) + len(row.ids) for row in rows))
