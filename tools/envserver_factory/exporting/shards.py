"""Writes rows into files: an export is complete, with checksums of its files, or absent.

In: rows. Out: a folder with JSONL shards (`part-00000.jsonl`, ...), separate files, or those of
a format's own writer, and `MANIFEST.json`; or one single file with its manifest beside it. All
is written to a hidden folder beside, which is renamed at the end; the next export removes that of
a killed one.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import orjson
from envserver_records.errors import ConfigError, InputError, StoreError
from envserver_records.files import replace_folder, write_failure
from envserver_records.records import chained, digest_after

from .formats import Format, HasWriter, NamedFile, Row, Writer, Written

MANIFEST = "MANIFEST.json"
Json = dict[str, Any]

_CHUNK = 1 << 20


class Files:
    """The writer of all formats without one of their own."""

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
    """Returns the format's own writer, else `Files`."""
    return format.writer() if isinstance(format, HasWriter) else Files()


@dataclass(frozen=True)
class Place:
    """The place of an export in progress.

    Args:
        folder: its contents become the export.
        out: the final place; `single`: one file, with the manifest beside it.
    """

    folder: Path
    out: Path
    single: bool

    @property
    def manifest(self) -> Path:
        """Returns the final place of the manifest."""
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
    """Writes the manifest, and makes the folder the export.

    Returns:
        The number of `files`, and their `bytes`.
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
    """Returns the error for an export to one file that needs several."""
    return ConfigError(f"{reason}: --out must be a folder, not one file.", hint="Use --out FOLDER.")


def failed(path: Path, error: OSError) -> StoreError:
    """Converts an error of the operating system to a typed one."""
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
