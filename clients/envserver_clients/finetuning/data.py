"""Reads files of rows, and decides which of them train one model.

In: a file, or a folder of `envserver sft build`, `envserver sft prepare` or `envserver export`.
Out: `Part`s, one for each model to train, and rows with their places. Rows come one at a time,
ordered by file name and line.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from envserver_records import ConfigError, InputError
from envserver_records.extras import CLIENTS, install_command

Row = dict[str, Any]

_SUFFIXES: Final = (".jsonl", ".jsonl.gz", ".parquet")
_TRAIN: Final = "train"
_VALIDATION: Final = ("val", "validation")
_BLOCK: Final = 1 << 20


@dataclass(frozen=True)
class Part:
    """The data of one model.

    Args:
        tool: the tool of `envserver sft build`; None: rows of no single tool.
        train: files of training rows.
        validation: files of validation rows; may be empty.
    """

    tool: str | None
    train: tuple[Path, ...]
    validation: tuple[Path, ...]


def parts_of(data: Path, *, tool: str | None = None, whole: bool = False) -> list[Part]:
    """Returns the parts of `data`, one for each model.

    Args:
        tool: only this tool's rows.
        whole: one model of all tools' rows.

    Raises:
        ConfigError: there are no rows, or none of that tool.
    """
    by_tool = _parts_by_tool(data) if data.is_dir() else []
    if by_tool and tool is None:
        return [_joined(by_tool)] if whole else by_tool
    if tool is not None:
        found = [part for part in by_tool if part.tool == tool]
        there = ", ".join(str(part.tool) for part in by_tool) or "no tools"
        if not found:
            raise ConfigError(f"{data} has no rows of the tool {tool}: it has {there}.")
        return found
    return [_part_of(data)]


def _parts_by_tool(folder: Path) -> list[Part]:
    return [
        Part(one.name, train, _split(one, *_VALIDATION))
        for one in sorted(folder.iterdir())
        if one.is_dir() and (train := _split(one, _TRAIN))
    ]


def _joined(parts: Sequence[Part]) -> Part:
    train = tuple(path for part in parts for path in part.train)
    return Part(None, train, tuple(path for part in parts for path in part.validation))


def _part_of(data: Path) -> Part:
    if data.is_file():
        return Part(None, (data,), ())
    if not data.is_dir():
        raise ConfigError(f"{data} is neither a file nor a folder.")
    if train := _split(data, _TRAIN):
        return Part(None, train, _split(data, *_VALIDATION))
    shards = tuple(path for path in sorted(data.iterdir()) if path.name.endswith(_SUFFIXES))
    if not shards:
        raise ConfigError(
            f"{data} does not contain rows.",
            hint=f"It must have files ending in {', '.join(_SUFFIXES)}, or folders with "
            "train.jsonl.",
        )
    return Part(None, shards, ())


def _split(folder: Path, *names: str) -> tuple[Path, ...]:
    places = (folder / f"{name}{suffix}" for name in names for suffix in _SUFFIXES)
    return tuple(path for path in places if path.is_file())


def rows_of(paths: Sequence[Path]) -> Iterator[tuple[str, Row]]:
    """Yields rows with their places, such as `train.jsonl, line 7`.

    Raises:
        InputError: a line is not a JSON object, or a file cannot be read.
        ConfigError: a Parquet file needs pyarrow, which is missing.
    """
    for path in paths:
        yield from _parquet(path) if path.suffix == ".parquet" else _lines(path)


def _lines(path: Path) -> Iterator[tuple[str, Row]]:
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rt", encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    place = f"{path}, line {number}"
                    yield place, _object(line, place)
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read: {error}") from error


def _object(line: str, place: str) -> Row:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise InputError(f"{place}: not JSON: {error}") from error
    if not isinstance(row, dict):
        raise InputError(f"{place}: a row must be a JSON object, not {type(row).__name__}.")
    return row


def _parquet(path: Path) -> Iterator[tuple[str, Row]]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise ConfigError(
            "Parquet is read with pyarrow.", hint=install_command("train", CLIENTS)
        ) from error
    try:
        number = 0
        for batch in pq.ParquetFile(path).iter_batches(batch_size=256):
            for row in batch.to_pylist():
                number += 1
                yield f"{path}, row {number}", row
    except (OSError, pa.ArrowException) as error:
        raise InputError(f"{path} cannot be read: {error}") from error


def digest_of(paths: Sequence[Path]) -> str:
    """Returns the sha256 of the files' contents, in order; their names do not matter."""
    digest = hashlib.sha256()
    for path in paths:
        one = hashlib.sha256()
        with path.open("rb") as file:
            while block := file.read(_BLOCK):
                one.update(block)
        digest.update(one.digest())
    return digest.hexdigest()
