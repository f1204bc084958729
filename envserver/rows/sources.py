"""Reads rows by number, wherever they are: JSONL, JSON, CSV, TSV, Parquet, the hub, a list.

In: where the rows are, and a split. Out: `Rows`: their count, each row and its place as a person
looks it up (`rows.jsonl:12`). JSONL is read line by line, at eight bytes of memory a line; CSV and
JSON are held in memory. pyarrow and datasets (the extra `data`) are imported where they are used.
"""

from __future__ import annotations

import csv
import importlib
import json
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from envserver_records.errors import ConfigError, InputError, NotFoundError
from envserver_records.extras import install_command

Row = dict[str, Any]
HUB = "hub:"
"""What the name of a data set on the hub begins with."""
SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")
_LONGEST_REASON = 200


@dataclass(frozen=True)
class Rows:
    """The rows of one split.

    Args:
        count: number of rows.
        place: returns where the row of a number is.
        read: returns the row of a number, from 0.
            Raises InputError: it is not a row; the message has no place.
    """

    count: int
    place: Callable[[int], str]
    read: Callable[[int], Row]


@dataclass(frozen=True)
class Source:
    """Where rows are.

    Args:
        data: a file, a folder with `train.jsonl` and the like, or `hub:owner/name`.
        subset: the configuration of a data set on the hub.
        splits: names of its splits by ours, where they differ.
        listed: the rows themselves, instead of `data`.
    """

    data: str = ""
    subset: str | None = None
    splits: Mapping[str, str] = field(default_factory=dict)
    listed: Sequence[Mapping[str, Any]] | None = None

    @property
    def has_splits(self) -> bool:
        """Whether each split has rows of its own."""
        is_hub = self.data.startswith(HUB)
        return self.listed is None and (is_hub or Path(self.data).is_dir())

    def open(self, split: str) -> Rows:
        """Opens the rows of `split`.

        Raises:
            NotFoundError: there is no such file.
            ConfigError: the source cannot be read, has no such split, or a library is missing.
        """
        if self.listed is not None:
            return _listed(self.listed)
        name = self.splits.get(split, split)
        if self.data.startswith(HUB):
            return _hub(self.data.removeprefix(HUB), self.subset, name)
        path = Path(self.data)
        return _file(_in_folder(path, name) if path.is_dir() else path)


def is_data(reference: str) -> bool:
    """Returns whether `reference` names rows: a file by its suffix, a folder of splits, the hub."""
    if reference.startswith(HUB) or reference.lower().endswith(SUFFIXES):
        return True
    path = Path(reference)
    return path.is_dir() and any(
        one.stem in ("train", "validation", "test") and one.suffix in SUFFIXES
        for one in path.iterdir()
    )


def _in_folder(folder: Path, split: str) -> Path:
    found = sorted(path for path in folder.glob(f"{split}.*") if path.suffix in SUFFIXES)
    if not found:
        there = sorted(path.name for path in folder.iterdir() if path.suffix in SUFFIXES)
        raise NotFoundError(
            f"{folder} has no rows of the split {split!r}.",
            hint=f"It has {', '.join(there) or 'no rows'}; `splits` maps names of splits.",
        )
    return found[0]


def _file(path: Path) -> Rows:
    if not path.is_file():
        raise NotFoundError(f"There is no data file {str(path)!r}.")
    match path.suffix.lower():
        case ".jsonl" | ".ndjson":
            return _json_lines(path)
        case ".json":
            return _json(path)
        case ".csv":
            return _csv(path, ",")
        case ".tsv":
            return _csv(path, "\t")
        case ".parquet":
            return _parquet(path)
    raise ConfigError(f"{path} is not one of {', '.join(SUFFIXES)}.")


def _listed(rows: Sequence[Mapping[str, Any]]) -> Rows:
    return Rows(len(rows), lambda number: f"row {number}", lambda number: _checked(rows[number]))


def _json_lines(path: Path) -> Rows:
    offsets, lines = array("Q"), array("Q")
    with path.open("rb") as file:
        offset = 0
        for line, text in enumerate(file, 1):
            if text.strip():
                offsets.append(offset)
                lines.append(line)
            offset += len(text)

    def read(number: int) -> Row:
        with path.open("rb") as file:
            file.seek(offsets[number])
            return _checked(_parsed(file.readline()))

    return Rows(len(offsets), lambda number: f"{path}:{lines[number]}", read)


def _parsed(text: bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"it is not JSON: {str(error)[:_LONGEST_REASON]}") from error


def _json(path: Path) -> Rows:
    try:
        value = _parsed(path.read_bytes())
    except InputError as error:
        raise ConfigError(f"{path}: {error.message}") from error
    if isinstance(value, dict):
        value = next((part for part in value.values() if isinstance(part, list)), None)
    if not isinstance(value, list):
        raise ConfigError(f"{path} holds no list of rows.")
    rows: list[Any] = value
    return Rows(
        len(rows), lambda number: f"{path}[{number}]", lambda number: _checked(rows[number])
    )


def _csv(path: Path, delimiter: str) -> Rows:
    """Reads a table with a header; a value with line breaks is one value."""
    lines: list[tuple[int, list[str]]] = []
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.reader(file, delimiter=delimiter, strict=True)
        before = 0
        try:
            for fields in reader:
                if fields:
                    lines.append((before + 1, fields))
                before = reader.line_num
        except (csv.Error, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}:{before + 1}: it cannot be read: {error}.") from error
    header = lines[0][1] if lines else []
    twice = {name for name in header if header.count(name) > 1}
    if not header or twice:
        what = f"names {', '.join(sorted(twice))} twice" if twice else "is missing"
        raise ConfigError(f"{path}:1: the line with the names of the columns {what}.")
    rows = lines[1:]

    def read(number: int) -> Row:
        fields = rows[number][1]
        if len(fields) != len(header):
            raise InputError(f"it has {len(fields)} values for {len(header)} columns")
        return dict(zip(header, fields, strict=True))

    return Rows(len(rows), lambda number: f"{path}:{rows[number][0]}", read)


def _parquet(path: Path) -> Rows:
    library = _library("pyarrow.parquet", str(path))
    try:
        table = library.read_table(path)
    except Exception as error:  # noqa: BLE001 - the library's, whatever it is
        _unreadable(str(path), error)
    return Rows(
        table.num_rows,
        lambda number: f"{path}: row {number}",
        lambda number: _checked(table.slice(number, 1).to_pylist()[0]),
    )


def _hub(name: str, subset: str | None, split: str) -> Rows:
    library = _library("datasets", name)
    try:
        data = library.load_dataset(name, subset, split=split)
    except Exception as error:  # noqa: BLE001 - the library's, whatever it is
        _unreadable(name, error)
    return Rows(
        len(data),
        lambda number: f"{name}, split {split}: row {number}",
        lambda number: _checked(data[number]),
    )


def _library(module: str, source: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        library = module.partition(".")[0]
        raise ConfigError(
            f"Reading {source} needs the library `{library}`, which cannot be imported: {error}.",
            hint=f"{install_command('data')}, or use a JSONL file.",
        ) from error


def _unreadable(source: str, error: Exception) -> NoReturn:
    reason = f"{type(error).__name__}: {str(error)[:_LONGEST_REASON]}"
    raise ConfigError(
        f"{source} cannot be loaded: {reason}",
        hint="`splits` maps names of splits, `subset` names the configuration of a data set.",
    ) from error


def _checked(value: Any) -> Row:
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise InputError("it is not an object with named columns")
    return dict(value)
