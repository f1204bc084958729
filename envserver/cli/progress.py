"""Shows the progress of a run on a terminal, and at the end its results.
If the output is not a terminal, an occasional line has the same information.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from textwrap import shorten

from envserver_records.costs import added
from envserver_records.records import Group
from envserver_records.tasks import RewardRange
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from ..rollouts.events import Event
from ..running.engines import SIMULATED
from ..running.group_run import GroupRun
from ..running.judging import judge_line
from ..running.metrics import Tally, is_full, mean_text
from ..settings.config import Settings
from ..telemetry.redaction import counted
from ..tokens.flags import FLAGS, chosen
from .console import Console

SECONDS_BETWEEN_LINES = 10.0
_SECONDS_BETWEEN_LOOKS = 0.1
_DONE = {"train": "trained", "mask": "affected calls masked", "drop": "not usable for RL"}
LONGEST_WORDS = 200
"""The failures file has the full text."""


class ProgressView:
    """An Observer that shows a run of `total` groups (None: open end) on `console`."""

    def __init__(self, console: Console, tally: Tally, total: int | None, already: int) -> None:
        self.tally = tally
        self._console = console
        self._total = total
        self._already = already
        self._last_line = time.monotonic()
        self._last_look = -math.inf
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

    def __exit__(self, *_: object) -> None:
        self._update()
        self._bar.stop()

    def __call__(self, event: Event) -> None:
        now = time.monotonic()
        if now - self._last_look >= _SECONDS_BETWEEN_LOOKS:
            self._last_look = now
            self._update()

    def _update(self) -> None:
        done = self._already + self.tally.groups
        self._bar.update(self._task, completed=done, facts=self.tally.line())
        if not self._console.is_terminal:
            self._say_line(done)

    def say(self, text: str) -> None:
        self._bar.console.print(text)

    def _say_line(self, done: int) -> None:
        now = time.monotonic()
        if now - self._last_line >= SECONDS_BETWEEN_LINES:
            self._last_line = now
            total = "?" if self._total is None else self._total
            self._console.print(f"{done}/{total} groups · {self.tally.line()}", highlight=False)


def summary_table(tally: Tally) -> Table:
    table = Table(title=None, show_footer=True)
    table.add_column("task", footer=counted(tally.groups, "group"), overflow="fold")
    table.add_column("rewards", footer=str(tally.rewards))
    table.add_column("mean", justify="right", footer=mean_text(tally.rewards.mean))
    table.add_column("turns", justify="right")
    table.add_column("tokens", justify="right", footer=f"{tally.completion_tokens:,}")
    if tally.cost is not None:
        footer = f"{tally.cost.total:.4f}"
        table.add_column(f"cost ({tally.cost.currency})", justify="right", footer=footer)
    for group in tally.first_groups:
        rewards = [t.score.reward for t in group.trajectories if t.score.reward is not None]
        turns = [trajectory.turns for trajectory in group.trajectories]
        table.add_row(
            escape(_shortened(group.task_id)),
            " ".join(_reward(reward, group.reward_range) for reward in rewards),
            mean_text(sum(rewards) / len(rewards) if rewards else None),
            f"{sum(turns) / len(turns):.1f}",
            f"{sum(t.usage.completion_tokens for t in group.trajectories):,}",
            *(_cost(group) if tally.cost is not None else ()),
        )
    if tally.groups > len(tally.first_groups):
        table.add_row(f"... and {tally.groups - len(tally.first_groups)} more")
    return table


def _shortened(task_id: str) -> str:
    return task_id if len(task_id) <= 80 else f"{task_id[:40]} ... {task_id[-40:]}"


def _cost(group: Group) -> Iterator[str]:
    cost = added(trajectory.usage.cost for trajectory in group.trajectories)
    yield "-" if cost is None else f"{sum(cost.models.values()):.4f}"


def _reward(reward: float, bounds: RewardRange) -> str:
    between = "yellow" if bounds.share(reward) > 0 else "red"
    colour = "green" if is_full(reward, bounds) else between
    return f"[{colour}]{reward:g}[/]" if reward in (0.0, 1.0) else f"[{colour}]{reward:.2f}[/]"


def show_result(console: Console, run: GroupRun, settings: Settings) -> None:
    tally = run.tally
    if tally.first_groups:
        console.print(summary_table(tally))
        if len(run.shares) > 1:
            console.print(_shares_table(run))
    if tally.rollouts:
        if settings.model == SIMULATED:
            console.print("The model was simulated: these rewards do not measure a real model.")
        console.say(tally.costs_line())
        if lengths := tally.lengths_line():
            console.say(lengths)
    for path, groups in run.written().items():
        console.say(f"{counted(groups, 'group')} in {path}")
    for counts, noun in ((tally.drops, "dropped group"), (tally.failures, "failed attempt")):
        for kind, count in sorted(counts.items()):
            words = shorten(tally.last_words.get(kind, ""), LONGEST_WORDS, placeholder=" ...")
            console.say(f"{counted(count, noun)}: {kind}{words and f' ({words})'}")
    tokens = settings.tokens
    actions = chosen(tokens.train, tokens.mask, tokens.drop)
    for flag, count in sorted(tally.flags.items()):
        meaning = f" ({FLAGS[flag].meaning})" if flag in FLAGS else ""
        console.say(
            f"{counted(count, 'rollout')} flagged, {_DONE[actions.of(flag)]}: {flag}{meaning}"
        )
    if tally.untrained.tokens:
        flags = ", ".join(f"{flag} {count:,}" for flag, count in tally.untrained.by_flag.items())
        console.say(f"{tally.untrained.share:.0%} of the sampled tokens are not trained: {flags}")
    if run.judge is not None:
        console.say(judge_line(run.judge))
    for file in run.files.values():
        if file.failures.lines:
            console.say(f"Failures: {file.failures.path}")


def _shares_table(run: GroupRun) -> Table:
    table = Table()
    for name in ("environment", "groups", "share", "wanted", "mean"):
        table.add_column(name, justify="left" if name == "environment" else "right")
    for name, wanted in run.shares.items():
        share = run.groups[name] / max(1, run.groups.total())
        mean = mean_text(run.rewards[name].mean)
        table.add_row(name, str(run.groups[name]), f"{share:.0%}", f"{wanted:.0%}", mean)
    return table
