"""The work of `envserver sft-gen`: runs an environment and writes its best rollouts as rows.

Rows already written stay in the file, however the run ends.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING

import numpy as np
import orjson
from envserver_records.errors import ConfigError
from envserver_records.records import Group, Json, Trajectory
from envserver_records.waiting import cancel_and_wait

from envserver.environment import Environment
from envserver.export.jsonl import append_durably, cut_torn_line, lock, open_appending
from envserver.models.catalogue import find_tokenizer
from envserver.rollouts.events import Event, Observer
from envserver.rollouts.scheduler import Scheduler
from envserver.rollouts.stream import group_requests
from envserver.running.context import rollout_context
from envserver.running.group_run import Show
from envserver.running.metrics import Tally
from envserver.running.mix import RunSpec
from envserver.running.stopping import Ending, Stop, run_until_stopped

if TYPE_CHECKING:
    from .commands.environments import SftSettings

Decode = Callable[[list[int]], str]


def rows_of(group: Group, settings: SftSettings, decode: Decode | None, *, pm1: bool) -> list[Json]:
    """Returns the rows of `group` that `settings` keep, best first.

    With `decode`, a row for each sequence, cut before its first sampled token; else one for each
    rollout, its conversation. `pm1`: scores are mapped from [0, 1] to [-1, 1].
    """
    scored = [
        (score if not pm1 else 2.0 * score - 1.0, trajectory)
        for trajectory in group.trajectories
        if (score := trajectory.score.reward) is not None
    ]
    worst = min((score for score, _ in scored), default=0.0)
    difference = settings.minimum_score_diff_max_min
    rows = [
        {**contents, "score": score}
        for score, trajectory in sorted(scored, key=lambda pair: -pair[0])
        if (settings.allow_negative_scores or score > 0)
        and (difference <= 0 or score - worst > difference)
        for contents in _contents(trajectory, decode)
    ]
    return rows[: settings.save_top_n_per_group]


def _contents(trajectory: Trajectory, decode: Decode | None) -> Iterator[Json]:
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
    """A JSONL file as a GroupSink, until it has the wanted new rows. A context manager."""

    def __init__(self, settings: SftSettings, *, pm1: bool) -> None:
        self.rows = 0
        self.full = asyncio.Event()
        decode = None if settings.save_messages else _decoder(settings.tokenizer)
        self._rows_of = partial(rows_of, settings=settings, decode=decode, pm1=pm1)
        self._wanted = settings.num_seqs_to_save
        self._done: set[str] = set()
        self._lock = asyncio.Lock()
        self._file = _opened(settings.filepath, append=settings.append_to_previous)

    def __enter__(self) -> SftSink:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    async def put(self, group: Group) -> None:
        """Appends as many rows of `group` as are still wanted, and syncs them to disk."""
        rows = await asyncio.to_thread(self._rows_of, group)
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
        return self._done.intersection(group_ids)

    async def wait_for_capacity(self) -> None:
        """Returns at once: a file always has capacity."""


def _opened(path: Path, *, append: bool) -> IO[bytes]:
    file = open_appending(path)
    try:
        lock(file, path)
        if file.seek(0, os.SEEK_END) and not append:
            raise ConfigError(f"{path} exists.", hint="--append-to-previous appends to it.")
        cut_torn_line(file)
    except ConfigError:
        file.close()
        raise
    return file


@dataclass(frozen=True)
class Generated:
    rows: int
    groups: int
    ending: Ending


async def generate(
    spec: RunSpec[SftSettings], environment: Environment, show: Show, stop: Stop
) -> Generated:
    """Writes rows until there are enough, all groups are made, or the run is stopped."""
    settings, tally = spec.settings, Tally()
    config = environment.config
    config.include_messages = True
    observers: list[Observer] = [tally]

    def observe(event: Event) -> None:
        for observer in observers:
            observer(event)

    with SftSink(settings, pm1=config.score_range == "pm1") as sink:
        async with rollout_context(
            settings,
            environment,
            spec.reference,
            observer=observe,
            need_exact=not settings.save_messages,
            drop_zero_variance=bool(config.ensure_scores_are_not_same),
        ) as context:
            scheduler = Scheduler(
                context,
                group_requests(environment, repeat=True),
                sink,
                wanted=config.total_steps,
                stop_on_failures=True,
            )
            with show(tally, config.total_steps, 0) as view:
                observers.append(view)
                ending = await run_until_stopped(_until_full(scheduler, sink), scheduler, stop)
    return Generated(sink.rows, tally.groups, ending)


def _decoder(tokenizer: str | None) -> Decode:
    from envserver.tokens.vocabulary import Vocabulary

    if tokenizer is None:
        raise ConfigError(
            "--tokenizer is needed to write text.",
            hint="Or use --save-messages.",
        )
    return Vocabulary.load(find_tokenizer(tokenizer)).decode


async def _until_full(scheduler: Scheduler, sink: SftSink) -> None:
    """Runs the stream until there are enough rows, then abandons open groups."""
    running = asyncio.create_task(scheduler.run())
    full = asyncio.create_task(sink.full.wait())
    try:
        await asyncio.wait({running, full}, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            running.result()
    finally:
        await cancel_and_wait(running, full)
