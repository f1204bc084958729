"""The model's tokenizer and chat template, where an answer's text ends, and answers while they are
sampled: rows, their settings, and which of them join the batch and when.

Pure: no torch and no clock. A row belongs to the engine's thread, which only appends to its lists.
Waiting code reads them, and reads the row's end once `finish` is set. A row is waiting, running or
gone. Rows join in order of arrival as soon as a slot is free; none joins while sampling is paused.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from envserver_records.errors import EngineRefused
from envserver_records.tasks import Json

from envserver.tokens.chat_format import ChatTemplate
from envserver.tokens.prepare import Refused, prepare, prepare_tools, template_kwargs, with_defaults

from .simulated.responses import Answer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from .weights import Adapter


_TAIL_TOKENS = 16
"""Tokens at the end of an answer, besides the stop string's length, searched for a stop string."""
_BROKEN = "\ufffd"


class Text:
    """Tokenizer and chat template of a model.

    `stop_ids` end the model's turn; the first is its regular end. `defaults`: template variables of
    every conversation.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stop_ids: Sequence[int],
        defaults: Mapping[str, Any] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self.stop_ids = list(stop_ids)
        self._defaults = {"add_generation_prompt": True, **(defaults or {})}
        self.name = lru_cache(maxsize=1 << 16)(self._name)

    @property
    def enders(self) -> dict[int, int | None]:
        """Ids that end an answer -> the reported reason: None for the model's regular end."""
        return {index: index if place else None for place, index in enumerate(self.stop_ids)}

    def prompt_text(
        self,
        messages: list[Json],
        tools: list[Json] | None,
        fields: Mapping[str, Any],
    ) -> str:
        """Renders a conversation with the model's template, prepared as in vLLM."""
        try:
            template = ChatTemplate(self._tokenizer.get_chat_template(tools=tools or None), {})
            text = self._tokenizer.apply_chat_template(
                prepare(messages, parts=template.parts, developer=template.developer),
                tools=prepare_tools(tools),
                tokenize=False,
                continue_final_message=bool(fields.get("continue_final_message")),
                **with_defaults(
                    self._defaults, template_kwargs({**fields, "continue_final_message": False})
                ),
            )
        except Refused as refused:
            raise EngineRefused(
                "The local engine takes only text, in the form of the chat API"
                f" ({refused.reason.replace('_', ' ')}).",
                status=400,
                param="messages",
            ) from None
        except Exception as error:  # a template can raise any Python exception
            raise EngineRefused(
                f"The model's chat template does not take this: {error}", status=400
            ) from error
        return str(text)

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """`special`: with the tokens that the tokenizer adds around texts."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=special)
        return ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = False) -> str:
        text = self._tokenizer.decode(
            list(ids), skip_special_tokens=skip_special, clean_up_tokenization_spaces=False
        )
        return str(text)

    def answer(self, row: Row) -> str:
        """The text so far, without the token that ended it and up to a stop string."""
        sampling = row.sampling
        ended = row.finish == "stop" and not isinstance(row.stop_reason, str)
        ids = row.ids[:-1] if ended and not sampling.keep_stop else row.ids
        text = self.decode(ids, skip_special=sampling.skip_special_tokens)
        if isinstance(row.stop_reason, str):
            start = text.find(row.stop_reason)
            text = text[: start + len(row.stop_reason) if sampling.keep_stop else start]
        return text

    def ends(self, row: Row) -> bool:
        """Whether the row's last token ended it; then sets `finish` and `stop_reason`."""
        sampling = row.sampling
        token = row.ids[-1]
        enough = len(row.ids) >= sampling.min_tokens
        if token in sampling.enders and enough:
            row.stop_reason = sampling.enders[token]
            row.finish = "stop"
        elif sampling.stops and enough and (stop := self._stop(row)) is not None:
            row.stop_reason = stop
            row.finish = "stop"
        elif len(row.ids) >= sampling.max_tokens:
            row.finish = "length"
        return row.finish is not None

    def _stop(self, row: Row) -> str | None:
        """The stop string that is complete now; of several, the one that ends first."""
        sampling = row.sampling
        tail = _TAIL_TOKENS + max(map(len, sampling.stops))
        text = self.decode(row.ids[-tail:], skip_special=sampling.skip_special_tokens)
        if not any(stop in text for stop in sampling.stops):
            return None
        whole = self.decode(row.ids, skip_special=sampling.skip_special_tokens)
        ends = [(whole.find(stop) + len(stop), stop) for stop in sampling.stops if stop in whole]
        return min(ends)[1] if ends else None

    def spelling(self, index: int) -> bytes:
        return self.name(index).encode()

    def _name(self, index: int) -> str:
        return self.decode([index])


