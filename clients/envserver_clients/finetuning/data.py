"""Files of rows: which of them make one model, what is in them, and their digest.

In: a file, or a folder that `envserver sft build`, a preparation of splits or `envserver export`
wrote. Out: `Part`s, one for each model that is to be trained, and rows with their place. Rows come
in the order of files by name and of lines, one at a time.
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

Row = dict[str, Any]

_SUFFIXES: Final = (".jsonl", ".jsonl.gz", ".parquet")
_TRAIN: Final = "train"
_VALIDATION: Final = ("val", "validation")
_BLOCK: Final = 1 << 20


@dataclass(frozen=True)
class Part:
    """What one model is trained on.

    Args:
        tool: of `envserver sft build`; None: the rows are not one tool's.
        train: files of rows to learn from.
        validation: files of rows to look at; may be empty.
    """

    tool: str | None
    train: tuple[Path, ...]
    validation: tuple[Path, ...]


def parts_of(data: Path, *, tool: str | None = None, whole: bool = False) -> list[Part]:
    """The models that are made of `data`.

    Args:
        tool: only this tool's.
        whole: one model of all tools' rows.

    Raises:
        ConfigError: there are no rows there, or not of that tool.
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
            f"{data} holds no rows.",
            hint=f"It should have files ending in {', '.join(_SUFFIXES)}, or folders with "
            "train.jsonl.",
        )
    return Part(None, shards, ())


def _split(folder: Path, *names: str) -> tuple[Path, ...]:
    places = (folder / f"{name}{suffix}" for name in names for suffix in _SUFFIXES)
    return tuple(path for path in places if path.is_file())


def rows_of(paths: Sequence[Path]) -> Iterator[tuple[str, Row]]:
    """Rows with their place, such as `train.jsonl, line 7`.

    Raises:
        InputError: a line is no JSON object, or a file cannot be read.
        ConfigError: a Parquet file, and pyarrow is missing.
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
        raise InputError(f"{place}: no JSON: {error}") from error
    if not isinstance(row, dict):
        raise InputError(f"{place}: a row is a JSON object, this is {type(row).__name__}.")
    return row


def _parquet(path: Path) -> Iterator[tuple[str, Row]]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise ConfigError(
            "Parquet is read with pyarrow.", hint="pip install 'envserver-clients[train]'"
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
    """sha256 of the files' contents, in their order; their names do not matter."""
    digest = hashlib.sha256()
    for path in paths:
        one = hashlib.sha256()
        with path.open("rb") as file:
            while block := file.read(_BLOCK):
                one.update(block)
        digest.update(one.digest())
    return digest.hexdigest()
