"""Sources of rows: a shipped sample, a local file, the hub. Lazy, and in a seeded order.

Yields (row number, row). The order depends on the seed and the split only. JSONL is read line by
line, at eight bytes of memory a line. `datasets` (the extra `data`) is imported for the hub and for
Parquet; JSON needs nothing.

A data set without splits can be divided into three: 85 % train, 10 % validation and 5 % test of a
shuffle with a separate seed (`Division`), so that the run's seed changes the order, never the
division.
"""

from __future__ import annotations

import importlib
import json
import random
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from envserver_records.extras import install_command

from envserver import ConfigError, NotFoundError, Split

SHUFFLE_BUFFER_ROWS = 10_000
"""Rows among which a streamed data set is shuffled."""

Row = dict[str, Any]
NumberedRow = tuple[int, Row | None]
"""A row and its number in its file or data set; None where it is not a JSON object."""


@dataclass(frozen=True)
class Hub:
    """A data set on the hub.

    Args:
        path: the data set's id.
        configs: its configurations, read one after the other; None: it has none.
        splits: this project's split -> the data set's; a missing split does not exist.
        streaming: too large to download before the first row.
    """

    path: str
    splits: dict[Split, str]
    configs: tuple[str | None, ...] = (None,)
    streaming: bool = False
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Division:
    """Divides a data set without splits into three.

    Args:
        seed: seed of the shuffle.
        validation, test: shares of the rows, rounded down; the rest is for training.
    """

    seed: int = 7
    validation: float = 0.10
    test: float = 0.05

    def numbers(self, count: int, split: Split) -> array[int]:
        """The numbers of the rows of `split`, of `count` in all."""
        order = array("Q", range(count))
        random.Random(self.seed).shuffle(order)
        validation, test = int(count * self.validation), int(count * self.test)
        train = count - validation - test
        match split:
            case "train":
                return order[:train]
            case "validation":
                return order[train : train + validation]
            case "test":
                return order[train + validation :]


def sample_rows(path: Path, split: Split, seed: int) -> Iterator[NumberedRow]:
    """The rows of a shipped JSONL file; every split is the same."""
    return _jsonl_rows(path, random.Random(f"sample-{seed}-{split}"))


def file_rows(
    path: Path, split: Split, seed: int, division: Division | None = None
) -> Iterator[NumberedRow]:
    """Rows of a .jsonl, .json or .parquet file, or of `<split>.*` in a folder.

    Args:
        division: divides a single file; unset: every split has all rows.

    Raises:
        NotFoundError: there is no such file.
        ConfigError: the file has another suffix.
    """
    file = _file_of_split(path, split) if path.is_dir() else path
    if not file.is_file():
        raise NotFoundError(f"There is no data file {str(file)!r}.")
    rng = random.Random(f"file-{seed}-{split}")
    part = None if division is None or path.is_dir() else _Part(division, split)
    match file.suffix:
        case ".jsonl" | ".ndjson":
            return _jsonl_rows(file, rng, part)
        case ".json":
            return _json_rows(file, rng, part)
        case ".parquet":
            hub = Hub("parquet", {split: "train"}, arguments={"data_files": str(file)})
            return hub_rows(hub, split, seed, None if part is None else division)
    raise ConfigError(
        f"{file} is not one of .jsonl, .json and .parquet.",
        hint="See the README of this environment.",
    )


def hub_rows(
    hub: Hub, split: Split, seed: int, division: Division | None = None
) -> Iterator[NumberedRow]:
    """Rows of a data set on the hub.

    Args:
        division: divides the data set's split (then the same one for all three).

    Raises:
        ConfigError: it has no such split, `datasets` is not installed, or it cannot be loaded.
    """
    if split not in hub.splits:
        raise ConfigError(
            f"{hub.path} has no split {split!r}.", hint=f"It has: {', '.join(hub.splits)}."
        )
    part = None if division is None else _Part(division, split)
    return _shuffled_hub(hub, hub.splits[split], seed, part)


@dataclass(frozen=True)
class _Part:
    """The rows of one split of a division."""

    division: Division
    split: Split

    def numbers(self, count: int) -> array[int]:
        return self.division.numbers(count, self.split)


def _numbers(count: int, rng: random.Random, part: _Part | None) -> array[int]:
    """The numbers of the rows to be read, in the order of this run."""
    numbers = array("Q", range(count)) if part is None else part.numbers(count)
    rng.shuffle(numbers)
    return numbers


def _file_of_split(folder: Path, split: Split) -> Path:
    found = sorted(
        path for path in folder.glob(f"{split}.*") if path.suffix in (".jsonl", ".json", ".parquet")
    )
    if not found:
        raise NotFoundError(f"{folder} has no {split}.jsonl, {split}.json or {split}.parquet.")
    return found[0]


def _jsonl_rows(path: Path, rng: random.Random, part: _Part | None = None) -> Iterator[NumberedRow]:
    """Seeks each line in a shuffled order: eight bytes of memory per line."""
    offsets = array("Q")
    with path.open("rb") as file:
        offset = 0
        for line in file:
            if line.strip():
                offsets.append(offset)
            offset += len(line)
        for number in _numbers(len(offsets), rng, part):
            file.seek(offsets[number])
            yield number, _row(file.readline())


def _row(line: bytes) -> Row | None:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _json_rows(path: Path, rng: random.Random, part: _Part | None) -> Iterator[NumberedRow]:
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if isinstance(value, dict):
        value = next((part for part in value.values() if isinstance(part, list)), None)
    if not isinstance(value, list):
        raise ConfigError(f"{path} holds no list of rows.")
    for number in _numbers(len(value), rng, part):
        yield number, value[number] if isinstance(value[number], dict) else None


def _shuffled_hub(hub: Hub, split: str, seed: int, part: _Part | None) -> Iterator[NumberedRow]:
    first_number = 0
    for config in hub.configs:
        data = _load(hub, config, split)
        if hub.streaming:
            shuffled = data.shuffle(seed=seed, buffer_size=SHUFFLE_BUFFER_ROWS)
            yield from ((first_number + i, dict(row)) for i, row in enumerate(shuffled))
        else:
            order = _numbers(len(data), random.Random(f"hub-{seed}-{split}-{config}"), part)
            yield from ((first_number + i, dict(data[i])) for i in order)
            first_number += len(data)


def _load(hub: Hub, config: str | None, split: str) -> Any:
    try:
        datasets = importlib.import_module("datasets")
    except ImportError as error:
        raise ConfigError(
            f"Loading {hub.path} needs the library `datasets`, which cannot be imported: {error}.",
            hint=f"{install_command('data')}, or set data_path to a local JSONL file.",
        ) from error
    try:
        return datasets.load_dataset(
            hub.path, config, split=split, streaming=hub.streaming, **hub.arguments
        )
    except Exception as error:
        raise ConfigError(
            f"{hub.path} cannot be loaded: {type(error).__name__}: {str(error)[:300]}",
            hint="Set data_path to a local copy.",
        ) from error
