"""Rewards of merged models over alpha, as a table and an SVG with 95 % intervals. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

import msgspec
from envserver_records.tasks import Json

from envserver.evaluation.estimators import Estimate
from envserver.evaluation.report import Report
from envserver.evaluation.tables import TextTable

_WIDTH, _HEIGHT = 640, 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 20, 30, 50
_COLORS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf")


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """One alpha: the folder of its model, and by environment its settings, rewards and pass@1."""

    alpha: float
    model: str
    asked: Json
    rewards: dict[str, Estimate]
    passed: dict[str, Estimate]

    @classmethod
    def of(cls, alpha: float, model: str, asked: Json, reports: Sequence[Report]) -> Point:
        measured = [
            (report.name or report.env, found)
            for report in reports
            if (found := report.run.overall) is not None
        ]
        return cls(
            alpha=alpha,
            model=model,
            asked=asked,
            rewards={name: found.mean_reward for name, found in measured},
            passed={name: found.pass_at[1] for name, found in measured if 1 in found.pass_at},
        )

    @property
    def mean(self) -> float:
        return sum(reward.value for reward in self.rewards.values()) / len(self.rewards)


class Sweep(msgspec.Struct, kw_only=True):
    """The contents of `sweep.json`: names and weights of the inputs (`start` is empty for the
    base)."""

    base: Json
    tuned: Json
    start: Json
    points: list[Point] = []
    schema_version: int = 1

    def is_like(self, other: Sweep) -> bool:
        return (self.base, self.tuned, self.start) == (other.base, other.tuned, other.start)

    def best(self) -> Point | None:
        """Returns the point with the highest mean reward; of equal ones the smallest alpha."""
        scored = [point for point in self.points if point.rewards]
        return max(scored, key=lambda point: (point.mean, -abs(point.alpha)), default=None)


def table_of(sweep: Sweep) -> TextTable:
    names = _environments(sweep)
    best = sweep.best()
    rows = [
        [
            f"{point.alpha:g}{' *' if point is best else ''}",
            *(_cell(found.get(name)) for name in names for found in (point.rewards, point.passed)),
        ]
        for point in sweep.points
    ]
    header = [f"{name} {what}" for name in names for what in ("mean reward", "pass@1")]
    return TextTable("Reward over alpha (* the highest mean)", ["alpha", *header], rows)


def drawn(sweep: Sweep) -> str:
    return "\n".join([*_picture(sweep), "</svg>"]) + "\n"


def _environments(sweep: Sweep) -> list[str]:
    return list(dict.fromkeys(name for point in sweep.points for name in point.rewards))


def _cell(estimate: Estimate | None) -> str:
    if estimate is None:
        return "-"
    if estimate.low is None or estimate.high is None:
        return f"{estimate.value:.3f}"
    return f"{estimate.value:.3f} [{estimate.low:.3f}, {estimate.high:.3f}]"


class _Axes:
    def __init__(self, sweep: Sweep) -> None:
        alphas = [point.alpha for point in sweep.points]
        every = [reward for point in sweep.points for reward in point.rewards.values()]
        ends = [
            end
            for bound in every
            for end in (bound.value, bound.low, bound.high)
            if end is not None
        ]
        self.low_alpha, self.high_alpha = min([*alphas, 0.0]), max([*alphas, 1.0])
        self.low, self.high = min([*ends, 0.0]), max([*ends, 1.0])

    def x(self, alpha: float) -> float:
        share = (alpha - self.low_alpha) / (self.high_alpha - self.low_alpha)
        return round(_LEFT + share * (_WIDTH - _LEFT - _RIGHT), 1)

    def y(self, reward: float) -> float:
        share = (reward - self.low) / (self.high - self.low)
        return round(_HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM), 1)


def _picture(sweep: Sweep) -> Iterator[str]:
    axes = _Axes(sweep)
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'width="{_WIDTH}" height="{_HEIGHT}" font-family="sans-serif" font-size="12" role="img">'
    )
    title = f"{sweep.base['name']} + alpha * ({sweep.tuned['name']} - start): mean reward"
    yield f"<title>{escape(title)}</title>"
    yield f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>'
    yield f'<text x="{_LEFT}" y="18">{escape(title)}</text>'
    for step in range(5):
        reward = axes.low + (axes.high - axes.low) * step / 4
        y = axes.y(reward)
        yield f'<path d="M{_LEFT} {y}H{_WIDTH - _RIGHT}" stroke="#ddd"/>'
        yield f'<text x="{_LEFT - 8}" y="{y + 4}" text-anchor="end">{reward:.3g}</text>'
    bottom = _HEIGHT - _BOTTOM
    for point in sweep.points:
        x = axes.x(point.alpha)
        yield f'<text x="{x}" y="{bottom + 18}" text-anchor="middle">{point.alpha:g}</text>'
    yield f'<text x="{_WIDTH // 2}" y="{bottom + 38}" text-anchor="middle">alpha</text>'
    for number, name in enumerate(_environments(sweep)):
        yield from _line(sweep, axes, name, number)


def _line(sweep: Sweep, axes: _Axes, name: str, number: int) -> Iterator[str]:
    color = _COLORS[number % len(_COLORS)]
    found = [
        (axes.x(point.alpha), point.rewards[name])
        for point in sweep.points
        if name in point.rewards
    ]
    path = "L".join(f"{x} {axes.y(reward.value)}" for x, reward in found)
    yield f'<path d="M{path}" fill="none" stroke="{color}" stroke-width="2"/>'
    for x, reward in found:
        if reward.low is not None and reward.high is not None:
            ends = f"M{x} {axes.y(reward.low)}V{axes.y(reward.high)}"
            yield f'<path d="{ends}" stroke="{color}" stroke-opacity="0.6"/>'
        label = f"{name}: {_cell(reward)}"
        yield (
            f'<circle cx="{x}" cy="{axes.y(reward.value)}" r="4" fill="{color}">'
            f"<title>{escape(label)}</title></circle>"
        )
    y = _TOP + 14 * number + 8
    yield (
        f'<text x="{_WIDTH - _RIGHT}" y="{y}" text-anchor="end" fill="{color}">'
        f"{escape(name)}</text>"
    )
