"""Data for supervised fine-tuning: by tool from unified trajectories, or from whole data sets.

Formats and orders are those of the public repositories ojo1996/VideoMultiAgents_HOEY
(scripts/build_sft_datasets.py) and ALikesToCode/CourseGPT-Pro-DSAI-Lab-Group-6
(prepare_vertex_tuning_dataset.py).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import shutil
import tempfile
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from envserver_records.errors import ConfigError
from envserver_records.files import replace_folder, storing
from envserver_records.tasks import Json


@contextlib.contextmanager
def new_folder(place: Path, *, mark: str) -> Iterator[Path]:
    """Yields a folder that becomes `place` at the end; one that has the file `mark` may be
    replaced."""
    _refuse(place, mark)
    place = place.absolute()
    beside = place.with_name(f".{place.name}.{os.getpid()}")
    with storing(place):
        place.parent.mkdir(parents=True, exist_ok=True)
        beside.mkdir()
    try:
        yield beside
        with storing(place):
            _put(beside, place)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def write_lines(path: Path, lines: Iterable[bytes]) -> str:
    """Writes a file and its parent folders; returns the sha256 in hexadecimal."""
    digest = hashlib.sha256()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        for line in lines:
            digest.update(line)
            file.write(line)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def write_summary(path: Path, summary: Json) -> None:
    """Writes JSON for people: two spaces, keys in order, no newline at the end."""
    write_lines(path, [json.dumps(summary, indent=2).encode()])


def _refuse(place: Path, mark: str) -> None:
    if place.is_dir():
        if any(place.iterdir()) and not (place / mark).is_file():
            raise ConfigError(
                f"{place} holds other files: it has no {mark}.", hint="Name a new or empty folder."
            )
    elif place.exists() or place.is_symlink():
        raise ConfigError(f"{place} is not a folder.")


def _put(beside: Path, place: Path) -> None:
    """Renames; the old folder is removed only once the new one is in place."""
    old = place.with_name(f".{place.name}.{os.getpid()}.old")
    replace_folder(beside, place, old)
    shutil.rmtree(old, ignore_errors=True)


class Spool:
    """An unnamed temporary file of rows. A context manager."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - closed by __exit__
        self._offsets = array("Q")
        self._sizes = array("Q")
        self._end = 0

    def __enter__(self) -> Spool:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __len__(self) -> int:
        return len(self._offsets)

    def add(self, row: Json) -> int:
        """Returns the row's number, from 0."""
        line = as_line(row)
        self._file.seek(self._end)
        self._file.write(line)
        self._offsets.append(self._end)
        self._sizes.append(len(line))
        self._end += len(line)
        return len(self._offsets) - 1

    def lines(self, numbers: Iterable[int]) -> Iterator[bytes]:
        for number in numbers:
            self._file.seek(self._offsets[number])
            yield self._file.read(self._sizes[number])


def as_line(row: Json) -> bytes:
    """Returns `row` as a line of JSONL: letters unescaped, keys in order.

    An unpaired surrogate is escaped; a value unknown to JSON (a date of a table) becomes text.
    """
    try:
        return json.dumps(row, ensure_ascii=False, default=str).encode() + b"\n"
    except UnicodeEncodeError:
        return json.dumps(row, default=str).encode() + b"\n"


# Every row is in exactly one part, except for `split_tool` without `strict`, whose only row is in
# both. Orders come from one `random.Random(seed)` over lists in reading order.


class Held(NamedTuple):
    train: list[int]
    val: list[int]


class Three(NamedTuple):
    train: list[int]
    validation: list[int]
    test: list[int]


def split_three(
    count: int, *, seed: int, val_ratio: float = 0.10, test_ratio: float = 0.05
) -> Three:
    """Shuffles the numbers of `count` rows: first train, then validation, test last."""
    if val_ratio < 0 or test_ratio < 0 or val_ratio + test_ratio >= 1:
        raise ValueError(f"{val_ratio} and {test_ratio} leave nothing to train on")
    order = list(range(count))
    random.Random(seed).shuffle(order)
    validation, test = int(count * val_ratio), int(count * test_ratio)
    train = count - validation - test
    return Three(order[:train], order[train : train + validation], order[train + validation :])


def split_tools(
    counts: Mapping[str, int], *, seed: int, val_ratio: float = 0.05, strict: bool = False
) -> dict[str, Held]:
    """Shuffles the row numbers of each tool; the first ones are held out, at least one.

    `counts` has the tools in the order in which they first appear: one random generator shuffles
    them one after the other. `strict`: a tool's only row is for training; else it is in both parts.
    """
    rng = random.Random(seed)
    held: dict[str, Held] = {}
    for tool, count in counts.items():
        order = list(range(count))
        rng.shuffle(order)
        if count > 1:
            cut = max(1, int(count * val_ratio))
            held[tool] = Held(order[cut:], order[:cut])
        else:
            held[tool] = Held(order, [] if strict else list(order))
    return held


def split_tools_by_group(
    groups: Mapping[str, Sequence[str]], *, seed: int, val_ratio: float = 0.05
) -> dict[str, Held]:
    """Splits by groups of rows: a group (a task) is held out for all tools, or for none.

    Every tool with several groups has rows in both parts wherever possible. `groups`: for each
    tool, in the order in which the tools first appear, the group of each row.
    """
    rng = random.Random(seed)
    names = list(dict.fromkeys(name for rows in groups.values() for name in rows))
    rng.shuffle(names)
    out = _held_out(names, groups, val_ratio)
    held: dict[str, Held] = {}
    for tool, rows in groups.items():
        order = list(range(len(rows)))
        rng.shuffle(order)
        held[tool] = Held(
            [number for number in order if rows[number] not in out],
            [number for number in order if rows[number] in out],
        )
    return held


def _held_out(
    names: Sequence[str], groups: Mapping[str, Sequence[str]], val_ratio: float
) -> set[str]:
    """Returns the held-out groups; each tool keeps one for training."""
    tools_of: dict[str, list[str]] = {name: [] for name in names}
    left: dict[str, int] = {}
    for tool, rows in groups.items():
        own = set(rows)
        left[tool] = len(own)
        for name in own:
            tools_of[name].append(tool)
    out: set[str] = set()

    def take(name: str) -> bool:
        if name in out or any(left[tool] < 2 for tool in tools_of[name]):
            return False
        out.add(name)
        for tool in tools_of[name]:
            left[tool] -= 1
        return True

    wanted = max(1, int(len(names) * val_ratio))
    for name in names:
        if len(out) >= wanted:
            break
        take(name)
    for rows in groups.values():
        own = set(rows)
        if not own & out:
            any(take(name) for name in names if name in own)
    return out
