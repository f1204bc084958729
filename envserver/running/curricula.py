"""The stream of tasks of each environment of a run: with what is known of them, where that counts.

`serve` asks the store, `process` remembers what its files say and what it makes itself. The default
sampler, `uniform`, is the environment's own order: nothing is asked or remembered for it.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING

import structlog
from envserver_records.errors import StoreError, StoreLost

from ..curriculum_config import CurriculumConfig
from ..environment import Environment
from ..rollouts.estimates import UNTRIED, Estimate, Scored, scored_of, updated
from ..rollouts.events import Event, GroupDelivered, GroupDropped
from ..rollouts.stream import GroupRequest, again_prefix, group_requests, id_prefix
from ..rollouts.task_stream import Known, TaskStream

if TYPE_CHECKING:  # a command without a store does not wait for SQLAlchemy
    from ..store import Store

_log = structlog.get_logger("envserver.curriculum")

_AGAIN_SECONDS = 1.0
MOST_ESTIMATES = 65_536
"""Of tasks that `process` knows of; the one that was not scored for longest goes."""


def has_curriculum(rules: CurriculumConfig) -> bool:
    """Whether estimates have a say in which task comes next."""
    return rules.sampler != "uniform" or rules.solved_above is not None


def stream_of(
    environment: Environment, curriculum: TaskStream | None, *, repeat: bool
) -> Iterator[GroupRequest]:
    """The tasks of a run as groups to be made, see `rollouts.stream.group_requests`."""
    own = group_requests(environment, repeat=repeat)
    return own if curriculum is None else curriculum.requests(own)


async def curriculum_of_store(
    environment: Environment, rules: CurriculumConfig, store: Store, version: Callable[[], int]
) -> TaskStream | None:
    """With what `store` knows; None where estimates have no say."""
    store.discount = rules.discount
    if not has_curriculum(rules):
        return None
    prefix = id_prefix(environment)
    again = await store.count_made(again_prefix(prefix))
    made = await store.count_made(prefix) - again
    return TaskStream(
        rules,
        look=partial(_look, store, asyncio.get_running_loop()),
        counts=lambda: (made, again),
        seed=environment.config.seed,
        version=version,
    )


def _look(store: Store, loop: asyncio.AbstractEventLoop, asked: list[GroupRequest]) -> Known:
    """For the thread in which tasks are read."""
    return asyncio.run_coroutine_threadsafe(_ask(store, asked), loop).result()


async def _ask(store: Store, asked: list[GroupRequest]) -> Known:
    """What `store` knows of these, as soon as it can say it."""
    env, split = asked[0].env, asked[0].split
    while True:
        try:
            made = await store.made([request.group_id for request in asked])
            ids = list({request.task.id for request in asked})
            return Known(made, await store.estimates_of(env, split, ids))
        except StoreLost:
            raise
        except StoreError as error:
            _log.warning("estimates.not_read", error=str(error))
            await asyncio.sleep(_AGAIN_SECONDS)


class Book:
    """What one run of `process` or `join` knows of its groups and tasks, without a store.

    Args:
        known: which of these groups are made, too; it may block.
        counts: how many groups of the environment's order are made beside those that are read, and
            a number behind those of all tasks that came again.
    """

    def __init__(
        self,
        environment: Environment,
        rules: CurriculumConfig,
        *,
        known: Callable[[list[str]], set[str]] | None = None,
        counts: tuple[int, int] = (0, 0),
        version: Callable[[], int] = lambda: -1,
    ) -> None:
        self._prefix = id_prefix(environment)
        self._discount = rules.discount
        self._made: set[str] = set()
        self._known = known
        self._more = counts
        self._estimates: OrderedDict[str, Estimate] = OrderedDict()
        self.curriculum = TaskStream(
            rules,
            look=self._look,
            counts=self._counts,
            seed=environment.config.seed,
            version=version,
        )

    def learn(self, estimates: Mapping[str, Estimate]) -> None:
        """What was known of tasks before."""
        self._estimates.update(estimates)

    def read(self, scored: Scored) -> None:
        """A group that was made before."""
        if scored.group_id.startswith(self._prefix) and scored.group_id not in self._made:
            self._made.add(scored.group_id)
            self._count(scored)

    def observe(self, event: Event) -> None:
        """Takes up what a group says of its task."""
        news: Scored | None = None
        if isinstance(event, GroupDelivered):
            news = scored_of(event.group)
        elif isinstance(event, GroupDropped):
            news = event.scored
        if news is not None:
            self._count(news)
            self.curriculum.observe(event)

    def _count(self, scored: Scored) -> None:
        before = self._estimates.pop(scored.task_id, UNTRIED)
        self._estimates[scored.task_id] = updated(before, scored, self._discount)
        if len(self._estimates) > MOST_ESTIMATES:
            self._estimates.popitem(last=False)

    def _counts(self) -> tuple[int, int]:
        again = sum(one.startswith(again_prefix(self._prefix)) for one in self._made)
        own, later = self._more
        return len(self._made) - again + own, again + later

    def _look(self, asked: list[GroupRequest]) -> Known:
        found = ((one.task.id, self._estimates.get(one.task.id)) for one in asked)
        ids = [request.group_id for request in asked]
        return Known(
            self._made.intersection(ids) | (self._known(ids) if self._known else set()),
            {task_id: estimate for task_id, estimate in found if estimate is not None},
        )
