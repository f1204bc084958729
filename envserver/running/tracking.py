"""Sends the numbers of a run to trackers: `--track` of `process`, `serve` and `evaluate`.
Each tracker has a thread of its own; one that fails or hangs is reported once and stops nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from statistics import fmean, pstdev
from typing import Any, Final

import orjson
import structlog
from envserver_records.errors import ConfigError
from envserver_records.extras import missing_module_hint
from envserver_records.records import Group, Message, text_of
from envserver_records.tracking import Row, Tracker, TrackerName, open_tracker
from pydantic import BaseModel

from ..rollouts.events import (
    Event,
    GroupDropped,
    Observer,
    RolloutFailed,
    RolloutScored,
)
from ..settings.runs import TrackingConfig
from ..telemetry.numbers import Distribution
from ..telemetry.redaction import redacted
from .stopping import beside

_MOST_CHARACTERS: Final = 4000
_MOST_KINDS: Final = 50


class TrackedNumbers:
    """The numbers of a run. `most_groups`: kept for the table; `link`: start of the link to a
    group."""

    def __init__(self, most_groups: int, link: str = "") -> None:
        self.groups = 0
        self.link = link
        self._latest: deque[Group] = deque(maxlen=most_groups)
        self._since: dict[str, dict[str, Distribution]] = {}
        """By environment ("": all) and name."""
        self._totals: Counter[str] = Counter()
        self._version = -1

    def observe(self, environment: str, event: Event) -> None:
        values: dict[str, float] = {}
        if isinstance(event, RolloutScored):
            values = {
                "turns": event.turns,
                "completion_tokens": event.completion_tokens,
                "rollout_seconds": event.seconds,
                "limited_share": event.limit is not None,
                "lost_share": 0,
            }
        elif isinstance(event, RolloutFailed):
            self._count(f"failures/{event.failure.kind}")
            values = {"lost_share": 1} if event.final else {}
        elif isinstance(event, GroupDropped):
            self._count(f"dropped/{event.reason}")
        else:
            values = self._delivered(environment, event.group)
        for of in ("", environment):
            numbers = self._since.setdefault(of, {})
            for name, value in values.items():
                numbers.setdefault(name, Distribution(())).add(value)

    def _delivered(self, environment: str, group: Group) -> dict[str, float]:
        self.groups += 1
        self._count(f"groups/{environment}")
        self._version = max(self._version, group.policy_version)
        self._latest.append(group)
        rewards = [
            trajectory.score.reward
            for trajectory in group.trajectories
            if trajectory.score.reward is not None
        ]
        if not rewards:
            return {}
        deviation = pstdev(rewards)
        return {
            "reward": fmean(rewards),
            "reward_std": deviation,
            "equal_share": deviation == 0,
        }

    def _count(self, name: str) -> None:
        if name in self._totals or len(self._totals) < _MOST_KINDS:
            self._totals[name] += 1

    def scalars(self, seconds: float) -> dict[str, float]:
        several = len(self._since) > 2
        found = {
            f"{name}/{environment}" if environment else name: number.total / number.count
            for environment, numbers in self._since.items()
            for name, number in numbers.items()
            if several or not environment
        }
        if seconds > 0:
            tokens = self._since.get("", {}).get("completion_tokens", Distribution(()))
            found["tokens_per_second"] = tokens.total / seconds
            found["rollouts_per_minute"] = 60 * tokens.count / seconds
        if self._version >= 0:
            found["policy_version"] = self._version
        self._since = {}
        return found | dict(self._totals)

    def take_groups(self) -> list[Group]:
        groups = [*self._latest]
        self._latest.clear()
        return groups

    def rows(self, step: int, groups: list[Group]) -> list[Row]:
        return [row for group in groups for row in _rows(step, group, self.link)]


def _rows(step: int, group: Group, link: str) -> list[Row]:
    rewards = {
        number: trajectory.score.reward
        for number, trajectory in enumerate(group.trajectories)
        if trajectory.score.reward is not None
    }
    if not rewards:
        return []
    mean, deviation = fmean(rewards.values()), pstdev(rewards.values())
    chosen = dict.fromkeys(choose(rewards, key=rewards.__getitem__) for choose in (max, min))
    # TRL's advantage: the distance from the group's mean in its deviations.
    return [
        _row(step, group, number, (rewards[number] - mean) / (deviation + 1e-4), link)
        for number in chosen
    ]


def _row(step: int, group: Group, number: int, advantage: float, link: str) -> Row:
    trajectory = group.trajectories[number]
    first = next(
        (
            at
            for at, message in enumerate(trajectory.messages)
            if message.get("role") == "assistant"
        ),
        len(trajectory.messages),
    )
    return {
        "step": step,
        "prompt": _text(trajectory.messages[:first]),
        "completion": _text(trajectory.messages[first:]),
        "reward": trajectory.score.reward,
        "advantage": round(advantage, 4),
        "components": orjson.dumps(trajectory.score.components).decode(),
        "environment": group.env,
        "task_id": group.task_id,
        "group_id": group.group_id,
        "rollout": number,
        "policy_version": group.policy_version,
        "end": trajectory.usage.ended_by,
        "turns": trajectory.turns,
        "link": f"{link}{group.group_id}/{number}" if link else "",
    }


def _text(messages: list[Message]) -> str:
    """Returns a conversation as bounded text; a single message is its text alone."""
    parts = [
        (f"{message.get('role')}: " if len(messages) > 1 else "") + _with_calls(message)
        for message in messages
    ]
    text = redacted("\n\n".join(parts))
    if len(text) <= _MOST_CHARACTERS:
        return text
    half = _MOST_CHARACTERS // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half:,} characters ...]\n{text[-half:]}"


def _with_calls(message: Message) -> str:
    calls = message.get("tool_calls") or []
    shown = [
        f"[{function.get('name')}({function.get('arguments')})]"
        for function in (call.get("function") or {} for call in calls)
    ]
    return "\n".join(filter(None, [text_of(message), *shown]))


_log = structlog.get_logger("envserver.tracking")

_MOST_CALLS: Final = 256


class Tracking:
    """The trackers of one run; set `already` (groups of earlier runs) before the first."""

    def __init__(self, numbers: TrackedNumbers, lanes: Sequence[_Lane], every: float) -> None:
        self.already = 0
        self._numbers = numbers
        self._lanes = lanes
        self._rows_every = every
        self._written = 0
        self._written_at = time.monotonic()
        self._rows_at = -float("inf")

    def observer(self, environment: str) -> Observer:
        return partial(self._numbers.observe, environment)

    def link(self, start: str) -> None:
        self._numbers.link = start

    def write(self) -> None:
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
        self._send(lambda tracker: tracker.scalars(step, values))

        def add_rows(tracker: Tracker) -> None:
            if rows := self._numbers.rows(step, groups):
                tracker.rollouts(step, rows)

        if groups:
            self._send(add_rows)

    def summary(self, values: dict[str, float]) -> None:
        self.write()
        step = self.already + self._numbers.groups
        self._send(lambda tracker: tracker.scalars(step, values))

    def _send(self, call: Callable[[Tracker], None]) -> None:
        for lane in self._lanes:
            lane.send(call)


@contextlib.asynccontextmanager
async def tracking(
    track: Sequence[TrackerName],
    config: TrackingConfig,
    settings: BaseModel,
    *,
    command: str,
    environments: Sequence[str],
) -> AsyncIterator[Tracking | None]:
    if not track:
        yield None
        return
    for name in track:
        if name != "jsonl" and importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"--track {name} needs the package {name}.", hint=missing_module_hint(name)
            )
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    named = "+".join(environments) if len(environments) < 4 else "several"
    run = config.name or f"{command}-{named}-{time.strftime('%Y%m%d-%H%M%S')}"
    facts = without_secrets(settings.model_dump(mode="json")) | {"command": command}
    lanes = [_Lane(name, partial(_opened, name, config, run, facts)) for name in track]
    numbers = TrackedNumbers((config.rollouts + 1) // 2)
    opened = Tracking(numbers, lanes, 60 * config.rollouts_minutes)
    _log.info("tracking", trackers=list(track), run=run, folder=str(config.folder))
    try:
        async with beside("tracking", _write_regularly(opened, config.seconds)):
            yield opened
    finally:
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
    safe = "".join(letter if letter.isalnum() or letter in "._-" else "-" for letter in run)
    tracker = open_tracker(name, project=config.project, run=safe, folder=config.folder)
    tracker.config(facts)
    return tracker


def without_secrets(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): without_secrets(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_secrets(item) for item in value]
    return redacted(value) if isinstance(value, str) else value


class _Lane:
    def __init__(self, name: str, opening: Callable[[], Tracker]) -> None:
        self._name = name
        self._opening = opening
        self._calls: queue.Queue[Callable[[Tracker], None] | None] = queue.Queue(_MOST_CALLS)
        self._has_failed = False
        # A daemon: a tracker that hangs must not keep the process alive.
        self._thread = threading.Thread(target=self._run, name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def send(self, call: Callable[[Tracker], None]) -> None:
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            self._tell("It is too slow: some calls are skipped.")

    def end(self) -> None:
        with contextlib.suppress(queue.Full):
            self._calls.put_nowait(None)

    def wait(self, seconds: float) -> None:
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
                pass  # so that nothing piles up

    def _tell(self, reason: str) -> None:
        if not self._has_failed:
            self._has_failed = True
            hint = "The run continues; leave it out of --track to silence this."
            _log.warning("tracker_failed", tracker=self._name, reason=redacted(reason), hint=hint)
