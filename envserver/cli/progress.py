"""What a terminal shows of a run: a bar with rewards, failures, tokens a second and time left.

Where the output is no terminal, a line now and then says the same.
"""

from __future__ import annotations

import time
from collections import Counter
from types import TracebackType

from envserver_records.records import Group
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from ..rollouts.events import Event, GroupDelivered, GroupDropped, RolloutFailed, RolloutScored

SECONDS_BETWEEN_LINES = 10.0
GROUPS_SHOWN = 12
ALL = 0.999
"""Rewards from here on count as everything (floats)."""


class Rewards:
    """What is known of a growing number of rewards, in constant memory."""

    def __init__(self) -> None:
        self.count = 0
        self.total = 0.0
        self.none = 0
        self.full = 0

    def add(self, reward: float) -> None:
        self.count += 1
        self.total += reward
        self.none += reward <= 0
        self.full += reward >= ALL

    @property
    def mean(self) -> float | None:
        return self.total / self.count if self.count else None

    def __str__(self) -> str:
        between = self.count - self.none - self.full
        return f"0: {self.none}  between: {between}  1: {self.full}"


class Tally:
    """Counts over the events of a run; an Observer. Rewards are of all scored rollouts."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.groups = 0
        self.rollouts = 0
        self.rewards = Rewards()
        self.completion_tokens = 0
        self.failures: Counter[str] = Counter()
        self.last_words: dict[str, str] = {}
        """By kind of failure, what the latest one said."""
        self.latest_failure = ""
        self.lost = 0
        self.drops: Counter[str] = Counter()
        self.flags: Counter[str] = Counter()
        self.first_groups: list[Group] = []

    def __call__(self, event: Event) -> None:
        if isinstance(event, RolloutScored):
            self.rollouts += 1
            self.completion_tokens += event.completion_tokens
            self.flags.update(event.flags)
            if event.reward is not None:
                self.rewards.add(event.reward)
        elif isinstance(event, RolloutFailed):
            self.failures[event.failure.kind] += 1
            self.last_words[event.failure.kind] = event.failure.message
            self.latest_failure = event.failure.message
            self.lost += event.final
        elif isinstance(event, GroupDropped):
            self.drops[event.reason] += 1
        elif isinstance(event, GroupDelivered):
            self._add_group(event.group)

    def _add_group(self, group: Group) -> None:
        self.groups += 1
        if len(self.first_groups) < GROUPS_SHOWN:
            self.first_groups.append(group)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    def line(self) -> str:
        """The state in a few words."""
        mean = _mean(self.rewards.mean)
        rate = self.completion_tokens / max(self.seconds, 1e-9)
        parts = [f"reward {mean}", f"{rate:,.0f} tok/s"]
        parts += [f"{kind} {count}" for kind, count in self.failures.most_common(2)]
        parts += [f"{reason} {count}" for reason, count in self.drops.most_common(2)]
        return " · ".join(parts)


class ProgressView:
    """An Observer that shows a run of `total` groups (None: open end) on `console`."""

    def __init__(self, console: Console, total: int | None, already: int) -> None:
        self.tally = Tally()
        self._console = console
        self._total = total
        self._already = already
        self._last_line = time.monotonic()
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("groups"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[facts]}"),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("groups", total=total, completed=already, facts="")

    def __enter__(self) -> ProgressView:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def __call__(self, event: Event) -> None:
        self.tally(event)
        done = self._already + self.tally.groups
        self._bar.update(self._task, completed=done, facts=self.tally.line())
        if not self._console.is_terminal:
            self._say_line(done)

    def say(self, text: str) -> None:
        """A line above the bar."""
        self._bar.console.print(text)

    def _say_line(self, done: int) -> None:
        now = time.monotonic()
        if now - self._last_line >= SECONDS_BETWEEN_LINES:
            self._last_line = now
            total = "?" if self._total is None else self._total
            self._console.print(f"{done}/{total} groups · {self.tally.line()}", highlight=False)


def summary_table(tally: Tally) -> Table:
    """The first groups of a run and their rewards, with the totals below."""
    table = Table(title=None, show_footer=True)
    table.add_column("task", footer=counted(tally.groups, "group"), overflow="fold")
    table.add_column("rewards", footer=str(tally.rewards))
    table.add_column("mean", justify="right", footer=_mean(tally.rewards.mean))
    table.add_column("turns", justify="right")
    table.add_column("tokens", justify="right", footer=f"{tally.completion_tokens:,}")
    for group in tally.first_groups:
        rewards = [t.score.reward for t in group.trajectories if t.score.reward is not None]
        turns = [trajectory.turns for trajectory in group.trajectories]
        table.add_row(
            group.task_id,
            " ".join(_reward(reward) for reward in rewards),
            _mean(sum(rewards) / len(rewards) if rewards else None),
            f"{sum(turns) / len(turns):.1f}",
            f"{sum(t.usage.completion_tokens for t in group.trajectories):,}",
        )
    if tally.groups > len(tally.first_groups):
        table.add_row(f"... and {tally.groups - len(tally.first_groups)} more", "", "", "", "")
    return table


def counted(number: int, noun: str) -> str:
    """`1 group`, `2 groups`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _reward(reward: float) -> str:
    colour = "green" if reward >= ALL else "yellow" if reward > 0 else "red"
    return f"[{colour}]{reward:g}[/]" if reward in (0.0, 1.0) else f"[{colour}]{reward:.2f}[/]"


def _mean(mean: float | None) -> str:
    return "-" if mean is None else f"{mean:.2f}"
