"""Converts rows to a trainer's data set on disk, so that no file has to fit into memory.

In: files of rows and an encoder. Out: a data set of `input_ids` and `labels`, or of pairs, and
`ExampleCounts`. What always holds: every row is in the data set or in one of the counts; no example
is longer than the limit, and each has trained tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

from .conversation import Conversation, Tokens, Tools, read_pair, read_row
from .data import rows_of
from .tokens import Encoded, Encoder

Prompts = Literal["auto", "chat", "plain", "recorded"]
TooLong = Literal["drop", "truncate"]
Example = dict[str, list[int]]

_BATCH: Final = 256
SFT_COLUMNS: Final = ("input_ids", "labels")
PAIR_COLUMNS: Final = ("chosen_ids", "chosen_labels", "rejected_ids", "rejected_labels")


@dataclass(frozen=True)
class Limits:
    """The maximum tokens of a row, and what happens to longer ones."""

    max_length: int
    too_long: TooLong


@dataclass
class ExampleCounts:
    """How many rows became examples, and why others were left out."""

    rows: int = 0
    """Rows that were read."""
    examples: int = 0
    """Examples. A conversation whose turns do not continue each other becomes several."""
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
    """Tokens of the examples."""
    tokens_trained: int = 0
    """Tokens that the loss counts."""

    def as_dict(self) -> dict[str, int]:
        """Returns the counts by name."""
        return asdict(self)


def sft_examples(
    paths: Sequence[Path],
    encoder: Encoder,
    counts: ExampleCounts,
    *,
    max_length: int,
    too_long: TooLong,
    prompts: Prompts = "auto",
) -> Iterator[Example]:
    """Yields examples for supervised training; fills `counts`.
    Raises InputError: a row is wrong; the message has its place.
    """
    limits = Limits(max_length, too_long)
    for one, _ in encoded_rows(paths, encoder, counts, limits, prompts=prompts):
        yield {"input_ids": one.ids, "labels": one.labels}


def encoded_rows(
    paths: Sequence[Path],
    encoder: Encoder,
    counts: ExampleCounts,
    limits: Limits,
    *,
    prompts: Prompts = "auto",
) -> Iterator[tuple[Encoded, Tools | None]]:
    """Yields training rows with the tools that were offered; otherwise like `sft_examples`."""
    plain: dict[str, Callable[[str], bool]] = {
        "auto": encoder.is_rendered,
        "chat": lambda prompt: False,
        "plain": lambda prompt: True,
    }
    fit = partial(_fit, counts=counts, max_length=limits.max_length, too_long=limits.too_long)
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
        for one in filter(None, map(fit, encoded)):
            _count(counts, one)
            counts.examples += 1
            yield one, tools
    counts.rendered_otherwise = encoder.rendered_otherwise


def pair_examples(
    paths: Sequence[Path],
    encoder: Encoder,
    counts: ExampleCounts,
    *,
    max_length: int,
    too_long: TooLong,
) -> Iterator[Example]:
    """Yields examples for preference training; fills `counts`.
    Raises InputError: a row is wrong; the message has its place.
    """
    for place, row in rows_of(paths):
        counts.rows += 1
        pair = read_pair(row, place)
        both = [encoder.conversation(one, place) for one in (pair.chosen, pair.rejected)]
        if not all(both):
            counts.dropped_nothing_to_train += 1
        elif any(len(one) > 1 for one in both):
            counts.dropped_not_continued += 1
        elif fitting := _fitting(both[0][0], both[1][0], counts, max_length, too_long):
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


def _fit(
    one: Encoded, *, counts: ExampleCounts, max_length: int, too_long: TooLong
) -> Encoded | None:
    """Returns the example within the limit; None if it is left out (and counted)."""
    if len(one.ids) > max_length:
        if too_long == "drop":
            counts.dropped_too_long += 1
            return None
        counts.truncated += 1
        one = one.cut(max_length)
    if not any(one.trained):
        counts.dropped_nothing_to_train += 1
        return None
    return one


def _fitting(
    chosen: Encoded, rejected: Encoded, counts: ExampleCounts, max_length: int, too_long: TooLong
) -> tuple[Encoded, Encoded] | None:
    """Returns both within the limit, or None; a pair is counted once."""
    if max(len(chosen.ids), len(rejected.ids)) > max_length:
        if too_long == "drop":
            counts.dropped_too_long += 1
            return None
        counts.truncated += 1
        chosen, rejected = chosen.cut(max_length), rejected.cut(max_length)
    if not (any(chosen.trained) and any(rejected.trained)):
        counts.dropped_nothing_to_train += 1
        return None
    return chosen, rejected


def _count(counts: ExampleCounts, *encoded: Encoded) -> None:
    for one in encoded:
        counts.tokens += len(one.ids)
        counts.tokens_trained += sum(one.trained)


def written(examples: Iterable[Example], columns: Sequence[str], path: Path) -> Any:
    """Writes the examples to a file; returns them as a `datasets.Dataset`, None if there are none.

    Args:
        path: the file, which is replaced.
    """
    import pyarrow as pa
    from datasets import Dataset

    schema = pa.schema([(name, pa.list_(pa.int32())) for name in columns])
    count = 0
    path.parent.mkdir(parents=True, exist_ok=True)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, schema) as stream:
        for batch in _batches(examples):
            stream.write_batch(pa.RecordBatch.from_pylist(batch, schema=schema))
            count += len(batch)
    return Dataset.from_file(str(path)) if count else None


def _batches(examples: Iterable[Example]) -> Iterator[list[Example]]:
    batch: list[Example] = []
    for one in examples:
        batch.append(one)
        if len(batch) == _BATCH:
            yield batch
            batch = []
    if batch:
        yield batch
