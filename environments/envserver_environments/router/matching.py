"""Similarity of two plans: the F1 of their steps, edges and arguments, under the best map of steps.

A map pairs steps of one plan with steps of the other, each at most once, and only steps of the same
agent. A pair counts 1 if the tool is the same, too, else 1/2. The best map has the largest sum;
among those, the most edges that it maps to edges; among those, the arguments that are most alike:
two calculations by their results, all else by the F1 of numbers and words, where 0.5 is full, as a
request can be worded in many ways, and 0.2 is nothing. Pure.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

from envserver_tools.calculator import calculate

from .plans import Plan, Step
from .schemas import TOOLS

NODE_SHARE = 0.6
FORM_SHARE = 0.25
"""Share paid for a plan of the right form whose arguments do not match the query at all."""
_WORD = re.compile(r"\d+(?:\.\d+)?|[^\W\d_]{3,}")


@dataclass(frozen=True)
class Likeness:
    """All in [0, 1]; `score` is 0.6 times the first and 0.4 times the second, of which all but a
    quarter depends on the arguments."""

    node_f1: float
    edge_f1: float
    arguments: float

    @property
    def score(self) -> float:
        form = NODE_SHARE * self.node_f1 + (1 - NODE_SHARE) * self.edge_f1
        return form * (FORM_SHARE + (1 - FORM_SHARE) * self.arguments)


NOTHING = Likeness(0.0, 0.0, 0.0)


def likeness(plan: Plan, gold: Plan) -> Likeness:
    """Returns the similarity of `plan` and `gold`; both have at most eight steps."""
    mine, theirs = _edges(plan), _edges(gold)
    halves, hits, alike = _Search(plan.steps, gold.steps, mine, theirs).best()
    steps, edges = len(plan.steps) + len(gold.steps), len(mine) + len(theirs)
    return Likeness(
        node_f1=halves / steps,
        edge_f1=2 * hits / edges if edges else 1.0,
        arguments=2 * alike / steps,
    )


def _edges(plan: Plan) -> set[tuple[int, int]]:
    place = {step.id: number for number, step in enumerate(plan.steps)}
    return {(place[name], place[step.id]) for step in plan.steps for name in step.depends_on}


def _halves(one: Step, other: Step) -> int:
    """Returns the value of a pair, in halves."""
    if one.agent != other.agent:
        return 0
    return 2 if one.tool == other.tool else 1


def _alike(one: Step, gold: Step) -> float:
    """How far two arguments say the same."""
    given, wanted = _request(one), _request(gold)
    if given == wanted:
        return 1.0
    if one.tool == gold.tool == "calculate":
        result = calculate(wanted)
        if not result.startswith("error"):
            return float(calculate(given) == result)
    mine, theirs = (Counter(_WORD.findall(text.lower())) for text in (given, wanted))
    f1 = 2 * (mine & theirs).total() / max(1, (mine + theirs).total())
    return min(1.0, max(0.0, (f1 - 0.2) / 0.3))


def _request(step: Step) -> str:
    return str(step.args.get(TOOLS[step.agent][step.tool]["required"][0], ""))


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
        self._alike = [[_alike(one, other) for other in gold] for one in steps]
        # Upper bounds of what the remaining steps can add.
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
        self._best = (0, 0, 0.0)

    def best(self) -> tuple[int, int, float]:
        """The sum in halves, the edges that are carried over, and the sum of the arguments."""
        self._go_on(0, 0, 0.0)
        return self._best

    def _go_on(self, halves: int, hits: int, alike: float) -> None:
        number = len(self._map)
        left = len(self._worth) - number
        bound = (halves + self._rest[number], hits + self._open[number], alike + left)
        if number and bound <= self._best:
            return
        if not left:
            self._best = max(self._best, (halves, hits, alike))
            return
        worth = self._worth[number]
        pairs = [other for other in range(len(worth)) if worth[other] and other not in self._map]
        for other in [*sorted(pairs, key=lambda other: -worth[other]), None]:
            self._map.append(other)
            gained, same = (0, 0.0) if other is None else (worth[other], self._alike[number][other])
            self._go_on(halves + gained, hits + self._hits(number), alike + same)
            self._map.pop()

    def _hits(self, number: int) -> int:
        return sum(
            (self._map[before], self._map[after]) in self._gold_edges
            for before, after in self._decided[number]
        )
