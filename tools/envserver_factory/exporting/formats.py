"""The formats of `envserver export`: one name and one small class each.

A format turns the kept rollouts of a group into rows. A row is a dict, which becomes a line of a
JSONL shard, or a `NamedFile`, which becomes a file. A format with another destination has a
`writer`. To add a format: a module with a class, and a line in `FORMATS`.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from envserver_records.errors import ConfigError

from envserver.export.stored import StoredGroup, StoredRollout


@dataclass(frozen=True)
class NamedFile:
    """A whole file of an export. `path` is relative to its folder, with `/`."""

    path: str
    data: bytes


Row = dict[str, Any] | NamedFile


@dataclass(frozen=True)
class Written:
    """A file that a writer made, relative to the export's folder, with its number of rows."""

    path: str
    rows: int


@dataclass(frozen=True)
class Options:
    """The caller's options.

    Args:
        tokens: include training rows, where a format has both.
        label: label of traces; "auto": `solved` and `failed`.
        margin: minimum difference between the rewards of a pair.
        title: title of the export, for people.
        jsonl: write JSONL where a format otherwise writes a file for each rollout.
        embed: sentence-transformers model for the steps of traces; "": no embeddings.
        embed_cache: folder of the embedding cache.
        tokenizer: tokenizer that shows tokens (see `token_texts`); unset: by the model's name.
    """

    tokens: bool = False
    label: str = "auto"
    margin: float = 0.0
    title: str = ""
    jsonl: bool = False
    embed: str = ""
    embed_cache: Path | None = None
    tokenizer: str = ""


class Format(Protocol):
    """A format of an export. One instance for each export, so it may count."""

    name: str
    suffix: str
    """File suffix, with the dot."""

    def rows(self, group: StoredGroup, kept: Sequence[StoredRollout]) -> Iterator[Row]:
        """Returns the rows of the rollouts `kept` of `group` (in order, at least one)."""
        ...


class Writer(Protocol):
    """Writes rows into files of a folder."""

    def open(self, folder: Path, shard_rows: int | None) -> None:
        """Prepares to write into `folder`, which exists and is empty.

        Args:
            shard_rows: maximum number of rows of a file; None: all rows go into one file.
        """

    def put(self, row: Row) -> None:
        """Writes one row.

        Raises:
            StoreError: it cannot be written.
            ConfigError: it does not fit into the one file.
        """

    def close(self) -> list[Written]:
        """Closes all files and returns them."""
        ...


@runtime_checkable
class HasWriter(Protocol):
    """A format that writes its own files."""

    def writer(self) -> Writer:
        """Returns a new writer."""
        ...


FORMATS = {
    "atropos": "messages:Atropos",
    "messages": "messages:Messages",
    "unified": "readable:Unified",
    "dpo": "messages:Dpo",
    "traces": "readable:Traces",
    "parquet": "parquet:Parquet",
    "html": "html:Html",
    "inspect": "inspect:Inspect",
}
"""`module:factory` by name; a factory takes Options."""


def format_of(name: str, options: Options) -> Format:
    """Raises ConfigError: there is no such format, or what it needs is not installed."""
    if name not in FORMATS:
        raise ConfigError(
            f"There is no format {name!r} to export to.", hint=f"There are: {', '.join(FORMATS)}."
        )
    module, _, factory = FORMATS[name].partition(":")
    made: Format = getattr(importlib.import_module(f".{module}", __package__), factory)(options)
    return made
