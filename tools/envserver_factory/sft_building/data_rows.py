"""Yields the rows of a data set, in order: JSONL, JSON or Parquet files, folders of them, or the
hub.

Yields dicts, None for a line that is not a JSON object. One row is in memory at a time (for `.json`
a whole file).
"""

from __future__ import annotations

import importlib
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from envserver_records.errors import ConfigError, InputError, NotFoundError
from envserver_records.extras import install_command

Row = dict[str, Any]
SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet")
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(?::[\w.-]+)?")


def rows_of(source: str, *, limit: int | None = None, split: str = "train") -> Iterator[Row | None]:
    """Yields the rows of `source`.

    Args:
        source: a file, a folder, or a name on the hub: `owner/name` or `owner/name:config`.
        limit: maximum number of rows.
        split: split of a hub data set.

    Raises:
        NotFoundError: there is no such file.
        InputError: a file cannot be read.
        ConfigError: a required library is not installed, or the hub does not have it.
    """
    return itertools.islice(_rows(source, split), limit)


def _rows(source: str, split: str) -> Iterator[Row | None]:
    path = Path(source)
    if path.is_dir():
        files = sorted((p for p in path.iterdir() if p.suffix in SUFFIXES), key=str)
        if not files:
            raise NotFoundError(f"{source} has no {', '.join(SUFFIXES)} file.")
        return itertools.chain.from_iterable(map(_file_rows, files))
    if path.is_file():
        return _file_rows(path)
    if _HUB_NAME.fullmatch(source) and path.suffix not in SUFFIXES:
        return _hub_rows(source, split)
    raise NotFoundError(
        f"There is no file {source!r}.",
        hint="A name on the hub is owner/name or owner/name:config.",
    )


def _file_rows(path: Path) -> Iterator[Row | None]:
    match path.suffix:
        case ".json":
            return _json_rows(path)
        case ".parquet":
            return _parquet_rows(path)
        case ".jsonl" | ".ndjson":
            return _jsonl_rows(path)
    raise InputError(f"{path} is not one of {', '.join(SUFFIXES)}.", place=str(path))


def _jsonl_rows(path: Path) -> Iterator[Row | None]:
    try:
        with path.open("rb") as file:
            for line in file:
                if line.strip():
                    yield _row(line)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}.", place=str(path)) from error


def _row(line: bytes) -> Row | None:
    try:
        value = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _json_rows(path: Path) -> Iterator[Row | None]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path} cannot be read: {error}.", place=str(path)) from error
    if isinstance(value, dict):
        value = next((inner for inner in value.values() if isinstance(inner, list)), None)
    if not isinstance(value, list):
        raise InputError(f"{path} holds no list of rows.", place=str(path))
    yield from (row if isinstance(row, dict) else None for row in value)


def _parquet_rows(path: Path) -> Iterator[Row | None]:
    parquet = _library("pyarrow.parquet", f"Reading {path}")
    arrow = _library("pyarrow", f"Reading {path}")
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                yield from batch.to_pylist()
    except (OSError, arrow.ArrowException) as error:
        reason = " ".join(str(error).split())[:300]
        raise InputError(f"{path} cannot be read: {reason}.", place=str(path)) from error


def _hub_rows(source: str, split: str) -> Iterator[Row | None]:
    name, _, config = source.partition(":")
    datasets = _library("datasets", f"Loading {source}")
    try:
        data = datasets.load_dataset(name, config or None, split=split, streaming=True)
    except Exception as error:
        raise ConfigError(
            f"{source} cannot be loaded: {type(error).__name__}: {str(error)[:300]}",
            hint="Name a local copy: a .jsonl or .parquet file.",
        ) from error
    yield from (dict(row) for row in data)


def _library(name: str, what: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        library = name.partition(".")[0]
        raise ConfigError(
            f"{what} needs the library {library}, which cannot be imported: {error}.",
            hint=f"{install_command('data')}, or give a JSONL file.",
        ) from error
