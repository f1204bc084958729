"""Continuous batching: rows join and leave between steps; each step samples a token for each row.

All tokens of a joining row but the last are written to the cache (rows that join together share
passes); its last token then takes part in the next step with the others. So there is one kind of
step, and no prefix is computed twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from envserver_records.errors import ConfigError
from transformers import PreTrainedModel

from . import kv_cache
from .adapters import Adapters
from .kv_cache import Place, Prefixes, SlotCache
from .rows import Ranked, Row
from .sampling import Settings, adjusted, chosen, ranked, scaled

F = TypeVar("F", bound=Callable[..., Any])
_untraced: Callable[[F], F] = torch.inference_mode()

_PASS_TOKENS = 2048
"""Maximum number of prompt tokens, with padding, in one pass of the model."""
_LENGTH_STEP = 32
"""The part of the cache that is read grows in steps of this length: fewer shapes to allocate."""


class Generator:
    """The rows that are being sampled; `rows[s]` is in slot `s` of the cache.

    Call every method from one thread.

    Args:
        model: on its device, in evaluation mode; computed without gradients.
        processed: the logprobs of sampled tokens are those of the distribution that was sampled
            from; else the model's own.
    """

    def __init__(
        self, model: PreTrainedModel, adapters: Adapters, *, processed: bool = False
    ) -> None:
        self.model = model
        self._processed = processed
        self.rows: list[Row] = []
        self.prefixes = Prefixes()
        self._adapters = adapters
        self._config = model.config.get_text_config()
        self._windows = _windows(self._config)
        self._device = model.device
        self._cache = SlotCache(self._config.num_hidden_layers)
        self._lengths = np.zeros(0, dtype=np.int64)
        """Number of tokens in the cache, by row."""
        self._pending = torch.zeros(0, dtype=torch.int64, device=self._device)
        """Last token of each row, which is not yet in the cache."""
        self._settings: Settings | None = None

    @_untraced
    def join(self, rows: Sequence[Row]) -> None:
        """Takes rows in; a row that has sampled tokens already continues from them."""
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
        """Removes a row; the last slot's row takes its place.

        Args:
            keep: keep its tokens in the prefix cache for later prompts.
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
        """Samples one token per row.

        Stores its logprob by the model itself (temperature 1, no filters) unless they are
        processed, and those of the most likely tokens if requested.
        """
        count = len(self.rows)
        if self._settings is None:
            self._settings = Settings(self.rows, self._device)
        logits = self._decode(count)
        plain = logits
        settings = self._settings
        if settings.adjusted:
            logits = adjusted(logits, self.rows, settings.adjusted)
        logprobs = torch.log_softmax(scaled(logits, settings) if self._processed else plain, dim=-1)
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
        """Drops all rows and the prefix cache, as after a failure."""
        self.rows.clear()
        self.prefixes.clear()
        self._cache = SlotCache(self._config.num_hidden_layers)
        self._lengths, self._pending = self._lengths[:0], self._pending[:0]
        self._settings = None

    @_untraced
    def score(self, row: Row) -> list[Ranked]:
        """Returns logprobs of each prompt token but the first, then the most likely tokens."""
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
        """Copies the cached prefix of a row into its slot; returns its length."""
        found = self.prefixes.find(row.tokens[:-1], row.adapter)
        if found is None:
            return 0
        taken, length = found
        self._cache.put(slot, taken, length)
        return length

    def _read(self, first: int, rows: Sequence[Row], known: Sequence[int]) -> None:
        """Writes all tokens of the rows but the last to the slots from `first` on."""
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
        """Returns logits [rows, vocabulary] after each row's last token."""
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
        """Runs a pass of ids [rows, queries]; returns hidden states, or logits with `head`."""
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
        """Returns attention masks [rows, 1, queries, length]; by kind of layer if there are two."""
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
    """Returns how many of the next rows, sorted by length, are read in one pass."""
    count, least = 1, known[0]
    while count < len(lengths):
        least = min(least, known[count])
        if (int(lengths[count]) - least) * (count + 1) > _PASS_TOKENS:
            break
        count += 1
    return count


def _windows(config: Any) -> dict[str, int | None]:
    """Returns the kinds of the model's layers with their window; None: the whole sequence."""
    # A setting in the model's file that its architecture does not know is not used by it.
    declared = hasattr(type(config), "sliding_window")
    window = config.sliding_window if declared else None
    kinds = set(getattr(config, "layer_types", None) or ())
    known = {"full_attention": None, "sliding_attention": window}
    if foreign := kinds - known.keys():
        raise ConfigError(
            f"The local engine does not know layers of the kind {', '.join(sorted(foreign))}.",
            hint=kv_cache.OTHERS,
        )
    if not kinds:
        return {"all": window}
    return {kind: known[kind] for kind in sorted(kinds)}
