"""Continuous batching: rows join and leave between steps; each step samples a token for each row.

All tokens of a joining row but the last are written to the cache (rows that join together share
passes); its last token then takes part in the next step with the others. So there is one kind of
step, and no prefix is computed twice.

A row's choice depends only on its own logits, settings, seed and position: the uniform number for a
position is a hash of seed and position, and the sampled token is where the cumulative probability
exceeds it. So a request with a seed gives the same answer in any batch, up to the rounding of the
logits themselves.

`Runner` is the thread that runs torch. Only it touches the model, its adapters and the batch; a
step that fails ends the rows that were in it, each with the reason, and nothing else.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import numpy as np
import structlog
import torch
from envserver_records.errors import ConfigError
from transformers import PreTrainedModel

from . import kv_cache
from .kv_cache import Place, Prefixes, SlotCache
from .simulated.responses import Ranked
from .simulated.tokenizer import mixed_bits
from .text import PauseMode, Row, Scheduler, Text
from .weights import Adapters

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class Settings:
    """Settings of the rows of a batch as tensors; made again when rows join or leave."""

    def __init__(self, rows: Sequence[Row], device: torch.device) -> None:
        samplings = [row.sampling for row in rows]
        self.seeds = np.array([row.seed for row in rows], dtype=np.uint64)
        temperature = torch.tensor([sampling.temperature for sampling in samplings], device=device)
        self.greedy = temperature == 0
        self.all_greedy = all(sampling.temperature == 0 for sampling in samplings)
        self.some_greedy = any(sampling.temperature == 0 for sampling in samplings)
        self.temperature = temperature.masked_fill(self.greedy, 1.0)[:, None]
        self.filters = any(sampling.filters for sampling in samplings)
        self.top_p = torch.tensor([sampling.top_p for sampling in samplings], device=device)[
            :, None
        ]
        self.top_k = torch.tensor(
            [sampling.top_k or 1 << 60 for sampling in samplings], dtype=torch.int64, device=device
        )[:, None]
        self.min_p = torch.tensor([sampling.min_p for sampling in samplings], device=device)[
            :, None
        ]
        self.adjusted = [place for place, sampling in enumerate(samplings) if sampling.adjusts(0)]
        self.ranked = [place for place, sampling in enumerate(samplings) if sampling.top_logprobs]
        self.most_ranked = max((sampling.top_logprobs for sampling in samplings), default=0)


def uniforms(seeds: np.ndarray, places: np.ndarray) -> np.ndarray:
    """A number in [0, 1) for each pair of seed and place: splitmix64, 53 bits of it."""
    with np.errstate(over="ignore"):
        mixed = seeds + (places.astype(np.uint64) + np.uint64(1)) * _GOLDEN
        mixed = mixed_bits(mixed_bits(mixed) + _GOLDEN)
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def adjusted(logits: torch.Tensor, rows: Sequence[Row], places: Sequence[int]) -> torch.Tensor:
    """Logits with penalties, biases and bans applied to the rows at `places`."""
    logits = logits.clone()
    for place in places:
        row, line = rows[place], logits[place]
        sampling = row.sampling
        if sampling.allowed is not None:
            kept = line[list(sampling.allowed)]
            line.fill_(float("-inf"))
            line[list(sampling.allowed)] = kept
        if sampling.repetition_penalty != 1:
            seen = torch.tensor(sorted(set(row.tokens)), device=line.device)
            values = line[seen]
            line[seen] = torch.where(
                values > 0,
                values / sampling.repetition_penalty,
                values * sampling.repetition_penalty,
            )
        if row.ids and (sampling.presence_penalty or sampling.frequency_penalty):
            ids, counts = torch.tensor(row.ids, device=line.device).unique(return_counts=True)
            line[ids] -= sampling.frequency_penalty * counts + sampling.presence_penalty
        for index, bias in sampling.logit_bias.items():
            line[index] += bias
        if len(row.ids) < sampling.min_tokens and sampling.enders:
            line[list(sampling.enders)] = float("-inf")
    return logits


def chosen(logits: torch.Tensor, settings: Settings, places: np.ndarray) -> torch.Tensor:
    """Samples one id per row.

    `logits`: [rows, vocabulary], float32. `places`: [rows], number of tokens that each row has
    sampled before.
    """
    if settings.all_greedy:
        return logits.argmax(dim=-1)
    # Double precision: in single precision the sum would lose the least likely tokens.
    sums = torch.softmax(scaled(logits, settings), dim=-1).cumsum(dim=-1, dtype=torch.float64)
    picks = torch.from_numpy(uniforms(settings.seeds, places)).to(sums.device)[:, None]
    sampled = torch.searchsorted(sums, picks * sums[:, -1:], right=True)[:, 0]
    sampled.clamp_(max=logits.shape[-1] - 1)
    if not settings.some_greedy:
        return sampled
    return torch.where(settings.greedy, logits.argmax(dim=-1), sampled)


def scaled(logits: torch.Tensor, settings: Settings) -> torch.Tensor:
    """Logits after temperature (of greedy rows: 1) and filters."""
    logits = logits / settings.temperature
    if settings.filters:
        return filtered(logits, settings.top_k, settings.top_p, settings.min_p)
    return logits


def filtered(
    logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """Logits without the tokens that min_p, then top_k, then top_p exclude; settings are [rows, 1].

    The most likely token always stays.
    """
    ordered, order = logits.sort(dim=-1, descending=True)
    ranks = torch.arange(logits.shape[-1], device=logits.device)[None, :]
    out = (ordered < ordered[:, :1] + min_p.log()) | (ranks >= top_k)
    probabilities = ordered.masked_fill(out, float("-inf")).softmax(dim=-1)
    out |= probabilities.cumsum(dim=-1) - probabilities >= top_p
    out[:, 0] = False
    ordered = ordered.masked_fill(out, float("-inf"))
    return torch.empty_like(logits).scatter_(1, order, ordered)


def ranked(logprobs: torch.Tensor, count: int) -> list[Ranked]:
    """The `count` most likely ids of each row of logprobs [rows, vocabulary]."""
    values, ids = logprobs.topk(min(count, logprobs.shape[-1]), dim=-1)
    return [
        list(zip(of_row, scores, strict=True))
        for of_row, scores in zip(ids.tolist(), values.tolist(), strict=True)
    ]


F = TypeVar("F", bound=Callable[..., Any])
_untraced: Callable[[F], F] = torch.inference_mode()

_PASS_TOKENS = 2048
"""Maximum number of prompt tokens, with padding, in one pass of the model."""
_LENGTH_STEP = 32
"""The part of the cache that is read grows in steps of this length: fewer shapes to allocate."""


class Generator:
    """The rows that are being sampled; `rows[s]` is in slot `s` of the cache.

    Call every method from one thread. `model`: on its device, in evaluation mode; computed without
    gradients. `processed`: the logprobs of sampled tokens are those of the distribution that was
    sampled from; else the model's own.
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

        `keep`: keep its tokens in the prefix cache for later prompts.
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
        """Logprobs of each prompt token but the first, then the most likely tokens."""
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
        """Logits [rows, vocabulary] after each row's last token."""
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
        """A pass of ids [rows, queries]: hidden states, or logits with `head`."""
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
        """Attention masks [rows, 1, queries, length]; by kind of layer if there are two."""
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
    """How many of the next rows, sorted by length, are read in one pass."""
    count, least = 1, known[0]
    while count < len(lengths):
        least = min(least, known[count])
        if (int(lengths[count]) - least) * (count + 1) > _PASS_TOKENS:
            break
        count += 1
    return count


