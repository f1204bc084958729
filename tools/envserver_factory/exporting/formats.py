"""The formats of `envserver export`: one name and one small class each.

A format turns the kept rollouts of a group into rows. A row is a dict, which becomes a line of a
JSONL shard, or a `NamedFile`, which becomes a file. A format with another destination has a
`writer`. To add a format: a class, and a line in `FORMATS`.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import IO, Any, Protocol, runtime_checkable

import orjson
from envserver_records.errors import ConfigError, InputError, StoreError
from envserver_records.files import replace_folder, write_failure
from envserver_records.records import Message, chained, digest_after

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
        label: label of traces; "auto": by their rewards.
        margin: minimum difference between the rewards of a pair.
        jsonl: write JSONL where a format otherwise writes a file for each rollout.
        embed: sentence-transformers model for the steps of traces; "": no embeddings.
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

    def rows(self, group: StoredGroup, kept: Sequence[StoredRollout]) -> Iterator[Row]:
        """`kept`: rollouts of `group`, in order, at least one."""
        ...


class Writer(Protocol):
    """Writes rows into files of a folder."""

    def open(self, folder: Path, shard_rows: int | None) -> None:
        """Prepares to write into `folder`, which is empty, files of at most `shard_rows` rows.

        None: one file for all.
        """

    def put(self, row: Row) -> None:
        """Writes one row. Raises StoreError, or ConfigError: it does not fit into the one file."""

    def close(self) -> list[Written]:
        """Closes all files and returns them."""
        ...


@runtime_checkable
class HasWriter(Protocol):
    def writer(self) -> Writer:
        """Returns a new writer."""
        ...


FORMATS = {
    "atropos": "formats:Atropos",
    "messages": "formats:Messages",
    "unified": "readable:Unified",
    "dpo": "formats:Dpo",
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


MANIFEST = "MANIFEST.json"
Json = dict[str, Any]

_CHUNK = 1 << 20


class Files:
    def __init__(self, *, chained: bool = False) -> None:
        self._chained = chained

    def open(self, folder: Path, shard_rows: int | None) -> None:
        self._folder = folder
        self._shard_rows = shard_rows
        self._shard: IO[bytes] | None = None
        self._rows = 0
        self._shards: list[Written] = []
        self._has_named = False

    def put(self, row: Row) -> None:
        try:
            if isinstance(row, NamedFile):
                self._write_named(row)
            else:
                self._append(row)
        except OSError as error:
            raise failed(self._folder, error) from error

    def close(self) -> list[Written]:
        """Returns the shards; every other file in the folder is one row."""
        self._end_shard()
        return self._shards

    def _append(self, row: Json) -> None:
        if self._shard is None:
            path = self._folder / f"part-{len(self._shards):05d}.jsonl"
            self._shard, self._rows, self._previous = path.open("wb"), 0, ""
        if self._chained:
            row = {key: value for key, value in row.items() if key != "chain"}
        data = orjson.dumps(
            row, default=str, option=orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY
        )
        if self._chained:
            data = chained(data, self._previous)
            self._previous = digest_after(data)
        self._shard.write(data)
        self._rows += 1
        if self._rows == self._shard_rows:
            self._end_shard()

    def _end_shard(self) -> None:
        if self._shard is None:
            return
        with self._shard as file:
            file.flush()
            os.fsync(file.fileno())
        self._shards.append(Written(Path(file.name).name, self._rows))
        self._shard = None

    def _write_named(self, file: NamedFile) -> None:
        parts = file.path.split("/")
        if any(part in ("", ".", "..") for part in parts):
            raise InputError(f"{file.path!r} cannot be the name of a file.", place=file.path)
        if self._shard_rows is None and self._has_named:
            raise needs_folder("Each record is a file of its own")
        self._has_named = True
        path = self._folder.joinpath(*parts)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("xb") as made:
            made.write(file.data)


def writer_of(format: Format) -> Writer:
    return format.writer() if isinstance(format, HasWriter) else Files()


@dataclass(frozen=True)
class Place:
    """An export in progress: `folder` becomes `out`; `single`: one file with its manifest beside
    it.
    """

    folder: Path
    out: Path
    single: bool

    @property
    def manifest(self) -> Path:
        if self.single:
            return self.out.with_name(f"{self.out.name}.{MANIFEST}")
        return self.out / MANIFEST


@contextlib.contextmanager
def place_for(out: Path, *, overwrite: bool, single: bool) -> Iterator[Place]:
    """Makes an empty folder beside `out`; it is removed unless `finish` made it the export."""
    _check_free(out, overwrite)
    beside = out.absolute().parent / f".{out.name}.partial"
    try:
        beside.mkdir(parents=True, exist_ok=True)
        lock = (beside / "lock").open("w")
    except OSError as error:
        raise failed(out, error) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(f"Another process is exporting to {out}.") from error
        try:
            if (beside / "old").exists() and not out.exists():
                (beside / "old").rename(out)  # killed while it was being replaced
            folder = beside / "export"
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            yield Place(folder, out, single)
        finally:
            shutil.rmtree(beside, ignore_errors=True)


def finish(place: Place, written: list[Written], facts: Json, *, overwrite: bool) -> Json:
    """Writes the manifest, makes the folder the export; returns the number of `files`, their
    `bytes`.
    """
    rows = {one.path: one.rows for one in written}
    try:
        if place.single:
            _rename_single(place)
            rows = {place.out.name: sum(rows.values())}
        made = place.folder.parent / MANIFEST
        total = _write_manifest(made, place.folder, rows, facts)
        _move(place, made, overwrite)
    except OSError as error:
        raise failed(place.out, error) from error
    return total


def _rename_single(place: Place) -> None:
    files = [path for path in place.folder.rglob("*") if path.is_file()]
    if len(files) > 1:
        raise needs_folder(f"The export has {len(files)} files")
    if files:
        files[0].rename(place.folder / place.out.name)
    else:
        (place.folder / place.out.name).touch()


def needs_folder(reason: str) -> ConfigError:
    return ConfigError(f"{reason}: --out must be a folder, not one file.", hint="Use --out FOLDER.")


def failed(path: Path, error: OSError) -> StoreError:
    return write_failure(path, error, hint="No part of it was kept.")


def _check_free(out: Path, overwrite: bool) -> None:
    there = any(out.iterdir()) if out.is_dir() else out.exists()
    if there and not overwrite:
        raise ConfigError(f"{out} exists.", hint="Name another place, or --overwrite this one.")
    if there and out.is_dir() and not (out / MANIFEST).is_file():
        raise ConfigError(
            f"{out} was not made by an export: it has no {MANIFEST}.",
            hint="Name another place; only exports of envserver are replaced.",
        )


def _write_manifest(path: Path, folder: Path, rows: dict[str, int], facts: Json) -> Json:
    """Writes one file entry on each line, so that only one is in memory."""
    number = size = 0
    with path.open("wb") as out:
        out.write(b'{"files":[')
        for name, file in _files(folder):
            digest, length = _digest(file)
            entry = {"path": name, "bytes": length, "rows": rows.get(name, 1), "sha256": digest}
            out.write((b",\n" if number else b"\n") + orjson.dumps(entry))
            number += 1
            size += length
        rest = orjson.dumps(facts, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
        out.write(b"\n]," + rest.removeprefix(b"{"))
        out.flush()
        os.fsync(out.fileno())
    return {"files": number, "bytes": size}


def _files(folder: Path) -> Iterator[tuple[str, Path]]:
    for root, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted(names):
            path = Path(root, name)
            yield path.relative_to(folder).as_posix(), path


def _digest(path: Path) -> tuple[str, int]:
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            size += len(chunk)
    return digest.hexdigest(), size


def _move(place: Place, manifest: Path, overwrite: bool) -> None:
    out = place.out
    if place.single:
        manifest.replace(place.manifest)
        (place.folder / out.name).replace(out)
        return
    manifest.replace(place.folder / MANIFEST)
    replace_folder(place.folder, out, place.folder.parent / "old")


class Messages:
    """Rows {"messages", "reward", "env", "task_id"} (and "tools"), the best of a group first."""

    name = "messages"
    suffix = ".jsonl"

    def __init__(self, options: Options) -> None:
        del options

    def rows(self, group: StoredGroup, kept: Sequence[StoredRollout]) -> Iterator[Row]:
        for rollout in sorted(kept, key=lambda one: -(one.reward or 0.0)):
            if not is_conversation(rollout):
                continue
            row = {
                "messages": rollout.messages,
                "reward": rollout.reward,
                "env": rollout.env,
                "task_id": rollout.task_id,
            }
            yield {**row, "tools": rollout.tools} if rollout.tools else row


def is_conversation(rollout: StoredRollout) -> bool:
    return any(message.get("role") == "assistant" for message in rollout.messages)


class Dpo:
    """Pairs the best rollout of a group with the worst, the second best with the second worst, ...

    Rewards of a pair differ by at least `Options.margin`. `prompt + chosen` and `prompt + rejected`
    are the conversations; the prompt ends before the model's first message.
    """

    name = "dpo"
    suffix = ".jsonl"

    def __init__(self, options: Options) -> None:
        self._margin = options.margin

    def rows(self, group: StoredGroup, kept: Sequence[StoredRollout]) -> Iterator[Row]:
        usable = [one for one in kept if one.reward is not None and is_conversation(one)]
        ranked = sorted(usable, key=lambda one: -(one.reward or 0.0))
        for better, worse in zip(ranked, reversed(ranked), strict=True):
            difference = (better.reward or 0.0) - (worse.reward or 0.0)
            if difference <= 0 or difference < self._margin:
                return
            prompt = prompt_of(better.messages)
            if prompt and prompt == prompt_of(worse.messages):
                yield _pair(better, worse, prompt)


def prompt_of(messages: list[Message]) -> list[Message]:
    return list(takewhile(lambda message: message.get("role") != "assistant", messages))


def _pair(better: StoredRollout, worse: StoredRollout, prompt: list[Message]) -> Row:
    pair: dict[str, Any] = {
        "prompt": prompt,
        "chosen": better.messages[len(prompt) :],
        "rejected": worse.messages[len(prompt) :],
        "env": better.env,
        "task_id": better.task_id,
        "chosen_reward": better.reward,
        "rejected_reward": worse.reward,
    }
    return {**pair, "tools": better.tools} if better.tools else pair


_OF_ROWS = (
    *("tokens", "masks", "scores", "messages", "inference_logprobs", "ref_logprobs", "overrides"),
    *("advantages", "images", "distill_token_ids", "distill_logprobs"),
)
"""Keys of a line with one entry for each row."""


class Atropos:
    """Writes lines that every reader of `process` files understands, chained as those are."""

    name = "atropos"
    suffix = ".jsonl"

    def __init__(self, options: Options) -> None:
        del options

    def writer(self) -> Writer:
        return Files(chained=True)

    def rows(self, group: StoredGroup, kept: Sequence[StoredRollout]) -> Iterator[Row]:
        if len(kept) == len(group.rollouts):
            yield group.line
        else:
            yield kept_line(group, {rollout.rollout_id for rollout in kept})


def kept_line(group: StoredGroup, rollout_ids: set[str]) -> dict[str, Any]:
    """Returns the line with these rollouts only, without the whole group's advantages."""
    line = group.line
    rows: list[int] = []
    kept_rollouts = []
    for rollout in line["envserver"]["rollouts"]:
        if rollout["rollout_id"] in rollout_ids:
            begin = len(rows)
            rows += rollout["rows"]
            kept_rollouts.append({**rollout, "rows": list(range(begin, len(rows)))})
    columns = {key: [line[key][row] for row in rows] for key in _OF_ROWS if line.get(key)}
    envserver = {**line["envserver"], "rollouts": kept_rollouts}
    return {**line, **columns, "advantages": None, "envserver": envserver}
