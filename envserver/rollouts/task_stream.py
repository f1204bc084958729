"""The stream of a run with a curriculum: the environment's own order with repeated tasks mixed in.

The own order has the ids of `stream.group_requests`, so a run can be resumed with any sampler.
After a restart it is read from its beginning, and scored tasks are remembered as they come by.
"""

from __future__ import annotations

import heapq
import itertools
import random
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Final

import msgspec
from envserver_records.records import Task

from ..settings.runs import CurriculumConfig
from .estimates import UNTRIED, Estimate, as_of, updated
from .events import Event, scored_in
from .stream import GroupRequest, again_prefix, group_id, stream_prefix

# A run's stream of tasks is the environment's own order, with earlier tasks mixed in:
#
# - `difficulty`: a remembered task is drawn with w(p) = (p/t)^(st) ((1-p)/(1-t))^(s(1-t)), at most
#   1, where p is its chance of success, t the target and s the sharpness (t = 1/2, s = 2: 4p(1-p),
#   what T. Foster and J. Foerster call learnability, "Learning to reason at the frontier of
#   learnability", arXiv:2502.12272, 2025). It is repeated with that probability, too; otherwise the
#   environment's order continues: if all remembered tasks are too easy or too hard, most tasks are
#   new.
# - `replay`: with a fixed probability, a remembered unsolved task is repeated.
#
# The environment's own order gets at least the configured share, so that no task waits forever; a
# task that has just run rests while others are remembered; the same seed, estimates and settings
# give the same choices.

LONGEST_REST: Final = 32
"""Maximum number of groups before a task may be repeated."""


class Candidate(msgspec.Struct, frozen=True):
    """A remembered task. `estimate`: None until one of its rollouts is scored; `drawn`: number of
    its last group."""

    task_id: str
    estimate: Estimate | None
    drawn: int


def wanted(success: float, target: float, sharpness: float) -> float:
    easy = (success / target) ** (sharpness * target)
    return float(easy * ((1.0 - success) / (1.0 - target)) ** (sharpness * (1.0 - target)))


def choose(
    candidates: Sequence[Candidate], rules: CurriculumConfig, rng: random.Random, number: int
) -> str | None:
    """Returns the task to repeat as group `number`; None: continue the environment's own order."""
    if rules.sampler == "difficulty":
        return _near_target(candidates, rules, rng, number)
    if rules.sampler == "replay":
        return _unsolved(candidates, rules, rng, number)
    return None


def is_passed_over(estimate: Estimate | None, rules: CurriculumConfig, rng: random.Random) -> bool:
    """Returns whether the next task in the environment's order is skipped this time: it is solved
    too often, or lately never, so its group would teach nothing."""
    if estimate is None or estimate.attempts < rules.solved_attempts:
        return False
    if rules.solved_above is not None and estimate.success > rules.solved_above:
        return rng.random() >= rules.solved_share
    # What old policies did fades: then it is tried again.
    is_recent = 2 * estimate.weight >= rules.solved_attempts
    if rules.unsolved_share < 1 and is_recent and _is_unsolved(estimate, rules):
        return rng.random() >= rules.unsolved_share
    return False


def to_forget(candidates: Sequence[Candidate], rules: CurriculumConfig, count: int) -> list[str]:
    """Returns the `count` candidates with the lowest weight.

    Among equal weights, and among tasks not yet scored, the least recently drawn go first.
    """

    def worth(candidate: Candidate) -> tuple[float, int]:
        if candidate.estimate is None:
            return (2.0, candidate.drawn)
        if rules.sampler == "replay":
            return (float(_is_unsolved(candidate.estimate, rules)), candidate.drawn)
        return (wanted(candidate.estimate.success, rules.target, rules.sharpness), candidate.drawn)

    return [candidate.task_id for candidate in heapq.nsmallest(count, candidates, key=worth)]


def _near_target(
    candidates: Sequence[Candidate], rules: CurriculumConfig, rng: random.Random, number: int
) -> str | None:
    explores, luck = rng.random() < rules.explore, rng.random()
    rested = [] if explores else _rested(candidates, number)
    weights = [wanted(estimate.success, rules.target, rules.sharpness) for _, estimate in rested]
    if not weights or not sum(weights):
        return None
    (index,) = rng.choices(range(len(rested)), weights)
    return rested[index][0].task_id if luck < weights[index] else None


def _unsolved(
    candidates: Sequence[Candidate], rules: CurriculumConfig, rng: random.Random, number: int
) -> str | None:
    if rng.random() >= rules.replay_share:
        return None
    rested = [pair for pair in _rested(candidates, number) if _is_unsolved(pair[1], rules)]
    if not rested:
        return None
    if rules.replay_order == "weighted":
        ((chosen, _),) = rng.choices(rested, [estimate.variance for _, estimate in rested])
    else:
        chosen, _ = min(rested, key=lambda pair: pair[0].drawn)
    return chosen.task_id


def _is_unsolved(estimate: Estimate, rules: CurriculumConfig) -> bool:
    """Whether the task is unsolved. A task without current weight was unsolved when last tried."""
    mean = estimate.mean_reward
    return mean is None or mean <= rules.unsolved_below


