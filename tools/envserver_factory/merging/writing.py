"""What is merged (`Recipe`), and how it is written: in pieces; folders appear when complete.

A recipe is `base + alpha * (w1 * (plus1 - minus1) + w2 * (plus2 - minus2) + ...)`: task arithmetic
(Ilharco et al., "Editing Models with Task Arithmetic", 2022). An aborted merge
leaves nothing but the folders that existed before.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import math
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from envserver_records.errors import ConfigError, ConflictError, StoreError, StoreFull
from envserver_records.files import replace_folder, sha256_of, sync_tree
from envserver_records.tasks import Json

from envserver.version import __version__

from .tensors import INDEX, File, Model


@dataclass(frozen=True)
class Vector:
    """A difference of two models and its weight; `minus` None stands for the base.

    `plus` may also be the file of a task vector, which is the difference itself.
    """

    plus: Path
    minus: Path | None = None
    weight: float = 1.0


@dataclass(frozen=True)
class Recipe:
    base: Path
    vectors: tuple[Vector, ...]
    alphas: tuple[float, ...] = (1.0,)

    def __post_init__(self) -> None:
        if not self.vectors:
            raise ConfigError(
                "Nothing was given to add to the base.",
                hint="--rl DIR --sft DIR adds alpha * (rl - sft); --add DIR=0.3 adds a part of "
                "what DIR has beyond the base.",
            )
        if not self.alphas or len(set(self.alphas)) < len(self.alphas):
            raise ConfigError("--alpha needs numbers, each once.")
        for vector in self.vectors:
            if vector.minus is not None and (vector.plus.is_file() or vector.minus.is_file()):
                raise ConfigError(
                    "--rl and --sft take models; a task vector is a difference already.",
                    hint="Add it with --add FILE.",
                )
        for number in (*self.alphas, *(vector.weight for vector in self.vectors)):
            if not math.isfinite(number):
                raise ConfigError(f"{number} is not a weight: it must be finite.")

    def formula(self, alpha: str = "alpha") -> str:
        inside = self.difference()
        return f"{self.base.name} + {alpha} * {inside if len(self.vectors) == 1 else f'({inside})'}"

    def difference(self) -> str:
        return " + ".join(
            f"{'' if vector.weight == 1 else f'{vector.weight:g} * '}{self._difference(vector)}"
            for vector in self.vectors
        )

    def _difference(self, vector: Vector) -> str:
        if vector.plus.is_file():
            return vector.plus.name
        return f"({vector.plus.name} - {(vector.minus or self.base).name})"


def parse_parts(words: Sequence[str]) -> tuple[Vector, ...]:
    """Parses `DIR=0.3` as a difference from the base, `FILE=0.3` as a task vector; weight 1 without
    `=`."""
    vectors = []
    for word in words:
        folder, equals, weight = word.rpartition("=")
        if not equals:
            folder, weight = word, "1"
        try:
            vectors.append(Vector(Path(folder), None, float(weight)))
        except ValueError as error:
            raise ConfigError(
                f"--add {word}: {weight!r} is not a number.", hint="For example: --add DIR=0.3"
            ) from error
    return tuple(vectors)


RECIPE = "merge.json"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_ALIGNMENT = 8
_UNFINISHED = ".merging-"
_YOUNG_SECONDS = 10


class WeightsWriter:
    """Writes the bytes of tensors in order, into a file with the header of `like`."""

    def __init__(self, path: Path, like: File) -> None:
        self.path = path
        self._digest = hashlib.sha256()
        self._missing = sum(tensor.size for tensor in like.tensors)
        self._file = path.open("wb", buffering=0)
        self._put(_header(like))

    def write(self, data: Any) -> None:
        view = memoryview(data).cast("B")
        self._missing -= len(view)
        self._put(view)

    def close(self) -> str:
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
    header: Json = {"__metadata__": dict(like.metadata)} if like.metadata else {}
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
    tensors = [tensor for file in files for tensor in file.tensors]
    index = {
        "metadata": {"total_size": sum(tensor.size for tensor in tensors)},
        "weight_map": {tensor.name: tensor.file.name for tensor in tensors},
    }
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def check_places(places: Sequence[Path], size: int, *, overwrite: bool) -> None:
    """Checks that `places` are free and the disk has `size` bytes; removes leftovers."""
    for place in places:
        taken = place.is_file() or (place.is_dir() and any(place.iterdir()))
        ours = (place / RECIPE).is_file()
        if taken and not (overwrite and ours):
            hint = "Use --overwrite to replace it." if ours else "Not a merged model: name another."
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
    """Yields folders that become `places` (all of one parent) at the end, or nothing."""
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
            hint="Make room, then merge again." if full else "Partly written files were removed.",
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


_COPIED = (
    "*.json",
    "*.jinja",
    "*.txt",
    "*.model",
    "*.tiktoken",
    "*.py",
    "LICENSE*",
    "NOTICE*",
)
_OURS = ("*.index.json", RECIPE, "make_tiny.json", "trainer_state.json", "adapter_*.json")
_TEMPLATES = "additional_chat_templates"


def copy_rest(base: Path, folder: Path) -> list[str]:
    """Copies all but the weights: config, tokenizer, template; returns the names."""
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


# Inputs are named by their folder's name and the sha256 of their weights, never by a path.

_DIGITS = 16
"""Digits of a sha256 in the card; merge.json has all."""


@dataclass(frozen=True)
class Facts:
    method: str
    inputs: list[Json]
    """Each with the folder's name, and the sha256 of its files."""
    vectors: list[Json]
    notes: list[str]
    versions: dict[str, str]


