"""Rows of data sets for the shipped environments, in a seeded order: a sample, files, the hub.

In: where rows are (`envserver.rows.sources`) and a split. Out: numbered rows. The order depends on
the seed and the split only.

A data set without splits can be divided into three: 85 % train, 10 % validation and 5 % test of a
shuffle with a separate seed (`Division`), so that the run's seed changes the order, never the
division.
"""

from __future__ import annotations

import functools
import hashlib
import json
import random
from array import array
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from envserver_environments.roles import text_of

from envserver import ConfigError, Environment, InputError, Split
from envserver.row_counts import took, unreported
from envserver.rows.sources import Rows, Source, on_the_hub, streamed

Row = dict[str, Any]
FirstOption = Callable[[], int]
"""Returns the number of the first option, 0 or 1, where an answer is the number of an option."""
ROWS_ASKED = 500
"""Rows of a file that are read to find whether it counts options from 1."""


class RowsConfig(Environment.Config):
    """Where an environment's rows are, and what their fields mean."""

    data_path: Path | None = None
    """Rows: a file (.jsonl, .json, .csv, .tsv, .parquet, .arrow, also .gz or .zst), a folder
    with splits, a glob, or hub:owner/name."""
    columns: dict[str, str] = {}
    """Fields of rows by what they are, where their names are unknown: '{"question": "input",
    "answer": "target"}'. A row that lacks something says what."""


class OptionRowsConfig(RowsConfig):
    """Rows whose answers may be options."""

    first_option: Literal[0, 1] | None = None
    """Number of the first option in rows whose answer is the number of an option; unset: 1 if
    an answer of the file is the number of its options and none is 0."""


class NumberedRow(NamedTuple):
    """A row of a file or data set.

    Args:
        row: None where it cannot be read; `problem` says why.
        place: where a person finds it: `train.jsonl:12`.
        part: which of several questions in the row, from 1.
        id: the id in a row of the sample, "" if it has none or another row had it before.
    """

    number: int
    row: Row | None
    place: str
    problem: str = ""
    part: int = 0
    id: str = ""

    def task_id(self, name: str) -> str:
        """The id in a row of the sample, if it has one, else one made of the row's number."""
        if self.part:
            return f"{name}-{self.number}.{self.part}"
        return (name == "sample" and self.id) or f"{name}-{self.number}"

    def parts(self, split: Callable[[Row], list[Row]]) -> list[NumberedRow]:
        """The row, or those that `split` makes of it."""
        rows = split(self.row) if self.row is not None else []
        if len(rows) < 2:
            return [self._replace(row=rows[0]) if rows else self]
        return [self._replace(row=row, part=part) for part, row in enumerate(rows, start=1)]


def name_of(data_set: str, path: Path | None) -> str:
    """The name of the rows in use: "rows" where a path is given and no data set is named."""
    return "rows" if path is not None and data_set == "sample" else data_set


def first_option(
    setting: int | None,
    path: Path | None,
    split: Split,
    read: Callable[[Row, FirstOption], object],
) -> FirstOption:
    """The number of the first option: as set, else 1 if the file at `path` counts from 1.

    A file counts from 1 if the answer of some row is the number of its options, and that of none
    is 0. It is looked at when a row needs it.

    Args:
        read: reads a row; raises InputError where its answer is none of its options.
    """

    def fits(row: Row, first: int) -> bool:
        try:
            read(row, lambda: first)
        except InputError:
            return False
        return True

    @functools.cache
    def first() -> int:
        if setting is not None or path is None:
            return setting or 0
        rows = Source(str(path)).open(split)
        ends = False
        with unreported():
            for number in random.Random(0).sample(range(rows.count), min(rows.count, ROWS_ASKED)):
                with suppress(InputError):  # a row that cannot be read is reported elsewhere
                    row = rows.read(number)
                    if fits(row, 0) and not fits(row, 1):
                        return 0
                    ends = ends or (fits(row, 1) and not fits(row, 0))
        return int(ends)

    return first


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
        """The rows of a data set, or those at the user's `path`."""
        division = self.divisions.get(name)
        if path is not None:
            rows = file_rows(path, split, seed, division)
            return _with_ids(rows) if name == "sample" else rows
        if name == "sample":
            source = Source(str(self.sample)).open(split)
            return _with_ids(_shuffled(source, f"sample-{seed}-{split}", split, None))
        if name not in self.hubs:
            raise ConfigError(f"The rows of {name!r} come from a file.", hint="Set data_path.")
        return hub_rows(self.hubs[name], split, seed, division)


def file_rows(
    path: Path, split: Split, seed: int, division: Division | None = None
) -> Iterator[NumberedRow]:
    """Rows of a file, a folder, a glob or a data set on the hub; see `Source`.

    Args:
        division: divides rows that have no splits; unset: every split has all of them.
    """
    # As a path, `hub:owner/name` is still what the user wrote, but for an empty part.
    rows = Source(str(path)).open(split)
    return _shuffled(rows, f"file-{seed}-{split}", split, None if rows.has_splits else division)


def hub_rows(
    hub: Hub, split: Split, seed: int, division: Division | None = None
) -> Iterator[NumberedRow]:
    """Rows of a data set on the hub.

    Args:
        division: divides the data set's split (then the same one for all three).
    """
    if split not in hub.splits:
        raise ConfigError(
            f"{hub.path} has no split {split!r}.", hint=f"It has: {', '.join(hub.splits)}."
        )
    return _hub_rows(hub, split, seed, division)


def _with_ids(rows: Iterator[NumberedRow]) -> Iterator[NumberedRow]:
    seen = {""}
    for one in rows:
        own = text_of((one.row or {}).get("id"))
        yield one._replace(id="" if own in seen else own)
        seen.add(own)


def _hub_rows(
    hub: Hub, split: Split, seed: int, division: Division | None
) -> Iterator[NumberedRow]:
    named, first = hub.splits[split], 0
    for config in hub.configs:
        if hub.streaming:
            for number, row in enumerate(streamed(hub.path, config, named, seed)):
                yield NumberedRow(number, row, f"{hub.path}, split {named}: row {number}")
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
