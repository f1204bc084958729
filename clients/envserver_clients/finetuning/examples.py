"""Converts rows to a trainer's data set on disk, so that no file has to fit into memory.

Invariants: every row is in the data set or in one of the counts; no example is longer than the
limit, and each has trained tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Final, TypeVar

from envserver_records import InputError
from jinja2 import TemplateError

from .conversation import Conversation, Message, Plain, Tokens, Tools, read_pair, read_row, rows_of
from .settings import DpoSettings, FinetuneSettings, SftSettings

# The tokens before a trained token are exactly those that an engine would have when it samples that
# turn: the template's rendering of the messages so far with its generation prompt. So every turn of
# the assistant is rendered twice, as prompt and as prompt with answer. Turns whose prompt continues
# the turn before token by token share one row; others (with templates that drop earlier thoughts)
# begin a new one. Templates need no marks. Trained are only the answer's tokens up to the one that
# ends the turn.

Span = tuple[int, int]
T = TypeVar("T")

NOT_TRAINED = -100
"""The label of context tokens."""


@dataclass(frozen=True)
class Encoded:
    """One training row of T token ids; `trained`: whether the loss counts each.

    `calls`: the trained turns that call tools: first token, and the one after the last.
    """

    ids: list[int]
    trained: list[bool]
    calls: tuple[Span, ...] = ()

    @property
    def labels(self) -> list[int]:
        return [
            token if kept else NOT_TRAINED
            for token, kept in zip(self.ids, self.trained, strict=True)
        ]

    def cut(self, length: int) -> Encoded:
        calls = tuple(span for span in self.calls if span[1] <= length)
        return Encoded(self.ids[:length], self.trained[:length], calls)

    def turns(self) -> list[Span]:
        """The trained turns: first token, and the one after the last."""
        edges = zip([False, *self.trained], [*self.trained, False], strict=True)
        places = [place for place, (before, now) in enumerate(edges) if before != now]
        return list(zip(places[::2], places[1::2], strict=True))


class Encoder:
    """Renders with the chat template of a tokenizer.

    `ends`: ids of tokens that end a turn, in addition to the tokenizer's. `last_only`: train only
    the last turn of the assistant.
    """

    def __init__(
        self, tokenizer: Any, *, ends: frozenset[int] = frozenset(), last_only: bool = False
    ) -> None:
        self._tokenizer = tokenizer
        own = tokenizer.eos_token_id
        self._ends = ends if own is None else ends | {own}
        self._last_only = last_only
        self.rendered_otherwise = 0
        """Turns whose prompt the template renders differently once they are answered."""

    @property
    def has_template(self) -> bool:
        return bool(self._tokenizer.chat_template)

    def is_rendered(self, prompt: str) -> bool:
        """Whether a text is already rendered: it has special tokens, or there is no template."""
        special = self._tokenizer.all_special_tokens
        return not self.has_template or any(token in prompt for token in special)

    def conversation(self, conversation: Conversation, place: str) -> list[Encoded]:
        """Its rows in order; none if there is nothing to train."""
        messages = conversation.messages
        turns = [
            number
            for number, message in enumerate(messages)
            if message["role"] == "assistant" and number >= conversation.given
        ]
        rows: list[Encoded] = []
        for number in turns[-1:] if self._last_only else turns:
            turn = self._turn(messages, number, conversation, place)
            if messages[number].get("tool_calls"):
                turn = replace(turn, calls=tuple(turn.turns()))
            if rows and (joined := _joined(rows[-1], turn)):
                rows[-1] = joined
            else:
                rows.append(turn)
        return rows

    def plain(self, text: Plain) -> Encoded:
        """Adds the tokenizer's begin token if the text does not have it, and an end token."""
        start = self._beginning(text.prompt)
        prompt = start + self._ids(text.prompt)
        both = start + self._ids(text.prompt + text.completion)
        full = both if both[: len(prompt)] == prompt else prompt + self._ids(text.completion)
        return self._answered(prompt, full)

    def exact(self, tokens: Tokens, place: str) -> Encoded:
        """Takes recorded tokens as they are. Raises InputError: they are another model's."""
        if max(tokens.ids, default=0) >= len(self._tokenizer):
            raise InputError(
                f"{place}: token {max(tokens.ids)} is not in the model's vocabulary.",
                hint="Recorded tokens fit only models with the tokenizer that made them.",
            )
        row = Encoded(tokens.ids, tokens.sampled)
        if not self._last_only or not any(row.trained):
            return row
        start, end = row.turns()[-1]
        return Encoded(row.ids, _mask(start, end, len(row.ids)))

    def _turn(
        self, messages: list[Message], number: int, conversation: Conversation, place: str
    ) -> Encoded:
        before = self._render(messages[:number], conversation, place, generation=True)
        after = self._render(messages[: number + 1], conversation, place, generation=False)
        if after.startswith(before):
            prompt, full = self._ids(before), self._ids(after)
            if full[: len(prompt)] != prompt:
                # A token across the boundary: an engine would have the prompt's own tokens.
                full = prompt + self._ids(after[len(before) :])
            return self._answered(prompt, full)
        self.rendered_otherwise += 1
        full = self._ids(after)
        return self._answered(full[: _common(self._ids(before), full)], full)

    def _render(
        self, messages: list[Message], conversation: Conversation, place: str, *, generation: bool
    ) -> str:
        if not self.has_template:
            raise InputError(
                f"{place}: the row is a conversation, but the model has no chat template.",
                hint="Use a chat model, or rows with prompt and completion and --prompts plain.",
            )
        try:
            text: str = self._tokenizer.apply_chat_template(
                messages,
                tools=conversation.tools,
                tokenize=False,
                add_generation_prompt=generation,
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise InputError(f"{place}: the chat template rejects it: {error}") from error
        return text

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def _beginning(self, text: str) -> list[int]:
        token, number = self._tokenizer.bos_token, self._tokenizer.bos_token_id
        if number is None or text.startswith(token):
            return []
        habit = self._tokenizer("a")["input_ids"][:1]
        return [number] if habit == [number] else []

    def _answered(self, prompt: list[int], full: list[int]) -> Encoded:
        """Encodes `full`, which begins with `prompt`; trains the rest, to the end of the turn."""
        last = max(
            (place for place in range(len(prompt), len(full)) if full[place] in self._ends),
            default=None,
        )
        if last is None:
            if self._tokenizer.eos_token_id is None:
                return Encoded(full, _mask(len(prompt), len(full), len(full)))
            full = [*full, self._tokenizer.eos_token_id]
            last = len(full) - 1
        return Encoded(full, _mask(len(prompt), last + 1, len(full)))


def _mask(start: int, end: int, length: int) -> list[bool]:
    return [start <= place < end for place in range(length)]


def _joined(row: Encoded, turn: Encoded) -> Encoded | None:
    """Joins both into one row if the turn's prompt begins with all sampled tokens of the row."""
    sampled = len(row.ids) - row.trained[::-1].index(True)
    if turn.ids[:sampled] != row.ids[:sampled] or any(turn.trained[:sampled]):
        return None
    trained = row.trained[:sampled] + turn.trained[sampled:]
    return Encoded(turn.ids, trained, row.calls + turn.calls)


def _common(first: list[int], second: list[int]) -> int:
    for place, (token, other) in enumerate(zip(first, second, strict=False)):
        if token != other:
            return place
    return min(len(first), len(second))


Example = dict[str, list[int]]

_BATCH: Final = 256
SFT_COLUMNS: Final = ("input_ids", "labels")
PAIR_COLUMNS: Final = ("chosen_ids", "chosen_labels", "rejected_ids", "rejected_labels")


@dataclass
class ExampleCounts:
    """How many rows became examples, and why others were left out."""

    rows: int = 0
    examples: int = 0
    """A conversation whose turns do not continue each other becomes several."""
    dropped_too_long: int = 0
    """Rows left out because they are longer than the limit."""
    truncated: int = 0
    """Rows cut off at the limit."""
    dropped_nothing_to_train: int = 0
    """Rows left out because the assistant wrote nothing, or nothing before the limit."""
    dropped_not_continued: int = 0
    """Pairs left out because the chat template splits one of their conversations."""
    dropped_repeated: int = 0
    """Rows left out because the row before them has the same rollout's conversation."""
    rendered_otherwise: int = 0
    """Turns whose prompt the chat template renders differently once they are answered."""
    tokens: int = 0
    tokens_trained: int = 0
    """Tokens that the loss counts."""

    def as_dict(self) -> dict[str, int]:
        return asdict(self)


def sft_examples(
    settings: SftSettings, paths: Sequence[Path], encoder: Encoder, counts: ExampleCounts
) -> Iterator[Example]:
    for example, _ in encoded_rows(paths, encoder, counts, settings):
        yield {"input_ids": example.ids, "labels": example.labels}


def encoded_rows(
    paths: Sequence[Path], encoder: Encoder, counts: ExampleCounts, settings: SftSettings
) -> Iterator[tuple[Encoded, Tools | None]]:
    """Yields training rows with the tools that were offered; fills `counts`."""
    prompts = settings.prompts
    plain: dict[str, Callable[[str], bool]] = {
        "auto": encoder.is_rendered,
        "chat": lambda prompt: False,
        "plain": lambda prompt: True,
    }
    fit = partial(_fit, counts=counts, limits=settings)
    before: Any = None
    for place, row in rows_of(paths):
        counts.rows += 1
        # Each training row of a rollout in Parquet has the whole rollout's messages.
        rollout, before = before, row.get("rollout_id") if "tokens" in row else None
        if prompts != "recorded" and before is not None and before == rollout:
            counts.dropped_repeated += 1
            continue
        read = read_row(row, place, plain=plain.get(prompts), recorded=prompts == "recorded")
        tools = None
        if isinstance(read, Conversation):
            encoded, tools = encoder.conversation(read, place), read.tools
        elif isinstance(read, Tokens):
            encoded = [encoder.exact(read, place)]
        else:
            encoded = [encoder.plain(read)]
        counts.dropped_nothing_to_train += not encoded
        for example in filter(None, map(fit, encoded)):
            _count(counts, example)
            counts.examples += 1
            yield example, tools
    counts.rendered_otherwise = encoder.rendered_otherwise


def pair_examples(
    settings: DpoSettings, paths: Sequence[Path], encoder: Encoder, counts: ExampleCounts
) -> Iterator[Example]:
    for place, row in rows_of(paths):
        counts.rows += 1
        pair = read_pair(row, place)
        both = [encoder.conversation(side, place) for side in (pair.chosen, pair.rejected)]
        if not all(both):
            counts.dropped_nothing_to_train += 1
        elif any(len(side) > 1 for side in both):
            counts.dropped_not_continued += 1
        elif fitting := _fitting(both[0][0], both[1][0], counts, settings):
            chosen, rejected = fitting
            _count(counts, chosen, rejected)
            counts.examples += 1
            yield {
                "chosen_ids": chosen.ids,
                "chosen_labels": chosen.labels,
                "rejected_ids": rejected.ids,
                "rejected_labels": rejected.labels,
            }
    counts.rendered_otherwise = encoder.rendered_otherwise


def _fit(example: Encoded, counts: ExampleCounts, limits: FinetuneSettings) -> Encoded | None:
    """The example within the limit; None if it is left out (and counted)."""
    if len(example.ids) > limits.max_length:
        if limits.too_long == "drop":
            counts.dropped_too_long += 1
            return None
        counts.truncated += 1
        example = example.cut(limits.max_length)
    if not any(example.trained):
        counts.dropped_nothing_to_train += 1
        return None
    return example


def _fitting(
    chosen: Encoded, rejected: Encoded, counts: ExampleCounts, limits: FinetuneSettings
) -> tuple[Encoded, Encoded] | None:
    """Both within the limit, or None; a pair is counted once."""
    if max(len(chosen.ids), len(rejected.ids)) > limits.max_length:
        if limits.too_long == "drop":
            counts.dropped_too_long += 1
            return None
        counts.truncated += 1
        chosen, rejected = chosen.cut(limits.max_length), rejected.cut(limits.max_length)
    if not (any(chosen.trained) and any(rejected.trained)):
        counts.dropped_nothing_to_train += 1
        return None
    return chosen, rejected


def _count(counts: ExampleCounts, *encoded: Encoded) -> None:
    for example in encoded:
        counts.tokens += len(example.ids)
        counts.tokens_trained += sum(example.trained)


def written(examples: Iterable[Example], columns: Sequence[str], path: Path) -> Any:
    """Writes the examples to a file; returns them as a `datasets.Dataset`, None if there are
    none."""
    import pyarrow as pa
    from datasets import Dataset

    schema = pa.schema([(name, pa.list_(pa.int32())) for name in columns])
    count = 0
    path.parent.mkdir(parents=True, exist_ok=True)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, schema) as stream:
        for batch in batches(examples, _BATCH):
            stream.write_batch(pa.RecordBatch.from_pylist(batch, schema=schema))
            count += len(batch)
    return Dataset.from_file(str(path)) if count else None


def batches(items: Iterable[T], size: int) -> Iterator[list[T]]:
    each = iter(items)
    while batch := list(islice(each, size)):
        yield batch