@dataclass(frozen=True)
class Made:
    """One merged model: sha256 of its weights, and names of files copied from the base."""

    formula: str
    alpha: float | None
    files: dict[str, str]
    copied: list[str]


def facts_of(
    recipe: Recipe,
    models: Mapping[Path, Model],
    notes: Sequence[str],
    *,
    method: str = "task arithmetic",
    versions: Mapping[str, str] | None = None,
) -> Facts:
    """Collects the facts; reads every input's weights once more for their sha256."""
    digests: dict[Path, str] = {}
    inputs = []
    for folder, model in models.items():
        for path in model.files():
            digests[path] = digests.get(path) or sha256_of(path)
        files = {_file(folder, path): digests[path] for path in model.files()}
        inputs.append({"name": _name(folder), "files": files})
    vectors = [
        {
            "plus": _name(vector.plus),
            "minus": _name(vector.minus or recipe.base),
            "weight": vector.weight,
        }
        for vector in recipe.vectors
    ]
    ours = {"envserver": __version__, "numpy": np.__version__, "python": platform.python_version()}
    return Facts(method, inputs, vectors, list(notes), {**ours, **(versions or {})})


def write_card(folder: Path, facts: Facts, made: Made) -> None:
    recipe = {**asdict(facts), **asdict(made)}
    text = json.dumps(recipe, indent=2, ensure_ascii=False) + "\n"
    (folder / RECIPE).write_text(text, encoding="utf-8")
    (folder / "README.md").write_text(_card(facts, made), encoding="utf-8")


def _card(facts: Facts, made: Made) -> str:
    lines = [
        "---",
        "library_name: transformers",
        "tags: [merge, task-arithmetic]" if made.alpha is not None else "tags: [merge, mergekit]",
        "---",
        "",
        "# Merged model",
        "",
        f"    {made.formula}",
        "",
    ]
    if made.alpha is not None:
        lines += [
            "Computed in float32 (float64 where a weight is), rounded once to the base's dtype.",
            "",
        ]
    lines += ["| input | weights | sha256 |", "|---|---|---|"]
    lines += [
        f"| {model['name']} | {file} | `{digest[:_DIGITS]}` |"
        for model in facts.inputs
        for file, digest in model["files"].items()
    ]
    lines += ["", *(f"- {note}." for note in facts.notes), *([""] if facts.notes else [])]
    versions = ", ".join(f"{name} {version}" for name, version in facts.versions.items())
    if made.copied:
        lines += [f"Copied from the base: {', '.join(made.copied)}.", ""]
    lines += [f"Made with {versions}; `{RECIPE}` has all of it.", ""]
    return "\n".join(lines)


def _name(folder: Path) -> str:
    return folder.name or folder.resolve().name


def _file(folder: Path, path: Path) -> str:
    return path.name if path.parent == folder else f"{path.parent.name}/{path.name}"