class Growing:
    """The text of a row as it grows; text that was returned is never revoked.

    An incomplete character is held back, and so is what may be the beginning of a stop string.
    """

    def __init__(self, text: Text, row: Row) -> None:
        self._text = text
        self._row = row
        self._given = 0
        self._whole = ""
        self._before = self._read = 0
        """Index of the first token decoded for context, and number of tokens read."""

    def more(self) -> str:
        """The text that can be sent now and was not sent yet."""
        row = self._row
        if row.finish is not None:
            whole = self._text.answer(row)
        else:
            whole, sampling = self._read_on(), row.sampling
            if len(row.ids) >= sampling.min_tokens:  # it ends at the first stop, marked or not yet
                ends = [whole.find(stop, self._given) for stop in sampling.stops]
                whole = whole[: min((end for end in ends if end >= 0), default=len(whole))]
            whole = whole[: len(whole) - _held(whole, sampling.stops)]
        new = whole[self._given :]
        self._given = max(self._given, len(whole))
        return new

    def _read_on(self) -> str:
        """Tokens are decoded together with those before them; otherwise some tokenizers drop a
        space."""
        ids, skip = self._row.ids, self._row.sampling.skip_special_tokens
        count = len(ids)
        old = self._text.decode(ids[self._before : self._read], skip_special=skip)
        now = self._text.decode(ids[self._before : count], skip_special=skip)
        if len(now) > len(old) and not now.endswith(_BROKEN):
            self._whole += now[len(old) :]
            self._before, self._read = self._read, count
        return self._whole


def _held(text: str, stops: Sequence[str]) -> int:
    """The number of characters at the end of `text` with which a stop string may begin."""
    most = 0
    for stop in stops:
        for size in range(min(len(stop) - 1, len(text)), most, -1):
            if text.endswith(stop[:size]):
                most = size
                break
    return most


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling settings, and the conditions that end an answer.

    Args:
        temperature: 0 takes the most likely token.
        top_k: 0 for all.
        seed: the same seed, prompt and weights give the same answer.
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
        """The settings of several answers to one prompt: with a seed, each has its own."""
        if self.seed is None:
            return [self] * count
        return [
            msgspec.structs.replace(self, seed=self.seed + place) if place else self
            for place in range(count)
        ]

    @property
    def filters(self) -> bool:
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    def adjusts(self, sampled: int) -> bool:
        """Whether logits are changed before the token after `sampled` others is chosen."""
        return bool(
            self.presence_penalty
            or self.frequency_penalty
            or self.repetition_penalty != 1
            or self.logit_bias
            or self.allowed is not None
            or sampled < self.min_tokens
        )


class Row(Answer):
    """An answer that is sampled.

    `on_change` is called, from the engine's thread, after each step that added to the row or ended
    it. Calls of one step come together.
    """

    def __init__(
        self,
        prompt: list[int],
        sampling: Sampling,
        *,
        adapter: Adapter | None = None,
        on_change: Callable[[], None] | None = None,
        eager: bool = False,
    ) -> None:
        super().__init__(prompt)
        self.sampling = sampling
        self.adapter = adapter
        self.on_change = on_change
        self.eager = eager
        """Whether to call `on_change` after each token rather than only at the end."""
        self.seed = secrets.randbits(64) if sampling.seed is None else sampling.seed % (1 << 64)
        self.starts: list[tuple[str, int]] = []
        """Versions of the weights, each with the index of the first token that it sampled."""
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

    `most_tokens`: places of the padded cache: rows times the tokens of the longest row.
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
        """The rows that must leave because others grew; they go to the front of the queue.

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
        """The first row of the queue; during a pause that lets rows finish, only one that had
        begun."""
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
