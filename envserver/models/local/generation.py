"""Continuous batching: rows join and leave between steps, and each step samples a token for each
row.

A joining row puts all its tokens but the last into the cache (rows that join together share
passes);
its last token then takes part in the next step with the others. So there is one kind of step, and
no
prefix is computed twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from envserver_records.errors import ConfigError
from transformers import PreTrainedModel

from . import attention
from .adapters import Adapters
from .kv_cache import Place, SlotCache
from .prefixes import Prefixes
from .rows import Ranked, Row
from .sampling import Settings, adjusted, chosen, ranked

F = TypeVar("F", bound=Callable[..., Any])
_untraced: Callable[[F], F] = torch.inference_mode()

_PASS_TOKENS = 2048
"""Tokens of prompts, with their padding, that go through the model in one pass."""
_LENGTH_STEP = 32
"""What is read of the cache grows by so many places: fewer shapes for the allocator."""


class Generator:
    """The rows that are being sampled; `rows[s]` is in slot `s` of the cache.

    Args:
        model: on its device, in evaluation mode; what it computes is not traced for gradients.

    Every method must be called from one thread.
    """

    def __init__(self, model: PreTrainedModel, adapters: Adapters) -> None:
        self.model = model
        self.rows: list[Row] = []
        self.prefixes = Prefixes()
        self._adapters = adapters
        self._config = model.config.get_text_config()
        self._windows = _windows(self._config)
        self._device = model.device
        self._cache = SlotCache(self._config.num_hidden_layers)
        self._lengths = np.zeros(0, dtype=np.int64)
        """Per row: so many of its tokens are in the cache."""
        self._pending = torch.zeros(0, dtype=torch.int64, device=self._device)
        """Per row: its last token, which is not."""
        self._settings: Settings | None = None

    @property
    def cache_bytes(self) -> int:
        """Of keys and values."""
        return self._cache.bytes_held

    @_untraced
    def join(self, rows: Sequence[Row]) -> None:
        """Takes rows in; ones that have sampled something already go on where they were."""
        first = len(self.rows)
        rows = sorted(rows, key=lambda row: len(row.prompt) + len(row.ids))
        self._make_room([*self.rows, *rows])
        self.rows.extend(rows)
        known = [self._recall(first + place, row) for place, row in enumerate(rows)]
        lengths = np.array([len(row.prompt) + len(row.ids) - 1 for row in rows], dtype=np.int64)
        place = 0
        while place < len(rows):
            count = _pass_rows(lengths[place:], known[place:])
            self._read(first + place, rows[place : place + count], known[place : place + count])
            place += count
        self._lengths = np.concatenate([self._lengths, lengths])
        last = [(row.ids or row.prompt)[-1] for row in rows]
        self._pending = torch.cat([self._pending, torch.tensor(last, device=self._device)])
        self._settings = None

    @_untraced
    def leave(self, row: Row, *, keep: bool = True) -> None:
        """Lets a row go; the last slot's row takes its place.

        Args:
            keep: later prompts may begin with its tokens, which are kept for them.
        """
        slot, last = self.rows.index(row), len(self.rows) - 1
        if keep:
            length = int(self._lengths[slot])
            self.prefixes.keep(row.tokens[:length], row.adapter, self._cache.taken(slot, length))
        if slot != last:
            self._cache.move(last, slot, int(self._lengths[last]))
            self.rows[slot] = self.rows[last]
            self._lengths[slot] = self._lengths[last]
            self._pending[slot] = self._pending[last]
        self.rows.pop()
        self._lengths = self._lengths[:last]
        self._pending = self._pending[:last]
        self._settings = None

    @_untraced
    def step(self) -> None:
        """Each row gets one token, with its logprob by the model itself (temperature 1, nothing
        left out), and the likeliest ones where it asked for them.
        """
        count = len(self.rows)
        if self._settings is None:
            self._settings = Settings(self.rows, self._device)
        logits = self._decode(count)
        logprobs = torch.log_softmax(logits, dim=-1)
        settings = self._settings
        if settings.adjusted:
            logits = adjusted(logits, self.rows, settings.adjusted)
        places = np.fromiter((len(row.ids) for row in self.rows), np.int64, count)
        sampled = chosen(logits, settings, places)
        scores = logprobs.gather(1, sampled[:, None])[:, 0].tolist()
        for place, tops in zip(settings.ranked, self._ranked(logprobs, settings), strict=True):
            self.rows[place].tops.append(tops[: self.rows[place].sampling.top_logprobs])
        for row, token, score in zip(self.rows, sampled.tolist(), scores, strict=True):
            row.ids.append(token)
            row.logprobs.append(score)
        self._pending = sampled
        self._lengths += 1

    def forget(self) -> None:
        """Drops all rows and what was kept of old ones, as after a failure."""
        self.rows.clear()
        self.prefixes.clear()
        self._cache = SlotCache(self._config.num_hidden_layers)
        self._lengths, self._pending = self._lengths[:0], self._pending[:0]
        self._settings = None

    @_untraced
    def score(self, row: Row) -> list[Ranked]:
        """For each token of the row's prompt but the first: itself, then the likeliest."""
        count = row.sampling.prompt_logprobs or 0
        ids = torch.tensor([row.prompt], device=self._device)
        own = SlotCache(self._config.num_hidden_layers)
        own.make_room(1, ids.shape[1])
        found: list[Ranked] = []
        for start in range(0, ids.shape[1] - 1, _PASS_TOKENS):
            part = ids[:, start : min(start + _PASS_TOKENS, ids.shape[1] - 1)]
            positions = torch.arange(start, start + part.shape[1], device=self._device)[None]
            place = Place(0, positions, start + part.shape[1])
            logits = self._run(part, place, [row], cache=own, head=True)[0].float()
            logprobs = torch.log_softmax(logits, dim=-1)
            following = ids[0, start + 1 : start + 1 + part.shape[1]]
            scores = logprobs.gather(1, following[:, None])[:, 0].tolist()
            tops = ranked(logprobs, count) if count else [[] for _ in scores]
            for token, score, others in zip(following.tolist(), scores, tops, strict=True):
                rest = [pair for pair in others if pair[0] != token]
                found.append([(token, score), *rest])
        return found

    def _make_room(self, rows: Sequence[Row]) -> None:
        longest = max(len(row.prompt) + len(row.ids) for row in rows)
        self._cache.make_room(len(rows), longest + _LENGTH_STEP)

    def _recall(self, slot: int, row: Row) -> int:
        """Puts into the cache what is kept of the row's tokens; how many those are."""
        found = self.prefixes.find(row.tokens[:-1], row.adapter)
        if found is None:
            return 0
        taken, length = found
        self._cache.put(slot, taken, length)
        return length

    def _read(self, first: int, rows: Sequence[Row], known: Sequence[int]) -> None:
        """Puts the rows' tokens but the last into slots from `first` on."""
        tokens = [row.tokens[:-1] for row in rows]
        start, end = min(known), max(map(len, tokens))
        while start < end:
            stop = min(end, start + max(1, _PASS_TOKENS // len(rows)))
            ids = torch.zeros((len(rows), stop - start), dtype=torch.int64)
            for line, of_row in zip(ids, tokens, strict=True):
                part = of_row[start:stop]
                line[: len(part)] = torch.tensor(part)
            positions = torch.arange(start, stop, device=self._device).expand(len(rows), -1)
            self._run(ids.to(self._device), Place(first, positions, stop), rows)
            start = stop

    def _decode(self, count: int) -> torch.Tensor:
        """Logits [rows, vocabulary] behind each row's last token."""
        length = int(self._lengths.max()) + 1
        length = -(-length // _LENGTH_STEP) * _LENGTH_STEP
        self._cache.make_room(count, length)
        positions = torch.from_numpy(self._lengths).to(self._device)[:, None]
        place = Place(0, positions, length)
        return self._run(self._pending[:, None], place, self.rows, head=True)[:, -1].float()

    def _run(
        self,
        ids: torch.Tensor,
        place: Place,
        rows: Sequence[Row],
        *,
        cache: SlotCache | None = None,
        head: bool = False,
    ) -> torch.Tensor:
        """One pass of ids [rows, queries]: hidden states, or with `head` logits."""
        cache = cache or self._cache
        cache.place = place
        model: Any = self.model if head else self.model.base_model
        with self._adapters.worn([row.adapter for row in rows]):
            out = model(
                input_ids=ids,
                attention_mask=self._masks(place),
                position_ids=place.positions,
                past_key_values=cache,
                use_cache=True,
            )
        found: torch.Tensor = out.logits if head else out.last_hidden_state
        return found

    def _masks(self, place: Place) -> Any:
        """Where queries may look, [rows, 1, queries, length]; by kind of layer if there are two."""
        back = place.positions[:, None, :, None] - torch.arange(
            place.length, device=place.positions.device
        )
        seen = back >= 0
        masks = {
            kind: seen if window is None else seen & (back < window)
            for kind, window in self._windows.items()
        }
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _ranked(self, logprobs: torch.Tensor, settings: Settings) -> list[Ranked]:
        if not settings.ranked:
            return []
        return ranked(logprobs[settings.ranked], settings.most_ranked)


def _pass_rows(lengths: np.ndarray, known: Sequence[int]) -> int:
    """How many of the next rows, which are sorted by length, are read in one pass."""
    count, least = 1, known[0]
    while count < len(lengths):
        least = min(least, known[count])
        if (int(lengths[count]) - least) * (count + 1) > _PASS_TOKENS:
            break
        count += 1
    return count


def _windows(config: Any) -> dict[str, int | None]:
    """The kinds of the model's layers, with how far back each looks; None: to the beginning.

    Raises:
        ConfigError: some layers are no attention over all or the last tokens.
    """
    # One that is only in the model's file, and nothing of its architecture, is not used by it.
    declared = hasattr(type(config), "sliding_window")
    window = config.sliding_window if declared else None
    kinds = set(getattr(config, "layer_types", None) or ())
    known = {"full_attention": None, "sliding_attention": window}
    if foreign := kinds - known.keys():
        raise ConfigError(
            f"The local engine does not know layers of the kind {', '.join(sorted(foreign))}.",
            hint=attention.OTHERS,
        )
    if not kinds:
        return {"all": window}
    return {kind: known[kind] for kind in sorted(kinds)}