def _rested(candidates: Sequence[Candidate], number: int) -> list[tuple[Candidate, Estimate]]:
    rest = min(LONGEST_REST, len(candidates) // 2)
    return [
        (candidate, candidate.estimate)
        for candidate in candidates
        if candidate.estimate is not None and candidate.drawn + rest < number
    ]


_ASKED_AT_ONCE = 1024
_FORGOTTEN = 8
"""When the memory is full, one task in so many is forgotten."""
_LONG_AGO = 2**62
_LATEST = 1000
_PASSED_OVER_AT_MOST = 1000
"""Then a group is made anyway, so no request waits forever."""


class Known(msgspec.Struct, frozen=True):
    """Facts about some requests: ids of groups not to make, and estimates by task."""

    made: set[str]
    estimates: dict[str, Estimate]


class _Remembered(msgspec.Struct):
    task: Task
    estimate: Estimate | None
    drawn: int


@dataclass(eq=False, repr=False)
class TaskStream:
    """See the module. Iterate `requests` in one thread at a time; `observe` may run concurrently.

    Args:
        look: returns what is known of these requests; may block.
        counts: returns how many groups of the environment's own order need not be made, and how
            many groups of repeated tasks exist; called once, when the stream starts.
        version: returns the published policy version, -1 for none.
    """

    rules: CurriculumConfig
    _: KW_ONLY
    look: Callable[[list[GroupRequest]], Known]
    counts: Callable[[], tuple[int, int]] = lambda: (0, 0)
    seed: int = 0
    version: Callable[[], int] = lambda: -1

    def __post_init__(self) -> None:
        self._left = self._again = 0
        self._rng = random.Random(self.seed)
        self._number = 0
        self._remembered: dict[str, _Remembered] = {}
        self._latest: OrderedDict[str, bool] = OrderedDict()
        self._lock = threading.Lock()
        self.came_again = 0
        self.passed_over = 0

    @property
    def remembered(self) -> int:
        return len(self._remembered)

    def solved_share(self) -> float | None:
        """Share of the last scored tasks that are solved more often than not; None without any."""
        latest = list(self._latest.values())
        return sum(latest) / len(latest) if latest else None

    def requests(self, own: Iterator[GroupRequest]) -> Iterator[GroupRequest]:
        """Yields the stream over the environment's own order `own`; it ends when `own` does."""
        self._left, self._again = self.counts()
        self._rng = random.Random(f"{self.seed}/{self._left}/{self._again}")
        unmade = self._unmade(own)
        last: GroupRequest | None = None
        while True:
            self._number += 1
            request = None if last is None else self._one_again(last)
            if request is None:
                request = last = next(unmade, None)
                if request is None:
                    return
                self._remember(request, None, drawn=self._number)
            yield request

    def observe(self, event: Event) -> None:
        news = scored_in(event)
        if news is None:
            return
        with self._lock:
            remembered = self._remembered.get(news.task_id)
            if remembered is not None:
                remembered.estimate = updated(
                    remembered.estimate or UNTRIED, news, self.rules.discount
                )
            self._latest.pop(news.task_id, None)
            self._latest[news.task_id] = news.rewards > news.attempts / 2
            if len(self._latest) > _LATEST:
                self._latest.popitem(last=False)

    def _one_again(self, last: GroupRequest) -> GroupRequest | None:
        with self._lock:
            task_id = choose(self._candidates(), self.rules, self._rng, self._number)
            if task_id is None:
                return None
            remembered = self._remembered[task_id]
            remembered.drawn = self._number
        index, self._again = self._again, self._again + 1
        self.came_again += 1
        prefix = again_prefix(stream_prefix(last.env, last.split, last.seed))
        return msgspec.structs.replace(
            last,
            group_id=group_id(prefix, index, task_id),
            index=index,
            task=remembered.task,
            chosen=self._chosen(self.rules.sampler, remembered.estimate),
        )

    def _unmade(self, own: Iterator[GroupRequest]) -> Iterator[GroupRequest]:
        passed = 0
        while True:
            # While groups made before may still come, look up many at once.
            ahead = list(itertools.islice(own, max(1, min(_ASKED_AT_ONCE, self._left))))
            if not ahead:
                return
            known = self.look(ahead)
            for request in ahead:
                estimate = known.estimates.get(request.task.id)
                if estimate is not None:
                    self._remember(request, estimate)
                if request.group_id in known.made:
                    self._left -= 1
                elif passed < _PASSED_OVER_AT_MOST and is_passed_over(
                    self._now(estimate), self.rules, self._rng
                ):
                    passed += 1
                    self.passed_over += 1
                else:
                    passed = 0
                    chosen = self._chosen("order", estimate)
                    yield msgspec.structs.replace(request, chosen=chosen)

    def _chosen(self, by: str, estimate: Estimate | None) -> dict[str, Any]:
        now = self._now(estimate) or UNTRIED
        return {"by": by, "success": round(now.success, 4), "attempts": now.attempts}

    def _now(self, estimate: Estimate | None) -> Estimate | None:
        if estimate is None:
            return None
        return as_of(estimate, self.version(), self.rules.discount)

    def _candidates(self) -> list[Candidate]:
        return [
            Candidate(task_id, self._now(remembered.estimate), remembered.drawn)
            for task_id, remembered in self._remembered.items()
        ]

    def _remember(
        self, request: GroupRequest, estimate: Estimate | None, drawn: int | None = None
    ) -> None:
        if self.rules.sampler == "uniform":
            return
        task = request.task
        # What was scored before a restart has rested; it waits in the environment's order.
        new = _Remembered(task, None, request.index - _LONG_AGO)
        with self._lock:
            remembered = self._remembered.setdefault(task.id, new)
            remembered.task = task
            remembered.estimate = estimate or remembered.estimate
            remembered.drawn = remembered.drawn if drawn is None else drawn
            if len(self._remembered) > self.rules.memory:
                self._forget(task.id)

    def _forget(self, keep: str) -> None:
        """Forgets several tasks at once, because choosing them looks at all."""
        others = [candidate for candidate in self._candidates() if candidate.task_id != keep]
        for task_id in to_forget(others, self.rules, max(1, self.rules.memory // _FORGOTTEN)):
            del self._remembered[task_id]
