"""Writes merged weights: safetensors files in pieces, folders that appear when complete.

In: the description of each file, then the numbers in that order. Out: files with the layout of the
base's. A folder gets its name only when all of it is on disk; an aborted merge leaves nothing but
the folders that existed before.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from envserver_records.errors import ConflictError, StoreError, StoreFull
from envserver_records.files import replace_folder, sync_tree

from .tensors import INDEX, File

RECIPE: Final = "merge.json"
"""Name of the machine-readable recipe in each merged folder."""
_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_ALIGNMENT: Final = 8
_UNFINISHED: Final = ".merging-"
_YOUNG_SECONDS: Final = 10


class WeightsWriter:
    """Writes one safetensors file; `write` takes the tensors' bytes in order.

    Args:
        like: the file whose names, dtypes, shapes, order and metadata are used.
    """

    def __init__(self, path: Path, like: File) -> None:
        self.path = path
        self._digest = hashlib.sha256()
        self._missing = sum(tensor.size for tensor in like.tensors)
        self._file = path.open("wb", buffering=0)
        self._put(_header(like))

    def write(self, data: Any) -> None:
        """Writes the next bytes (anything with a buffer)."""
        view = memoryview(data).cast("B")
        self._missing -= len(view)
        self._put(view)

    def close(self) -> str:
        """Syncs the file to disk; returns its sha256."""
        if self._missing:
            raise ValueError(f"{self.path.name} lacks {self._missing} bytes")
        os.fsync(self._file.fileno())
        self._file.close()
        return self._digest.hexdigest()

    def give_up(self) -> None:
        self._file.close()

    def _put(self, data: bytes | memoryview) -> None:
        self._digest.update(data)
        rest = memoryview(data)
        while rest:
            rest = rest[self._file.write(rest) :]


def _header(like: File) -> bytes:
    header: dict[str, Any] = {"__metadata__": dict(like.metadata)} if like.metadata else {}
    start = 0
    for tensor in like.tensors:
        offsets = [start, start + tensor.size]
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": offsets,
        }
        start += tensor.size
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def write_index(folder: Path, files: Sequence[File]) -> None:
    """Writes the index of shards, where there are several."""
    tensors = [tensor for file in files for tensor in file.tensors]
    index = {
        "metadata": {"total_size": sum(tensor.size for tensor in tensors)},
        "weight_map": {tensor.name: tensor.file.name for tensor in tensors},
    }
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def check_places(places: Sequence[Path], size: int, *, overwrite: bool) -> None:
    """Checks that all of `places` are free and the disk has `size` bytes, after removing leftovers
    of killed merges.
    """
    for place in places:
        taken = place.is_file() or (place.is_dir() and any(place.iterdir()))
        ours = (place / RECIPE).is_file()
        if taken and not (overwrite and ours):
            hint = (
                "Replace it by --overwrite." if ours else "It is not a merged model: name another."
            )
            raise ConflictError(f"{place} exists.", hint=hint)
    if not places:
        return
    above = places[0].absolute().parent
    try:
        above.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(f"{above} cannot be made: {error.strerror}.") from error
    _clear_leftovers(above)
    free = shutil.disk_usage(above).free
    if free < size:
        raise StoreFull(
            f"{above} has room for {free / 1e9:.1f} GB; the models take {size / 1e9:.1f} GB.",
            hint="Nothing was written: make room, or merge fewer alphas at a time.",
        )


@contextmanager
def appearing(places: Sequence[Path]) -> Iterator[list[Path]]:
    """Yields folders that become `places` (all of one parent) at the end; after an error nothing
    of them remains.
    """
    if not places:
        yield []
        return
    above = places[0].absolute().parent
    try:
        with tempfile.TemporaryDirectory(prefix=_UNFINISHED, dir=above) as name, _held(Path(name)):
            unfinished = [Path(name) / str(number) for number in range(len(places))]
            for folder in unfinished:
                folder.mkdir()
            yield unfinished
            for folder, place in zip(unfinished, places, strict=True):
                _rename(folder, place)
    except OSError as error:
        full = error.errno in _FULL
        raise (StoreFull if full else StoreError)(
            f"No merged model could be made in {above}: {error.strerror or error}.",
            hint="Make room, then merge again." if full else "Nothing half written was left.",
        ) from error


@contextmanager
def _held(folder: Path) -> Iterator[bool]:
    """Locks a folder for the life of its process; yields whether that succeeded."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # locked by another process, or a file system without locks
            yield False
        else:
            yield True
    finally:
        os.close(handle)


def _clear_leftovers(above: Path) -> None:
    """Removes the leftovers of killed merges: folders that no process has locked.

    A folder with a model that was being replaced stays: it may be the only copy. So does a recent
    one: it is not locked between its creation and its lock.
    """
    for folder in above.glob(f"{_UNFINISHED}*"):
        try:
            age_seconds = time.time() - folder.stat().st_mtime
            if age_seconds < _YOUNG_SECONDS or any(folder.glob("*-old")):
                continue
            with _held(folder) as is_dead:
                if is_dead:
                    shutil.rmtree(folder, ignore_errors=True)
        except OSError:  # not a folder, not ours, or gone meanwhile: the merge does not need it
            continue


def _rename(folder: Path, place: Path) -> None:
    sync_tree(folder)
    replace_folder(folder, place, folder.with_name(f"{folder.name}-old"))


_COPIED: Final = (
    "*.json",
    "*.jinja",
    "*.txt",
    "*.model",
    "*.tiktoken",
    "*.py",
    "LICENSE*",
    "NOTICE*",
)
_OURS: Final = ("*.index.json", RECIPE, "make_tiny.json", "trainer_state.json", "adapter_*.json")
_TEMPLATES: Final = "additional_chat_templates"


def copy_rest(base: Path, folder: Path) -> list[str]:
    """Copies config, tokenizer, chat template and generation config: all but the weights.

    Returns:
        Names of the files.
    """
    copied = []
    for path in sorted({path for pattern in _COPIED for path in base.glob(pattern)}):
        if path.is_file() and not any(path.match(pattern) for pattern in _OURS):
            shutil.copyfile(path, folder / path.name)
            copied.append(path.name)
    if (base / _TEMPLATES).is_dir():
        shutil.copytree(base / _TEMPLATES, folder / _TEMPLATES)
    return copied


Report = Callable[[int], None]
"""Called with the number of further bytes done."""
