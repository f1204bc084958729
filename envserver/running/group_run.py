"""A run that makes groups of one or several environments, and ends: `process` and `evaluate`.

Groups are begun by weight, and an environment with tasks left gets at least its minimum share; one
that ends or fails does not end the others; a group that a file has is not made again.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, nullcontext
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from envserver_records.errors import ConfigError
from envserver_records.records import Group

from ..environment import Environment
from ..export.jsonl import FailuresFile, JsonlSink, group_line, open_sink
from ..judges.server import JudgeServer
from ..rollouts.estimates import Scored
from ..rollouts.events import Event, GroupDelivered, Observer
from ..rollouts.scheduler import GroupMaker, Scheduler, lanes, still_wanted, targets
from ..rollouts.stream import GroupRequest, id_prefix
from ..runners.dealing import Rules
from ..settings.config import MixSettings, Settings
from ..tools.watching import watched_loop
from .context import SharedEngine, rollout_context, shared_engine
from .metrics import Rewards, Tally, all_of
from .mix import Book, Member, Several, has_curriculum, stream_of
from .run_settings import ProcessSettings
from .stopping import Stop, run_until_stopped
from .tracking import Tracking, tracking

if TYPE_CHECKING:
    from .ray_runners import RayMakers


Give = Callable[[Group], Awaitable[None]]


@dataclass(frozen=True)
class Part(Member[Any]):
    """An environment of a run, and its groups.

    Args:
        path: JSONL file for its groups, if any.
        groups: number of groups before it ends; None: as many as `requests` has.
        learn: called with the task and scores of each group that a file has already.
    """

    path: Path | None
    requests: Iterator[GroupRequest]
    groups: int | None = None
    drop_zero_variance: bool = False
    observe: Observer | None = None
    learn: Callable[[Scored], None] | None = None


class View(Observer, Protocol):
    def say(self, text: str) -> None: ...


class NoView:
    def __call__(self, event: Event) -> None:
        pass

    def say(self, text: str) -> None:
        pass


Show = Callable[[Tally, int | None, int], AbstractContextManager[View]]
"""Makes the view of a run from its counts, the expected groups and those that exist already."""


def show_nothing(tally: Tally, expected: int | None, already: int) -> AbstractContextManager[View]:
    return nullcontext(NoView())


Track = Callable[[], AbstractAsyncContextManager[Tracking | None]]


OpenMakers = Callable[[], AbstractAsyncContextManager["RayMakers | None"]]
"""Opens what makes the groups of a run on other machines; None: they are made in this process."""


@dataclass(frozen=True)
class GroupFiles:
    sink: JsonlSink
    failures: FailuresFile


@dataclass
class GroupRun:
    """Makes the groups of `parts`. Its counts can be read while it runs and afterwards.

    Args:
        total_groups: number of groups of all parts before it ends; None: each part ends by itself.
        expected: number of groups at the end, as far as it is known.
        give: receives each group after it is in its file, if it has one; the run awaits it.
        groups: delivered in this run, by environment.
    """

    parts: Sequence[Part]
    settings: Settings
    _: KW_ONLY
    resume: bool = False
    overwrite: bool = False
    total_groups: int | None = None
    expected: int | None = None
    for_training: bool = False
    shared: SharedEngine | None = None
    give: Give | None = None
    show: Show = show_nothing
    stop: Stop = field(default_factory=Stop)
    track: Track = nullcontext
    open_makers: OpenMakers = nullcontext
    tally: Tally = field(init=False, default_factory=Tally)
    groups: Counter[str] = field(init=False, default_factory=Counter)
    files: dict[Path, GroupFiles] = field(init=False, default_factory=dict)
    stopped: bool = field(init=False, default=False)
    _tracked: Tracking | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.rewards = {part.share.name: Rewards() for part in self.parts}

    @property
    def shares(self) -> dict[str, float]:
        return targets(part.share for part in self.parts)

    @property
    def judge(self) -> JudgeServer | None:
        return None if self.shared is None else self.shared.judge

    def written(self) -> dict[Path, int]:
        found = Counter({path: file.sink.already for path, file in self.files.items()})
        for part in self.parts:
            if part.path is not None and part.path in found:
                found[part.path] += self.groups[part.share.name]
        return dict(found)

    async def run(self) -> None:
        slow_seconds = self.settings.telemetry.slow_callback_seconds
        async with watched_loop(slow_seconds), contextlib.AsyncExitStack() as stack:
            self._tracked = await stack.enter_async_context(self.track())
            await self._open_files(stack)
            if self.shared is None:
                self.shared = await stack.enter_async_context(
                    shared_engine(
                        self.settings,
                        folder=next((part.path.parent for part in self.parts if part.path), None),
                    )
                )
            already = {part.share.name: self._already(part) for part in self.parts}
            if self._tracked is not None:
                self._tracked.already = sum(already.values())
            view = stack.enter_context(self.show(self.tally, self.expected, sum(already.values())))
            makers = await stack.enter_async_context(self.open_makers())
            schedulers = await self._schedulers(stack, already, view, makers)
            several = Several(schedulers)
            work = several.run(view.say)
            ending = await run_until_stopped(work, several, self.stop)
            made = sum(already.values()) + self.groups.total()
            self.stopped = ending != "done" and not (
                several.complete or (self.expected is not None and made >= self.expected)
            )
            if self.for_training and not self.stopped:
                for scheduler in schedulers.values():
                    scheduler.check()

    def _already(self, part: Part) -> int:
        if part.path is None:
            return 0
        return self.files[part.path].sink.already_of(id_prefix(part.environment))

    async def _schedulers(
        self,
        stack: contextlib.AsyncExitStack,
        already: dict[str, int],
        view: View,
        makers: RayMakers | None,
    ) -> dict[str, Scheduler]:
        opened = [
            await stack.enter_async_context(
                self._maker(number, part, self._observer(part, view), makers)
            )
            for number, part in enumerate(self.parts)
        ]
        machines = 1 if makers is None else sum(makers.runners)
        lane = lanes(
            [part.share for part in self.parts],
            already,
            room=self.settings.rollouts.max_concurrent * machines,
            total=self.total_groups,
        )
        schedulers = {}
        assert self.shared is not None
        for part, maker in zip(self.parts, opened, strict=True):
            name = part.share.name
            file = None if part.path is None else self.files[part.path].sink
            if file is not None:
                file.expect(self.shared.model)
            schedulers[name] = Scheduler(
                maker,
                part.requests,
                _Sink(file, self.give),
                wanted=still_wanted(part.groups, already[name]),
                stop_on_failures=True,
                lane=lane[name],
            )
        return schedulers

    def _maker(
        self, number: int, part: Part, observer: Observer, makers: RayMakers | None
    ) -> AbstractAsyncContextManager[GroupMaker]:
        if makers is not None:
            rules = Rules(part.drop_zero_variance, self.for_training)
            return makers.open(number, part.spec, part.environment, observer, rules)
        return rollout_context(
            part.settings,
            part.environment,
            part.spec.reference,
            observer=observer,
            drop_zero_variance=part.drop_zero_variance,
            for_training=self.for_training,
            shared=self.shared,
        )

    def _observer(self, part: Part, view: View) -> Observer:
        return all_of(
            None if part.path is None else self.files[part.path].failures.write,
            self.tally,
            self._count,
            view,
            None if self._tracked is None else self._tracked.observer(part.share.name),
            part.observe,
        )

    def _count(self, event: Event) -> None:
        if isinstance(event, GroupDelivered):
            self.groups[event.group.env] += 1
            self.rewards[event.group.env].add_group(event.group)

    async def _open_files(self, stack: contextlib.AsyncExitStack) -> None:
        for path in dict.fromkeys(part.path for part in self.parts):
            if path is not None:
                parts = [part for part in self.parts if part.path == path]
                self.files[path] = await self._open_file(path, parts, stack)

    async def _open_file(
        self, path: Path, parts: Sequence[Part], stack: contextlib.AsyncExitStack
    ) -> GroupFiles:
        configs = [part.environment.config for part in parts]
        names = [part.environment.name for part in parts]
        first = configs[0]
        forms = {
            (
                config.include_messages,
                config.include_actions,
                config.include_experts,
                config.score_range,
            )
            for config in configs
        }
        if len(forms) > 1:
            raise ConfigError(
                f"{path} is for {' and '.join(names)}, which write their groups in other forms.",
                hint="Set include_messages, _actions, _experts and score_range alike.",
            )
        identities: list[dict[str, Any]] = [
            {"env": name, "split": config.split, "seed": config.seed}
            for name, config in zip(names, configs, strict=True)
        ]
        learners = {part.environment.name: part.learn for part in parts if part.learn is not None}

        def learn(scored: Scored) -> None:
            if scored.env in learners:
                learners[scored.env](scored)

        sink = await stack.enter_async_context(
            open_sink(
                path,
                identities,
                partial(
                    group_line,
                    include_messages=first.include_messages,
                    include_actions=first.include_actions,
                    include_experts=first.include_experts,
                    score_range=first.score_range,
                ),
                resume=self.resume,
                overwrite=self.overwrite,
                tell=learn if learners else None,
            )
        )
        return GroupFiles(sink, FailuresFile(path, resume=self.resume))


class _Sink:
    """A GroupSink that writes to a file and then passes groups to a consumer; both are optional."""

    def __init__(self, file: JsonlSink | None, give: Give | None) -> None:
        self._file = file
        self._give = give

    async def put(self, group: Group) -> None:
        if self._file is not None:
            await self._file.put(group)
        if self._give is not None:
            await self._give(group)

    async def known(self, group_ids: list[str]) -> set[str]:
        return set() if self._file is None else await self._file.known(group_ids)

    async def wait_for_capacity(self) -> None:
        if self._file is not None:
            await self._file.wait_for_capacity()


def makers_of(settings: MixSettings, weights: Sequence[float] = (1.0,)) -> OpenMakers:
    if not settings.ray.address:
        return nullcontext

    def opened() -> AbstractAsyncContextManager[RayMakers | None]:
        from .ray_runners import ray_makers

        return ray_makers(settings, weights)

    return opened


def default_path(environment: Environment) -> Path:
    return Path("data") / f"{environment.name}.jsonl"


def process_run(
    members: Sequence[Member[ProcessSettings]],
    *,
    path_of: Callable[[Environment], Path | None] = default_path,
    give: Give | None = None,
    show: Show = show_nothing,
    stop: Stop | None = None,
) -> GroupRun:
    """The settings of the whole run are the first member's."""
    settings = members[0].settings
    total = settings.total_groups
    return GroupRun(
        [_part(member, path_of, total) for member in members],
        settings,
        resume=settings.resume,
        overwrite=settings.overwrite,
        total_groups=total,
        expected=_expected(members, total),
        for_training=True,
        give=give,
        show=show,
        stop=stop or Stop(),
        track=partial(
            tracking,
            settings.track,
            settings.tracking,
            settings,
            command="process",
            environments=[member.share.name for member in members],
        ),
        open_makers=makers_of(settings, [member.share.weight for member in members]),
    )


def _part(
    member: Member[ProcessSettings],
    path_of: Callable[[Environment], Path | None],
    total: int | None,
) -> Part:
    environment, rules = member.environment, member.settings.curriculum
    config = environment.config
    book = Book(environment, rules) if has_curriculum(rules) else None
    repeat = config.total_steps is not None or total is not None
    return Part(
        **vars(member),
        path=config.data_path_to_save_groups or path_of(environment),
        requests=stream_of(environment, None if book is None else book.curriculum, repeat=repeat),
        groups=config.total_steps,
        drop_zero_variance=bool(config.ensure_scores_are_not_same),
        observe=None if book is None else book.observe,
        learn=None if book is None else book.read,
    )


def _expected(members: Sequence[Member[ProcessSettings]], total: int | None) -> int | None:
    steps = [member.environment.config.total_steps for member in members]
    of_each = None if None in steps else sum(step or 0 for step in steps)
    return min((limit for limit in (total, of_each) if limit is not None), default=None)
