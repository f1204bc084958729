"""The environments of a run: one with its settings, or several, each with its share."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import structlog
from envserver_records.errors import ConfigError, EnvserverError, StoreError, StoreLost

from ..environment import Environment
from ..rollouts.estimates import UNTRIED, Estimate, Scored, updated
from ..rollouts.events import Event, scored_in
from ..rollouts.scheduler import Scheduler, Share, targets
from ..rollouts.stream import GroupRequest, again_prefix, group_requests, id_prefix
from ..rollouts.task_stream import Known, TaskStream
from ..settings.config import EnvironmentSettings, MixSettings, Settings
from ..settings.runs import CurriculumConfig

if TYPE_CHECKING:
    from ..store import Store


S = TypeVar("S", bound=EnvironmentSettings)


@dataclass(frozen=True)
class RunSpec(Generic[S]):
    """An environment and its settings. `name`: tells it from others of an evaluation; errors have
    it."""

    settings: S
    reference: str
    environment_class: type[Environment]
    name: str = ""

    def __post_init__(self) -> None:
        """Raises ConfigError for settings that would fail later, when much has been loaded."""
        settings = self.settings
        if getattr(settings, "resume", False) and getattr(settings, "overwrite", False):
            raise ConfigError("--resume and --overwrite exclude each other.")
        if isinstance(settings, Settings):
            from ..tokens.flags import chosen
            from .prices import pricing_of

            tokens = settings.tokens
            chosen(tokens.train, tokens.mask, tokens.drop)
            pricing_of(settings.prices, None, settings.engine.models_file)

    def make_environment(self) -> Environment:
        from ..rollouts.rewards import roles_of
        from ..tools.calling import blaming

        kind = self.environment_class
        try:
            with blaming(f"Environment {self.reference!r} cannot be made", kind.__init__):
                environment = kind(self.settings.env)
                roles_of(environment)
        except ConfigError as error:
            error.message = f"{self.name}: {error.message}" if self.name else error.message
            raise
        return environment


M = TypeVar("M", bound=MixSettings)


@dataclass(frozen=True)
class Member(Generic[M]):
    spec: RunSpec[M]
    environment: Environment
    share: Share

    @property
    def settings(self) -> M:
        return self.spec.settings


def alone(spec: RunSpec[M]) -> Member[M]:
    environment = spec.make_environment()
    return Member(spec, environment, Share(environment.name))


def share_total(listed: Sequence[M], own: Sequence[bool]) -> list[M]:
    """Reads `env.total_steps` of a mix as the groups of all environments together: `total_groups`.
    A smaller `total_groups` stays. `own`: environments that keep a number of steps for themselves.
    """
    totals = {
        total
        for entry, its_own in zip(listed, own, strict=True)
        for total in (entry.total_groups, None if its_own else entry.env.total_steps)
        if total is not None
    }
    total = min(totals, default=None)
    return [
        entry.model_copy(
            update={
                "total_groups": total,
                "env": entry.env.model_copy(
                    update={"total_steps": entry.env.total_steps if its_own else None}
                ),
            }
        )
        for entry, its_own in zip(listed, own, strict=True)
    ]


def mixed(
    specs: Sequence[RunSpec[M]],
    shares: Sequence[tuple[float, float]],
    own: Sequence[bool],
) -> list[Member[M]]:
    """Makes the environments of a mix, each with its weight and minimum share.
    `own`: see `share_total`."""
    if len(specs) > 1:
        shared = share_total([spec.settings for spec in specs], own)
        specs = [
            replace(spec, settings=settings) for spec, settings in zip(specs, shared, strict=True)
        ]
    members = []
    for spec, share in zip(specs, shares, strict=True):
        environment = spec.make_environment()
        members.append(Member(spec, environment, Share(environment.name, *share)))
    targets(member.share for member in members)  # raises where shares cannot be
    return members


class Several:
    def __init__(self, schedulers: Mapping[str, Scheduler]) -> None:
        self._schedulers = dict(schedulers)
        self.failed: dict[str, EnvserverError] = {}
        """Environments that failed while the others went on."""

    @property
    def open_groups(self) -> int:
        return sum(scheduler.open_groups for scheduler in self._schedulers.values())

    @property
    def complete(self) -> bool:
        return all(scheduler.complete for scheduler in self._schedulers.values())

    @property
    def drained(self) -> bool:
        return any(scheduler.drained for scheduler in self._schedulers.values())

    def cut_off(self) -> dict[str, int]:
        return {name: scheduler.cut_off for name, scheduler in self._schedulers.items()}

    def delivered(self) -> dict[str, int]:
        return {name: scheduler.delivered for name, scheduler in self._schedulers.items()}

    def drain(self) -> None:
        for scheduler in self._schedulers.values():
            scheduler.drain()

    async def run(self, say: Callable[[str], object]) -> None:
        async with asyncio.TaskGroup() as tasks:
            for name, scheduler in self._schedulers.items():
                tasks.create_task(self._one(name, scheduler.run(), say))
        if self.failed:
            name, error = next(iter(self.failed.items()))
            if len(self._schedulers) > 1:
                error.message = f"{name}: {error.message}"
            raise error

    async def _one(
        self, name: str, work: Coroutine[Any, Any, None], say: Callable[[str], object]
    ) -> None:
        try:
            await work
        except EnvserverError as error:
            self.failed[name] = error
            if len(self._schedulers) > 1:
                say(f"{name} has ended: {error.message}")


# `serve` reads estimates from the store. `process` keeps them in memory: from the output files and
# from the groups it makes. The default sampler, `uniform`, follows the environment's order: it
# needs no estimates.

_log = structlog.get_logger("envserver.curriculum")

_AGAIN_SECONDS = 1.0
MOST_ESTIMATES = 65_536
"""Tasks that `process` keeps estimates of; the least recently scored is evicted."""


def has_curriculum(rules: CurriculumConfig) -> bool:
    """Returns whether estimates influence the order of tasks."""
    skips = rules.solved_above is not None or rules.unsolved_share < 1
    return rules.sampler != "uniform" or skips


def stream_of(
    environment: Environment, curriculum: TaskStream | None, *, repeat: bool
) -> Iterator[GroupRequest]:
    own = group_requests(environment, repeat=repeat)
    return own if curriculum is None else curriculum.requests(own)


async def curriculum_of_store(
    environment: Environment, rules: CurriculumConfig, store: Store, version: Callable[[], int]
) -> TaskStream | None:
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


def _look(store: Store, loop: asyncio.AbstractEventLoop, requests: list[GroupRequest]) -> Known:
    return asyncio.run_coroutine_threadsafe(_ask(store, requests), loop).result()


async def _ask(store: Store, requests: list[GroupRequest]) -> Known:
    """Retries until the store answers."""
    env, split = requests[0].env, requests[0].split
    while True:
        try:
            made = await store.made([request.group_id for request in requests])
            ids = list({request.task.id for request in requests})
            return Known(made, await store.estimates_of(env, split, ids))
        except StoreLost:
            raise
        except StoreError as error:
            _log.warning("estimates.not_read", error=str(error))
            await asyncio.sleep(_AGAIN_SECONDS)


class Book:
    """The groups and tasks of one run of `process` or `join`, without a store.

    Args:
        known: returns which of these groups exist already; it may block.
        counts: groups in the environment's order beyond those that are read, and the number at
            which re-sampled groups continue.
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
        self._estimates.update(estimates)

    def read(self, scored: Scored) -> None:
        if scored.group_id.startswith(self._prefix) and scored.group_id not in self._made:
            self._made.add(scored.group_id)
            self._count(scored)

    def observe(self, event: Event) -> None:
        if (news := scored_in(event)) is not None:
            self._count(news)
            self.curriculum.observe(event)

    def _count(self, scored: Scored) -> None:
        before = self._estimates.pop(scored.task_id, UNTRIED)
        self._estimates[scored.task_id] = updated(before, scored, self._discount)
        if len(self._estimates) > MOST_ESTIMATES:
            self._estimates.popitem(last=False)

    def _counts(self) -> tuple[int, int]:
        again = sum(group_id.startswith(again_prefix(self._prefix)) for group_id in self._made)
        own, later = self._more
        return len(self._made) - again + own, again + later

    def _look(self, requests: list[GroupRequest]) -> Known:
        found = ((request.task.id, self._estimates.get(request.task.id)) for request in requests)
        ids = [request.group_id for request in requests]
        return Known(
            self._made.intersection(ids) | (self._known(ids) if self._known else set()),
            {task_id: estimate for task_id, estimate in found if estimate is not None},
        )