def _windows(config: Any) -> dict[str, int | None]:
    """The kinds of the model's layers with their window; None: the whole sequence."""
    # A setting in the model's file that its architecture does not know is not used by it.
    declared = hasattr(type(config), "sliding_window")
    window = config.sliding_window if declared else None
    kinds = set(getattr(config, "layer_types", None) or ())
    known = {"full_attention": None, "sliding_attention": window}
    if foreign := kinds - known.keys():
        raise ConfigError(
            f"The local engine does not support layers of the kind {', '.join(sorted(foreign))}.",
            hint=kv_cache.OTHERS,
        )
    if not kinds:
        return {"all": window}
    return {kind: known[kind] for kind in sorted(kinds)}


T = TypeVar("T")

_log = structlog.get_logger("envserver_local")


class Runner:
    """The engine's thread; `version`: of the weights, with which tokens are marked."""

    def __init__(
        self, generator: Generator, scheduler: Scheduler, text: Text, version: str
    ) -> None:
        self.generator = generator
        self.scheduler = scheduler
        self.version = version
        self.sampled_tokens = self.read_tokens = self.steps = self.displaced = 0
        self._text = text
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._idle: list[Future[None]] = []
        """Futures that wait for the running rows to end."""
        self._ended = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)

    async def __aenter__(self) -> Runner:
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.end()
        await asyncio.to_thread(self._thread.join)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def end(self) -> None:
        """Ends all rows with the tokens they have, and then the thread."""
        self._commands.put(self._end)

    def submit(self, rows: Sequence[Row]) -> None:
        self._commands.put(lambda: self._submit(rows))

    def abort(self, rows: Sequence[Row]) -> None:
        """Ends those rows that are still running or waiting, with the tokens they have."""
        self._commands.put(lambda: self._abort(rows))

    async def run(self, command: Callable[[], T]) -> T:
        """Runs `command` between two steps and returns its result."""
        future: Future[T] = Future()

        def obey() -> None:
            try:
                future.set_result(command())
            except Exception as error:  # noqa: BLE001  (it is raised where the command was sent)
                future.set_exception(error)

        self._commands.put(obey)
        return await asyncio.wrap_future(future)

    async def pause(self, mode: PauseMode) -> None:
        """Stops sampling: running rows are aborted, finished first, or kept until `resume`."""
        done = await self.run(lambda: self._pause(mode))
        await asyncio.wrap_future(done)

    def resume(self) -> None:
        """Call it between steps."""
        self.scheduler.paused = None
        self._tell_idle()

    def set_version(self, version: str) -> None:
        """The version of tokens sampled from now on. Call it between steps."""
        self.version = version
        for row in self.scheduler.running:
            row.mark(version)

    def abort_all(self) -> int:
        """Ends all rows with the tokens they have; returns their number. Call it between steps."""
        rows = [*self.scheduler.running, *self.scheduler.waiting]
        self._abort(rows)
        return len(rows)

    def _work(self) -> None:
        while not self._ended:
            self._obey()
            if self._ended or not self.scheduler.steps:
                continue
            try:
                self._step()
            except Exception as error:  # noqa: BLE001  (whatever torch raises; the engine goes on)
                _log.exception("step_failed", rows=len(self.scheduler.running))
                self._fail(error)

    def _obey(self) -> None:
        """Runs the queued commands; waits for one if there is nothing else to do."""
        while not self._ended:
            try:
                self._commands.get(block=not self.scheduler.steps)()
            except queue.Empty:
                return

    def _step(self) -> None:
        changed: list[Row] = []
        for row in self.scheduler.displaced():
            self.displaced += 1
            self.generator.leave(row)
        joining = self.scheduler.admitted()
        for row in joining:
            row.mark(self.version)
            self.read_tokens += len(row.prompt)
            if row.sampling.prompt_logprobs is not None and row.scored is None:
                row.scored = self.generator.score(row)
        if joining:
            self.generator.join(joining)
        self.generator.step()
        self.steps += 1
        self.sampled_tokens += len(self.scheduler.running)
        ended = []
        for row in self.scheduler.running:
            if self._text.ends(row):
                ended.append(row)
            elif row.eager:
                changed.append(row)
        for row in ended:
            self._leave(row)
        self._tell(changed + ended)

    def _leave(self, row: Row) -> None:
        if self.scheduler.remove(row):
            self.generator.leave(row)
        if not self.scheduler.steps:
            self._tell_idle()

    def _submit(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self.scheduler.submit(row)

    def _abort(self, rows: Sequence[Row]) -> None:
        live = [row for row in rows if row.finish is None]
        for row in live:
            row.finish = "abort"
            self._leave(row)
        self._tell(live)

    def _pause(self, mode: PauseMode) -> Future[None]:
        done: Future[None] = Future()
        self.scheduler.paused = mode
        if mode == "abort":
            self.abort_all()
        if mode == "wait" and self.scheduler.steps:
            self._idle.append(done)
        else:
            done.set_result(None)
        return done

    def _fail(self, error: Exception) -> None:
        failed = list(self.scheduler.running)
        self.generator.forget()
        for row in failed:
            row.finish, row.error = "error", f"{type(error).__name__}: {error}"
            self.scheduler.remove(row)
        if not self.scheduler.steps:
            self._tell_idle()
        self._tell(failed)

    def _tell_idle(self) -> None:
        for future in self._idle:
            future.set_result(None)
        self._idle.clear()

    def _end(self) -> None:
        self._ended = True
        self.abort_all()

    def _tell(self, rows: Sequence[Row]) -> None:
        callbacks = [row.on_change for row in rows if row.on_change is not None]
        if callbacks and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(_call_all, callbacks)


def _call_all(callbacks: list[Callable[[], None]]) -> None:
    for callback in callbacks:
        callback()
