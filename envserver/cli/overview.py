"""What a server does, as tables for a terminal: `envserver serve` and `envserver top` show it.
Rates and rewards are those of the last minute, or of the rows that there are.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Final, TypeVar

import httpx
import numpy as np
from envserver_records.errors import ConflictError, NotFoundError, StoreError
from rich.console import Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from ..telemetry.alarm_facts import Curves
from ..telemetry.history import Name, Numbers, Row
from .console import Console

T = TypeVar("T")
WINDOW: Final = 60.0
"""Seconds of a rate."""
_MOST_ROWS: Final = 50
"""Maximum number of environments and agents that are shown; runners may name new ones."""
_BREAKER: Final = {0: "", 1: "on trial", 2: "set aside"}


class Overview:
    """The figures of a server, from at least one row of its numbers, oldest first."""

    def __init__(self, rows: Sequence[Row], alarms: Sequence[str] = ()) -> None:
        self._alarms = alarms
        end, self._now = rows[-1]
        # A row that is taken every minute is a little older than a minute.
        start, before = next(row for row in rows if row[0] >= end - 1.1 * WINDOW)
        self._minutes = (end - start) / 60
        columns = {name: np.array([before.get(name, 0.0), self._now[name]]) for name in self._now}
        self._curves = Curves(np.array([start, end]), columns)
        self._sum = self._curves.now

    def tables(self) -> RenderableType:
        parts = [self._environments(), self._trainers(), self._engines(), self._failures()]
        troubles = [f"[red]{escape(_plain(trouble))}[/]" for trouble in self._troubles()]
        return Group(self.headline(), *troubles, *(part for part in parts if part.row_count))

    def headline(self) -> str:
        version = self._now.get(Name("envserver_policy_version", ()), -1)
        groups = self._per_minute("groups_delivered")
        waiting = self._sum("groups", state="queued")
        leased = self._sum("groups", state="leased")
        tokens = self._per_minute("tokens", kind="completion") / 60
        policy = "no policy version yet" if version < 0 else f"policy version {version:g}"
        followers = self._now.get(Name("envserver_followers", ()))
        servers = "" if followers is None else f" · leads {followers:g} servers"
        return (
            f"{policy} · {groups:.1f} groups/min · {tokens:,.0f} tokens/s · "
            f"{waiting:g} waiting, {leased:g} leased{servers}"
        )

    def line(self) -> str:
        """For output that is not a terminal."""
        agents = self._agents()[:_MOST_ROWS]
        rewards = [f"{_plain(name)} {_reward(self._mean(name, agent))}" for name, agent in agents]
        return " · ".join([self.headline(), *rewards, *self._troubles()])

    def _environments(self) -> Table:
        titles = "environment", "agent", "reward", "groups/min", "rollouts/min", "lost"
        table = _table(*titles, "running", "dropped")
        agents = self._agents()
        for environment, agent in agents[:_MOST_ROWS]:
            of = {"environment": environment}
            ended = self._per_minute("rollouts", **of)
            lost = self._per_minute("rollouts", end="lost", **of)
            table.add_row(
                escape(_plain(environment)),
                escape(_plain(agent)),
                _reward(self._mean(environment, agent)),
                f"{self._per_minute('groups_delivered', **of):.1f}",
                f"{ended:.1f}",
                f"{lost / ended:.1%}" if lost else "",
                f"{self._sum('rollouts_running', **of):g}",
                f"{self._sum('groups_dropped', **of):g}",
            )
        if len(agents) > _MOST_ROWS:
            table.add_row(f"and {len(agents) - _MOST_ROWS} more")
        return table

    def _trainers(self) -> Table:
        table = _table("run", "waiting or leased")
        for name, value in self._values("queue_depth", "run"):
            table.add_row(escape(_plain(name)), f"{value:g}")
        return table

    def _engines(self) -> Table:
        table = _table("replica", "calls", "at most", "waiting", "")
        for name, calls in self._values("replica_calls", "replica"):
            limit, waiting, breaker = (
                self._sum(f"replica_{what}", replica=name)
                for what in ("limit", "waiting", "breaker")
            )
            state = _BREAKER.get(int(breaker), "") or self._standing(name)
            table.add_row(escape(_plain(name)), f"{calls:g}", f"{limit:g}", f"{waiting:g}", state)
        return table

    def _standing(self, replica: str) -> str:
        standings = self._values("replica_standing", "standing", replica=replica)
        standing = next((name for name, value in standings if value and name != "used"), "")
        version = self._sum("replica_version", replica=replica)
        is_known = standing == "old" and version >= 0
        return f"old weights (v{version:g})" if is_known else _plain(standing)

    def _failures(self) -> Table:
        table = _table("failed attempts", "per minute", "all")
        for kind, count in self._values("failed_attempts", "kind"):
            if count:
                rate = self._per_minute("failed_attempts", kind=kind)
                table.add_row(escape(_plain(kind)), f"{rate:.1f}", f"{count:g}")
        return table

    def _troubles(self) -> Iterator[str]:
        yield from self._alarms
        for part, ready in self._values("part_ready", "part"):
            if not ready:
                yield f"{part} does not work"
        if self._sum("paused"):
            yield "model calls are paused"

    def _agents(self) -> list[tuple[str, str]]:
        values = self._curves.values_of
        names = ("rollouts_running", "rollouts")
        environments = {
            environment for name in names for environment in values(name, "environment")
        }
        return sorted(
            (environment, agent)
            for environment in environments
            for agent in values("reward", "agent", environment=environment) or [""]
        )

    def _mean(self, environment: str, agent: str) -> float | None:
        """The mean reward in the window; of all groups where the window has none."""
        labels = {"environment": environment, "agent": agent}
        rewards, count = (grown[-1] for grown in self._curves.sums("reward", **labels))
        if not count:
            rewards, count = (levels[-1] for levels in self._curves.levels("reward", **labels))
        return rewards / count if count else None

    def _values(self, name: str, label: str, **of: str) -> list[tuple[str, float]]:
        values = self._curves.values_of(name, label, **of)
        return [(value, self._sum(name, **{label: value}, **of)) for value in values]

    def _per_minute(self, name: str, **labels: str) -> float:
        grown = float(self._curves.growth(name, **labels)[-1])
        return grown / self._minutes if self._minutes else 0.0


def _plain(text: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _reward(mean: float | None) -> str:
    return "-" if mean is None else f"{mean:.3f}"


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column(first, overflow="fold")
    for name in others:
        table.add_column(name, justify="left" if name in ("agent", "") else "right")
    return table


_TABLE_SECONDS: Final = 2.0
_LINE_SECONDS: Final = 60.0


@asynccontextmanager
async def shown(
    console: Console,
    numbers: Callable[[], Awaitable[Numbers]],
    alarms: Callable[[], list[str]],
) -> AsyncIterator[None]:
    """Shows an overview of `numbers`, and `alarms`, while the block runs."""
    rows: deque[Row] = deque(maxlen=int(WINDOW / _TABLE_SECONDS) + 1)
    live = Live(console=console, auto_refresh=False, transient=True)

    async def look() -> None:
        with suppress(StoreError):  # the log has it; the tables show the last numbers
            rows.append((time.monotonic(), await numbers()))

    async def drawn(draw: Callable[[Overview], T]) -> T:
        """Takes long with many environments: not for the event loop."""
        await look()
        seen, texts = [*rows] or [(0.0, {})], alarms()
        return await asyncio.to_thread(lambda: draw(Overview(seen, texts)))

    async def tables() -> None:
        while True:
            live.update(await drawn(Overview.tables), refresh=True)
            await asyncio.sleep(_TABLE_SECONDS)

    async def lines() -> None:
        while True:
            await look()
            await asyncio.sleep(_LINE_SECONDS)
            console.say(await drawn(Overview.line))

    task = asyncio.create_task(tables() if console.is_terminal else lines(), name="overview")
    if console.is_terminal:
        live.start()
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        live.stop()


def overview_of(http: httpx.Client, url: str) -> Overview:
    return Overview(_rows(http, url), _alarms(http))


def _alarms(http: httpx.Client) -> list[str]:
    """Returns what is wrong at the server; an older one does not know."""
    with suppress(httpx.TransportError):
        answer = http.get("/v1/alarms")
        if answer.is_success:
            return [alarm["text"] for alarm in answer.json()["alarms"]]
    return []


def _rows(http: httpx.Client, url: str) -> list[Row]:
    try:
        answer = http.get("/v1/series", params={"start": -WINDOW - 15, "points": 100})
    except httpx.TransportError as error:
        raise NotFoundError(
            f"No server answers at {url}: {error or type(error).__name__}."
        ) from error
    if answer.status_code == httpx.codes.NOT_FOUND:
        raise NotFoundError(f"{url} has no curves.", hint="Is it an envserver of this version?")
    if not answer.is_success:
        raise ConflictError(
            f"{url} answered with HTTP {answer.status_code}: {answer.text[:300]}",
            hint="ENVSERVER_TOKEN holds the token." if answer.status_code in (401, 403) else "",
        )
    found = answer.json()
    rows: list[tuple[float, dict[Name, float]]] = [(at, {}) for at in found["times"]]
    for curve in found["series"]:
        name = Name.of(curve["name"], curve["labels"])
        for (_, numbers), value in zip(rows, curve["values"], strict=True):
            if value is not None:
                numbers[name] = value
    if not rows:
        raise ConflictError(f"{url} has no numbers of the last minute yet.", hint="Ask again.")
    return [*rows]
