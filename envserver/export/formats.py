"""What `envserver export` can write: one name, one small class a format.

A format turns the kept rollouts of a group into rows. A row is a dict, which becomes a line of a
JSONL shard, or a `NamedFile`, which becomes a file of its own. A format whose rows go elsewhere
(`writer`) brings what writes them.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from envserver_records.errors import ConfigError

from .stored import StoredGroup, StoredRollout


@dataclass(frozen=True)
class NamedFile:
    """A whole file of an export. `path` is relative to its folder, with `/`."""

    path: str
    data: bytes


Row = dict[str, Any] | NamedFile


@dataclass(frozen=True)
class Written:
    """A file that a writer made, relative to the folder of the export; its rows."""

    path: str
    rows: int


@dataclass(frozen=True)
class Options:
    """What the caller of an export wants beside its rows.

    Args:
        tokens: training rows too, where a format has both.
        label: of traces, "auto": `solved` and `failed`.
        margin: least difference of the rewards of a pair.
        title: of what is exported, for people.
        jsonl: lines of JSONL, where a format else writes a file for each rollout.
        embed: model of sentence-transformers that embeds the steps of traces; "": none does.
        embed_cache: folder where its embeddings are kept.
        tokenizer: what tokens are shown by (see `token_texts`); unset: by the model's name.
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
    """One form of an export. Made anew for each export, so it may count."""

    name: str
    suffix: str
    """Of its files, with the dot."""

    def rows(self, group: StoredGroup, kept: Sequence[StoredRollout]) -> Iterator[Row]:
        """The rows of `group`, of which only `kept` (in their order, at least one) are wanted."""
        ...


class Writer(Protocol):
    """Puts rows into files of a folder."""

    def open(self, folder: Path, shard_rows: int) -> None:
        """`folder` is empty and is there."""

    def put(self, row: Row) -> None:
        """Takes one row. Raises StoreError: it cannot be written."""

    def close(self) -> list[Written]:
        """Ends all files, which are then whole, and tells of each."""
        ...


@runtime_checkable
class HasWriter(Protocol):
    """A format that has a writer of its own."""

    def writer(self) -> Writer:
        """A new one."""
        ...


FORMATS = {
    "atropos": ".atropos_format:Atropos",
    "messages": ".messages:Messages",
    "unified": ".unified_format:Unified",
    "dpo": ".dpo:Dpo",
    "traces": ".traces_format:Traces",
    "parquet": ".parquet:Parquet",
    "html": ".html:Html",
}
"""By name, `module:factory`; a factory takes Options."""


def format_of(name: str, options: Options) -> Format:
    """
    Raises:
        ConfigError: there is no such format, or what it needs is not installed.
    """
    if name not in FORMATS:
        raise ConfigError(
            f"There is no format {name!r} to export to.", hint=f"There are: {', '.join(FORMATS)}."
        )
    module, _, factory = FORMATS[name].partition(":")
    made: Format = getattr(importlib.import_module(module, __package__), factory)(options)
    return made
