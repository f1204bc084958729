"""Sends the numbers of a run to trackers: `--track` of `process`, `serve` and `evaluate`.

In: events of rollouts and groups. Out: calls of trackers, each in a thread of its own. What holds:
a tracker that fails or hangs stops nothing; it is told once and then left alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Any, Final

import structlog
from envserver_records.cancelling import cancel_and_wait
from envserver_records.errors import ConfigError
from envserver_records.extras import missing_module_hint
from envserver_records.tracking import Tracker, TrackerName, open_tracker
from pydantic import BaseModel

from ..rollouts.events import Observer
from ..telemetry.redaction import redacted
from ..tracking_config import TrackingConfig
from .tracked_numbers import TrackedNumbers

_log = structlog.get_logger("envserver.tracking")

_MOST_CALLS: Final = 256
_QUIET: Final = {"MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false"}


class Tracking:
    """The trackers of one run; made by `tracking`.

    `step`: groups delivered, those of earlier runs included; set `already` before the first.
    """

    def __init__(self, numbers: TrackedNumbers, lanes: Sequence[_Lane], every: float) -> None:
        self.already = 0
        self._numbers = numbers
        self._lanes = lanes
        self._rows_every = every
        self._written = 0
        self._written_at = time.monotonic()
        self._rows_at = -float("inf")

    def observer(self, environment: str) -> Observer:
        """Returns an observer of an environment's events."""
        return partial(self._numbers.observe, environment)

    def link(self, start: str) -> None:
        """Sets where links to groups begin, once the address is known."""
        self._numbers.link = start

    def write(self) -> None:
        """Writes the numbers since the last call, if there is a new group."""
        if self._numbers.groups == self._written:
            return
        now = time.monotonic()
        self._written = self._numbers.groups
        step = self.already + self._written
        values = self._numbers.scalars(now - self._written_at)
        self._written_at = now
        groups = []
        if now - self._rows_at >= self._rows_every:
            self._rows_at = now
            groups = self._numbers.take_groups()
        for lane in self._lanes:
            lane.send(lambda tracker: tracker.scalars(step, values))
            if groups:
                lane.send(lambda tracker: _add_rows(tracker, self._numbers, step, groups))

    def summary(self, values: dict[str, float]) -> None:
        """Writes numbers of the whole run, after its last ones."""
        self.write()
        step = self.already + self._numbers.groups
        for lane in self._lanes:
            lane.send(lambda tracker: tracker.scalars(step, values))


def _add_rows(tracker: Tracker, numbers: TrackedNumbers, step: int, groups: list[Any]) -> None:
    rows = numbers.rows(step, groups)
    if rows:
        tracker.rollouts(step, rows)


@contextlib.asynccontextmanager
async def tracking(
    track: Sequence[TrackerName],
    config: TrackingConfig,
    settings: BaseModel,
    *,
    command: str,
    environments: Sequence[str],
) -> AsyncIterator[Tracking | None]:
    """Opens trackers; yields None without any.

    Args:
        settings: of the run; secrets in them are not written.

    Raises:
        ConfigError: the package of a tracker is not installed.
    """
    if not track:
        yield None
        return
    for name in track:
        if name != "jsonl" and importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"--track {name} needs the package {name}.", hint=missing_module_hint(name)
            )
    for variable, value in _QUIET.items():
        os.environ.setdefault(variable, value)
    named = "+".join(environments) if len(environments) < 4 else "several"
    run = config.name or f"{command}-{named}-{time.strftime('%Y%m%d-%H%M%S')}"
    facts = without_secrets(settings.model_dump(mode="json")) | {"command": command}
    lanes = [_Lane(name, partial(_opened, name, config, run, facts)) for name in track]
    numbers = TrackedNumbers((config.rollouts + 1) // 2)
    opened = Tracking(numbers, lanes, 60 * config.rollouts_minutes)
    _log.info("tracking", trackers=list(track), run=run, folder=str(config.folder))
    writing = asyncio.create_task(_write_regularly(opened, config.seconds), name="tracking")
    try:
        yield opened
    finally:
        await cancel_and_wait(writing)
        opened.write()
        await asyncio.to_thread(_close, lanes, config.close_seconds)


async def _write_regularly(opened: Tracking, seconds: float) -> None:
    while True:
        await asyncio.sleep(seconds)
        opened.write()


def _close(lanes: Sequence[_Lane], seconds: float) -> None:
    for lane in lanes:
        lane.end()
    until = time.monotonic() + seconds
    for lane in lanes:
        lane.wait(max(0.0, until - time.monotonic()))


def _opened(name: TrackerName, config: TrackingConfig, run: str, facts: dict[str, Any]) -> Tracker:
    safe = "".join(one if one.isalnum() or one in "._-" else "-" for one in run)
    tracker = open_tracker(name, project=config.project, run=safe, folder=config.folder)
    tracker.config(facts)
    return tracker


def without_secrets(value: Any) -> Any:
    """Returns JSON without anything that looks like a secret."""
    if isinstance(value, dict):
        return {str(key): without_secrets(one) for key, one in value.items()}
    if isinstance(value, list):
        return [without_secrets(one) for one in value]
    return redacted(value) if isinstance(value, str) else value


class _Lane:
    """The thread of one tracker, which gets its calls in order."""

    def __init__(self, name: str, opening: Callable[[], Tracker]) -> None:
        self._name = name
        self._opening = opening
        self._calls: queue.Queue[Callable[[Tracker], None] | None] = queue.Queue(_MOST_CALLS)
        self._has_failed = False
        # A daemon: a tracker that hangs must not keep the process alive.
        self._thread = threading.Thread(target=self._run, name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def send(self, call: Callable[[Tracker], None]) -> None:
        """Queues a call; one that finds no room is left out."""
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            self._tell("It is too slow: calls are left out.")

    def end(self) -> None:
        """Lets the thread end after the calls that are queued."""
        with contextlib.suppress(queue.Full):
            self._calls.put_nowait(None)

    def wait(self, seconds: float) -> None:
        """Waits for the end, `seconds` at most."""
        self._thread.join(seconds)
        if self._thread.is_alive():
            self._tell("It did not end in time (tracking.close_seconds): the rest may be lost.")

    def _run(self) -> None:
        try:
            tracker = self._opening()
            while (call := self._calls.get()) is not None:
                call(tracker)
            tracker.close()
        except (Exception, SystemExit) as error:  # noqa: BLE001 (whatever another's code raises)
            self._tell(f"{type(error).__name__}: {error}")
            while self._calls.get() is not None:
                pass  # nobody waits, and nothing piles up

    def _tell(self, reason: str) -> None:
        if not self._has_failed:
            self._has_failed = True
            hint = "The run goes on; --track without it is quiet."
            _log.warning("tracker_failed", tracker=self._name, reason=redacted(reason), hint=hint)
