"""Rows of data sets for the shipped environments, in a seeded order: a sample, files, the hub.

In: where rows are (`envserver.rows.sources`) and a split. Out: numbered rows. The order depends on
the seed and the split only.

A data set without splits can be divided into three: 85 % train, 10 % validation and 5 % test of a
shuffle with a separate seed (`Division`), so that the run's seed changes the order, never the
division.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import random
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from envserver_records.extras import install_command

from envserver import ConfigError, InputError, Split
from envserver.row_counts import took
from envserver.rows.sources import Rows, Source, on_the_hub

SHUFFLE_BUFFER_ROWS = 10_000
"""Rows among which a streamed data set is shuffled."""

Row = dict[str, Any]


class NumberedRow(NamedTuple):
    """A row of a file or data set.

    Args:
        row: None where it cannot be read; `problem` says why.
        place: where a person finds it: `train.jsonl:12`.
    """

    number: int
    row: Row | None
    place: str
    problem: str = ""

    def task_id(self, name: str) -> str:
        """The id in a row of the sample, else one made of the row's number."""
        own = (self.row or {}).get("id") if name == "sample" else None
        return f"{name}-{self.number}" if own is None else str(own)


def id_of(row: Row) -> str:
    """An id of the row's content."""
    text = json.dumps(row, sort_keys=True, ensure_ascii=True, default=str)
    return f"row-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


@dataclass(frozen=True)
class Hub:
    """A data set on the hub.

    Args:
        path: the data set's id.
        configs: its configurations, read one after the other; None: it has none.
        splits: this project's split -> the data set's; a missing split does not exist.
        streaming: too large to download before the first row.
        arguments: for `datasets.load_dataset`.
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


@dataclass(frozen=True)
class DataSets:
    """The data sets of an environment.

    Args:
        sample: the shipped rows, all in every split.
        hubs: data sets on the hub, by name.
        divisions: of those that have no splits.
    """

    sample: Path
    hubs: Mapping[str, Hub]
    divisions: Mapping[str, Division] = field(default_factory=dict)

    def rows(self, name: str, path: Path | None, split: Split, seed: int) -> Iterator[NumberedRow]:
        """The rows of a data set, or those at the user's `path`.

        Raises:
            NotFoundError: there is no such file or split.
            ConfigError: they cannot be read, or the data set needs a path.
        """
        division = self.divisions.get(name)
        if path is not None:
            return file_rows(path, split, seed, division)
        if name == "sample":
            rows = Source(str(self.sample)).open(split)
            return _shuffled(rows, f"sample-{seed}-{split}", split, None)
        if name not in self.hubs:
            raise ConfigError(f"The rows of {name!r} come from a file.", hint="Set data_path.")
        return hub_rows(self.hubs[name], split, seed, division)


def file_rows(
    path: Path, split: Split, seed: int, division: Division | None = None
) -> Iterator[NumberedRow]:
    """Rows of a file, a folder, a glob or a data set on the hub; see `Source`.

    Args:
        division: divides rows that have no splits; unset: every split has all of them.

    Raises:
        NotFoundError: there is no such file or split.
        ConfigError: it cannot be read.
    """
    # As a path, `hub:owner/name` is still what the user wrote, but for an empty part.
    source = Source(str(path))
    division = None if source.has_splits else division
    return _shuffled(source.open(split), f"file-{seed}-{split}", split, division)


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
    return _hub_rows(hub, split, seed, division)


def _hub_rows(
    hub: Hub, split: Split, seed: int, division: Division | None
) -> Iterator[NumberedRow]:
    named, first = hub.splits[split], 0
    for config in hub.configs:
        if hub.streaming:
            yield from _streamed(hub, config, named, seed)
            continue
        rows = on_the_hub(hub.path, config, named, **hub.arguments)
        for one in _shuffled(rows, f"hub-{seed}-{named}-{config}", split, division):
            yield one._replace(number=first + one.number)
        first += rows.count


def _shuffled(
    rows: Rows, seed: str, split: Split, division: Division | None
) -> Iterator[NumberedRow]:
    numbers = division.numbers(rows.count, split) if division else array("Q", range(rows.count))
    random.Random(seed).shuffle(numbers)
    for number in numbers:
        place = rows.place(number)
        try:
            row = rows.read(number)
            took(row)
            yield NumberedRow(number, row, place)
        except InputError as error:
            yield NumberedRow(number, None, place, error.message)


def _streamed(hub: Hub, config: str | None, split: str, seed: int) -> Iterator[NumberedRow]:
    try:
        datasets = importlib.import_module("datasets")
        data = datasets.load_dataset(hub.path, config, split=split, streaming=True)
    except Exception as error:
        raise ConfigError(
            f"{hub.path} cannot be loaded: {type(error).__name__}: {str(error)[:300]}",
            hint=f"{install_command('data')}, or set data_path to a local copy.",
        ) from error
    shuffled = data.shuffle(seed=seed, buffer_size=SHUFFLE_BUFFER_ROWS)
    for number, row in enumerate(shuffled):
        yield NumberedRow(number, dict(row), f"{hub.path}, split {split}: row {number}")
