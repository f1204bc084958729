"""Converts the rows of data sets to tasks: counts what became of each row, mixes several sets.

Also copies built-in data, for `envserver sample`.
"""

from __future__ import annotations

import inspect
import random
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from envserver import Environment, InputError, Task
from envserver.row_counts import RowCounts

from .rows import NumberedRow, Row

T = TypeVar("T")


class DataEnvironment(Environment):
    """An environment of rows: counts what became of each, and can write its built-in files."""

    sample_files: ClassVar[Mapping[str, str]] = {}
    """Settings that read files, with the path of each in the folder `data` ("": all of it)."""

    def __init__(self, config: Environment.Config | None = None) -> None:
        super().__init__(config)
        self.rows = RowCounts()

    @classmethod
    def write_sample(cls, folder: Path) -> Mapping[str, Any]:
        owner = next(kind for kind in cls.__mro__ if "sample_files" in vars(kind))
        return copied(Path(inspect.getfile(owner)).parent / "data", folder, cls.sample_files)


def made(
    rows: Iterable[NumberedRow], make: Callable[[Row, NumberedRow], T]
) -> Iterator[tuple[str, T | str]]:
    """Yields the place of each row, and what `make` returns for it.

    Where the row cannot be read, or `make` raises InputError, the message takes its place.
    """
    for one in rows:
        try:
            if one.row is None:
                raise InputError(one.problem)
            result: T | str = make(one.row, one)
        except InputError as error:
            result = error.message
        yield one.place, result


def mixed(streams: Iterable[Iterator[Task]], seed: str) -> Iterator[Task]:
    """Draws from all streams with equal chances until each has ended."""
    rng, left = random.Random(seed), list(streams)
    while left:
        stream = rng.choice(left)
        task = next(stream, None)
        if task is None:
            left.remove(stream)
        else:
            yield task


def copied(data: Path, folder: Path, settings: Mapping[str, str]) -> dict[str, Path]:
    """Copies files and folders of an environment's `data` to `folder`.

    Args:
        settings: the setting that reads each, with its path in `data` ("": all of `data`).

    Returns:
        The settings, with the paths of the copies.
    """
    copies = {name: folder / path for name, path in settings.items()}
    for name, path in settings.items():
        source = data / path
        if source.is_dir():
            shutil.copytree(source, copies[name], dirs_exist_ok=True)
        else:
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, copies[name])
    return copies
