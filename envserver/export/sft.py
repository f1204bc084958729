"""Groups as rows for supervised training, in the form of `atropos-sft-gen`.

In: scored groups. Out: JSONL, one row on each line: {"messages", "score"}, or {"prefix",
"completion", "score"}. What holds: a row's score is its rollout's, the rows of a group are sorted
from the best, and rows already in the file stay there.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import orjson
from envserver_records.errors import ConfigError, StoreError
from envserver_records.records import Group, Trajectory

from .output_file import append_durably, cut_torn_line

Decode = Callable[[list[int]], str]


@dataclass(frozen=True)
class Choice:
    """The choice of a group's rows.

    Args:
        top: maximum number, the best ones.
        allow_negative: also keep scores of 0 or less.
        min_difference: keep scores that exceed the group's worst by more than this; 0: all.
        pm1: scores are mapped from [0, 1] to [-1, 1].
    """

    top: int
    allow_negative: bool = False
    min_difference: float = 0.0
    pm1: bool = False


def rows_of(group: Group, choice: Choice, decode: Decode | None) -> list[dict[str, Any]]:
    """Returns the rows of `group` that `choice` keeps, best first.

    Args:
        decode: token ids -> text: one row for each sequence, cut before its first sampled token;
            None: one row for each rollout, its conversation.
    """
    scored = [
        (score if not choice.pm1 else 2.0 * score - 1.0, trajectory)
        for trajectory in group.trajectories
        if (score := trajectory.score.reward) is not None
    ]
    worst = min((score for score, _ in scored), default=0.0)
    rows = [
        {**contents, "score": score}
        for score, trajectory in sorted(scored, key=lambda pair: -pair[0])
        if (choice.allow_negative or score > 0)
        and (choice.min_difference <= 0 or score - worst > choice.min_difference)
        for contents in _contents(trajectory, decode)
    ]
    return rows[: choice.top]


def _contents(trajectory: Trajectory, decode: Decode | None) -> Iterator[dict[str, Any]]:
    if decode is None:
        if trajectory.messages:
            yield {"messages": trajectory.messages}
        return
    for sequence in trajectory.sequences:
        sampled = np.flatnonzero(sequence.mask)
        if not len(sampled):
            continue
        ids = sequence.tokens.tolist()
        prefix, whole = decode(ids[: int(sampled[0])]), decode(ids)
        if whole.startswith(prefix):
            yield {"prefix": prefix, "completion": whole[len(prefix) :]}
        else:  # a character of several tokens crosses the cut
            yield {"prefix": prefix, "completion": decode(ids[int(sampled[0]) :])}


class SftSink:
    """A JSONL file as a GroupSink, until it has `wanted` new rows. A context manager.

    Args:
        append: continue an existing file.
    """

    def __init__(
        self, path: Path, choice: Choice, decode: Decode | None, *, wanted: int, append: bool
    ) -> None:
        self.path = path
        self.rows = 0
        self.full = asyncio.Event()
        self._choice = choice
        self._decode = decode
        self._wanted = wanted
        self._done: set[str] = set()
        self._lock = asyncio.Lock()
        self._file = _opened(path, append=append)

    def __enter__(self) -> SftSink:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    async def put(self, group: Group) -> None:
        """Appends as many rows of `group` as are still wanted, and syncs them to disk.
        Raises StoreError: they cannot be written; the file is unchanged.
        """
        rows = await asyncio.to_thread(rows_of, group, self._choice, self._decode)
        async with self._lock:
            rows = rows[: self._wanted - self.rows]
            if group.group_id in self._done:
                return
            lines = b"".join(orjson.dumps(row) + b"\n" for row in rows)
            await asyncio.to_thread(append_durably, self._file, lines)
            self._done.add(group.group_id)
            self.rows += len(rows)
            if self.rows >= self._wanted:
                self.full.set()

    async def known(self, group_ids: list[str]) -> set[str]:
        """Returns those whose rows are in the file."""
        return self._done.intersection(group_ids)

    async def wait_for_capacity(self) -> None:
        """Returns at once: a file always has capacity."""


def _opened(path: Path, *, append: bool) -> IO[bytes]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a+b", 0)
    except OSError as error:
        raise StoreError(f"{path} cannot be opened: {error.strerror}.") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        raise ConfigError(f"Another process is writing {path}.") from error
    if file.seek(0, os.SEEK_END) and not append:
        file.close()
        raise ConfigError(f"{path} exists.", hint="--append-to-previous appends to it.")
    cut_torn_line(file)
    return file
