"""The numbers of the last hours, so that a page that is opened late has its curves. Memory is
bounded: the oldest row leaves when a row comes, and names beyond `MOST_NAMES` are not kept.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray
from prometheus_client.core import Metric

from .measures import KEPT

MOST_NAMES: Final = 2000


class Name(msgspec.Struct, frozen=True):
    """`labels` are sorted by name."""

    name: str
    labels: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, name: str, labels: Mapping[str, str]) -> Name:
        return cls(name, tuple(sorted(labels.items())))


Numbers = Mapping[Name, float]
Row = tuple[float, Numbers]
"""When (seconds since 1970), and the numbers then."""


def numbers_of(families: Iterable[Metric]) -> dict[Name, float]:
    return {
        Name.of(sample.name, sample.labels): float(sample.value)
        for family in families
        for sample in family.samples
        if sample.name in KEPT
    }


def as_json(numbers: Numbers) -> str:
    """[[name, labels, value], ...]"""
    listed = [(number.name, number.labels, value) for number, value in numbers.items()]
    return msgspec.json.encode(listed).decode()


def from_json(text: str) -> dict[Name, float]:
    listed = msgspec.json.decode(text, type=list[_Listed])
    return {Name(name, labels): value for name, labels, value in listed if value is not None}


_Listed = tuple[str, tuple[tuple[str, str], ...], float | None]


class History:
    def __init__(self, most_rows: int) -> None:
        self._columns: dict[Name, int] = {}
        self._rows: deque[tuple[float, NDArray[np.float64]]] = deque(maxlen=most_rows)

    def add(self, at: float, numbers: Numbers) -> None:
        for name in numbers:
            if name not in self._columns and len(self._columns) < MOST_NAMES:
                self._columns[name] = len(self._columns)
        row = np.full(len(self._columns), np.nan)
        for name, value in numbers.items():
            if (column := self._columns.get(name)) is not None:
                row[column] = value
        self._rows.append((at, row))

    @property
    def begins(self) -> float:
        """The time of the oldest row; infinity without rows."""
        return self._rows[0][0] if self._rows else math.inf

    def columns(self, start: float) -> tuple[NDArray[np.float64], dict[Name, NDArray[np.float64]]]:
        """The times and samples from `start`; NaN: there was none. From any thread."""
        rows, names = list(self._rows), dict(self._columns)  # first the rows: names only grow
        rows = [row for row in rows if row[0] >= start]
        filled = np.full((len(rows), len(names)), np.nan)
        for place, (_, row) in enumerate(rows):
            filled[place, : len(row)] = row
        columns = {name: filled[:, column] for name, column in names.items()}
        return np.array([at for at, _ in rows]), columns

    def between(self, start: float, end: float) -> list[Row]:
        """Both times included; from any thread."""
        rows, names = list(self._rows), list(self._columns)  # first the rows: names only grow
        return [
            (at, {names[column]: float(row[column]) for column in np.flatnonzero(~np.isnan(row))})
            for at, row in rows
            if start <= at <= end
        ]


def curves(rows: Sequence[Row], points: int, wanted: frozenset[str]) -> dict[str, Any]:
    """Thins rows (in order of time) out to `points` at most: the last row of each span counts.
    Returns `times`, and `series`: name, labels, and a value for each time (None: there was none).
    `wanted`: names of the samples; empty: all."""
    thinned = rows
    if len(rows) > points:
        places = np.linspace(len(rows) - 1, 0, points).astype(int)[::-1]
        thinned = [rows[place] for place in dict.fromkeys(places.tolist())]
    names = dict.fromkeys(
        name for _, numbers in thinned for name in numbers if not wanted or name.name in wanted
    )
    return {
        "times": [at for at, _ in thinned],
        "series": [
            {
                "name": name.name,
                "labels": dict(name.labels),
                "values": [numbers.get(name) for _, numbers in thinned],
            }
            for name in names
        ],
    }
