"""Similarity of two plans: the F1 of their steps and of their edges, under the best map of steps.

A map pairs steps of one plan with steps of the other, each at most once, and only steps of the same
agent. A pair counts 1 if the tool is the same, too, else 1/2. The best map has the largest sum;
among those, the most edges that it maps to edges. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from .plans import Plan, Step

NODE_SHARE = 0.6


@dataclass(frozen=True)
class Likeness:
    """Both in [0, 1]; `score` is 0.6 times the one and 0.4 times the other."""

    node_f1: float
    edge_f1: float

    @property
    def score(self) -> float:
        return NODE_SHARE * self.node_f1 + (1 - NODE_SHARE) * self.edge_f1


NOTHING = Likeness(0.0, 0.0)


def likeness(plan: Plan, gold: Plan) -> Likeness:
    """Returns the similarity of `plan` and `gold`; both have at most eight steps."""
    mine, theirs = _edges(plan), _edges(gold)
    halves, hits = _Search(plan.steps, gold.steps, mine, theirs).best()
    edges = len(mine) + len(theirs)
    return Likeness(
        node_f1=halves / (len(plan.steps) + len(gold.steps)),
        edge_f1=2 * hits / edges if edges else 1.0,
    )


def _edges(plan: Plan) -> set[tuple[int, int]]:
    place = {step.id: number for number, step in enumerate(plan.steps)}
    return {(place[name], place[step.id]) for step in plan.steps for name in step.depends_on}


def _halves(one: Step, other: Step) -> int:
    """Returns the value of a pair, in halves."""
    if one.agent != other.agent:
        return 0
    return 2 if one.tool == other.tool else 1


class _Search:
    """Searches all maps, step by step; skips branches that cannot become the best."""

    def __init__(
        self,
        steps: tuple[Step, ...],
        gold: tuple[Step, ...],
        edges: set[tuple[int, int]],
        gold_edges: set[tuple[int, int]],
    ) -> None:
        self._worth = [[_halves(one, other) for other in gold] for one in steps]
        # Upper bound of what the remaining steps can add.
        self._rest = [0] * (len(steps) + 1)
        for number in reversed(range(len(steps))):
            self._rest[number] = self._rest[number + 1] + max(self._worth[number])
        # An edge is decided at its later end.
        self._decided = [[e for e in edges if max(e) == number] for number in range(len(steps))]
        self._open = [0] * (len(steps) + 1)
        for number in reversed(range(len(steps))):
            self._open[number] = self._open[number + 1] + len(self._decided[number])
        self._gold_edges = gold_edges
        self._map: list[int | None] = []
        self._best = (0, 0)

    def best(self) -> tuple[int, int]:
        """The sum in halves, and the edges that are carried over."""
        self._go_on(0, 0)
        return self._best

    def _go_on(self, halves: int, hits: int) -> None:
        number = len(self._map)
        bound = (halves + self._rest[number], hits + self._open[number])
        if number and bound <= self._best:
            return
        if number == len(self._worth):
            self._best = max(self._best, (halves, hits))
            return
        worth = self._worth[number]
        pairs = [other for other in range(len(worth)) if worth[other] and other not in self._map]
        for other in [*sorted(pairs, key=lambda other: -worth[other]), None]:
            self._map.append(other)
            gained = 0 if other is None else worth[other]
            self._go_on(halves + gained, hits + self._hits(number))
            self._map.pop()

    def _hits(self, number: int) -> int:
        return sum(
            (self._map[before], self._map[after]) in self._gold_edges
            for before, after in self._decided[number]
        )
