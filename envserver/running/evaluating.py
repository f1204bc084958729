"""An evaluation: runs the tasks of environments and their baselines like `process`.

In the folder of each environment: `groups.jsonl` and `groups-<baseline>.jsonl`, `tasks.jsonl` for
each, `run.json` (the settings that decide results: a resumed run must have the same), and the
report, made from these files. Several environments have a subfolder each. Each task is tried once
per run, whether others failed or not; an environment that fails does not end the others.
"""

from __future__ import annotations

import asyncio
import itertools
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from envserver_records.errors import AllFailed, ConfigError, EnvserverError
from envserver_records.packing import ready
from pydantic import ValidationError

from ..environment import Environment
from ..evaluation.folders import Evaluated, RunFile, View, groups_path, read_folder, tasks_path
from ..evaluation.perturbations import Asking, settings_of
from ..evaluation.report import Counted, Report, Suite, summary_scalars
from ..evaluation.results import TaskFacts, facts_of, read_tasks
from ..rollouts.events import Event, GroupDelivered, GroupDropped, RolloutFailed
from ..rollouts.rewards import range_of
from ..rollouts.scheduler import Share
from ..rollouts.stream import GroupRequest, group_requests
from ..settings.config import MixSettings
from .context import SharedEngine, identity_of, shared_engine
from .engines import SIMULATED
from .evaluation_folder import Shard, claim, shard_of, write_report, write_run_file, write_tasks
from .group_run import GroupRun, Part, Show, makers_of, show_nothing
from .judging import judge_line
from .mix import RunSpec
from .stopping import Stop
from .tracking import Tracking, tracking

if TYPE_CHECKING:
    from .ray_runners import RayMakers

_BASELINE = re.compile(r"[a-z0-9_]+")
_NO_MATTER = {"total_steps", "data_path_to_save_groups", "max_token_length"}
"""Settings of an environment that do not change the result of a task."""


class EvaluationView:
    """Observes an evaluation; this base class shows nothing."""

    show: Show = staticmethod(show_nothing)

    def say(self, line: str) -> None: ...

    def ended(self, run: GroupRun, settings: MixSettings) -> None: ...

    def report(self, report: Report | Suite, folder: Path) -> None: ...


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation.

    Args:
        report: of one environment, or the suite of several; None: stopped before there was any.
        stopped: whether it was stopped before its end; it can be resumed.
    """

    folder: Path
    report: Report | Suite | None
    stopped: bool


@dataclass(frozen=True)
class Choice:
    """Options of an evaluation. Arguments as in `EvaluateSettings` (`folder`: its `out`)."""

    folder: Path | None = None
    resume: bool = False
    overwrite: bool = False
    baselines: bool = True
    view: View = field(default_factory=View)
    shard: str = ""
    askings: Mapping[str, Asking] = field(default_factory=dict)


@dataclass
class _Run:
    environment: Environment
    groups: Path
    tasks: Path
    shard: Shard
    asking: Asking | None = None
    facts: dict[str, TaskFacts] = field(default_factory=dict)
    failed: dict[str, Counter[str]] = field(default_factory=dict)
    dropped: set[str] = field(default_factory=set)

    def stream(self) -> Iterator[GroupRequest]:
        steps = self.environment.config.total_steps
        whole = itertools.islice(group_requests(self.environment, repeat=False), steps)
        for request in self.shard.taken(whole):
            if self.asking is not None:
                task = self.asking.asked(request.task)
                if task is None:
                    continue
                request = msgspec.structs.replace(request, task=task)
            self.facts[request.group_id] = facts_of(request.group_id, request.task)
            yield request

    def observe(self, event: Event) -> None:
        if isinstance(event, RolloutFailed):
            self.failed.setdefault(event.group_id, Counter())[event.failure.kind] += 1
        elif isinstance(event, GroupDropped):
            self.dropped.add(event.group_id)

    def write_tasks(self) -> None:
        """Keeps earlier facts of tasks that are not visited again."""
        if not self.groups.exists():
            return
        known = (
            {task.group_id: task for task in read_tasks(self.tasks)} if self.tasks.exists() else {}
        )
        for group_id, fact in self.facts.items():
            dropped = dict(self.failed.get(group_id, {})) if group_id in self.dropped else None
            known[group_id] = msgspec.structs.replace(fact, dropped=dropped)
        write_tasks(self.tasks, known.values())


@dataclass
class _Part:
    """One environment; `runs`: by baseline, "" is the environment itself."""

    spec: RunSpec[Any]
    folder: Path
    evaluated: Evaluated
    noted: RunFile
    runs: dict[str, _Run]
    begun: bool = False

    def __post_init__(self) -> None:
        self.left = len(self.runs)

    @property
    def environment(self) -> Environment:
        return self.runs[""].environment

    def begin(self, choice: Choice) -> None:
        if self.begun:
            return
        claim(self.folder, self.noted, resume=choice.resume, overwrite=choice.overwrite)
        for run in self.runs.values() if choice.overwrite else ():
            run.tasks.unlink(missing_ok=True)
        self.begun = True


async def evaluate_members(
    specs: Sequence[RunSpec[Any]],
    choice: Choice,
    *,
    view: EvaluationView | None = None,
    stop: Stop | None = None,
) -> Evaluation:
    """Evaluates environments whose names differ."""
    work = _Evaluating(specs, choice, view or EvaluationView(), stop or Stop())
    settings = specs[0].settings
    names = [spec.name for spec in specs]
    async with (
        tracking(
            settings.track, settings.tracking, settings, command="evaluate", environments=names
        ) as tracked,
        shared_engine(settings, folder=work.folder) as shared,
        makers_of(settings)() as makers,
    ):
        return await work.run(shared, tracked, makers)


async def evaluate_on(
    shared: SharedEngine, specs: Sequence[RunSpec[Any]], choice: Choice
) -> Evaluation:
    """`evaluate_members` on an engine that is open already; shows nothing."""
    return await _Evaluating(specs, choice, EvaluationView(), Stop()).run(shared)


class _Evaluating:
    def __init__(
        self, specs: Sequence[RunSpec[Any]], choice: Choice, view: EvaluationView, stop: Stop
    ) -> None:
        self.folder = choice.folder or _new_folder(specs)
        self._parts = _claimed(specs, self.folder, choice)
        self._choice = choice
        self._view = view
        self._stop = stop

    async def run(
        self,
        shared: SharedEngine,
        tracked: Tracking | None = None,
        makers: RayMakers | None = None,
    ) -> Evaluation:
        self._shared, self._tracked, self._makers = shared, tracked, makers
        failures = await self._make_parts()
        if shared.judge is not None:
            self._view.say(judge_line(shared.judge))
        for kind in (RunFile, TaskFacts, Report, Suite):
            ready(kind)
        done = await asyncio.to_thread(self._reported, failures)
        if tracked is not None and done.report is not None:
            tracked.summary(summary_scalars(done.report))
        return done

    async def _make_parts(self) -> list[EnvserverError]:
        """Makes the groups of all environments; returns the errors that ended some of them."""
        failures: list[EnvserverError] = []
        for number, part in enumerate(self._parts, 1):
            name = part.spec.name
            if len(self._parts) > 1:
                self._view.say(f"{name} ({number} of {len(self._parts)})")
            failure = await self._make_part(part)
            if failure is not None:
                failures.append(failure)
                if len(self._parts) > 1:
                    self._view.say(f"{name}: {failure.message}")
            if self._stop.requested:
                break
        return failures

    async def _make_part(self, part: _Part) -> EnvserverError | None:
        failure = None
        for name, run in part.runs.items():
            if name:
                self._view.say(f"{'Asked as' if run.asking else 'Baseline'} {name}")
            try:
                await self._make(run, part, None if name else self._tracked)  # not the baselines
            except EnvserverError as error:
                failure = error
            if part.begun:
                run.write_tasks()
            if self._stop.requested or failure is not None:
                break
        if not part.begun:
            return failure
        part.noted.evaluated = msgspec.structs.replace(
            part.evaluated,
            complete=not part.left,
            finished_at=time.time(),
        )
        bounds = range_of(part.environment)
        low, high = bounds.axis
        counted = Counted(pass_at=bounds.solved_at, worst=low, best=high)
        part.noted.counted = self._choice.view.over(counted, self._shared.model)
        write_run_file(part.folder, part.noted)
        return failure

    async def _make(self, run: _Run, owner: _Part, tracked: Tracking | None) -> None:
        environment, spec, choice = run.environment, owner.spec, self._choice
        environment.config.max_token_length = sys.maxsize  # long answers count like others
        track = None if tracked is None else tracked.observer(spec.name)

        def observe(event: Event) -> None:
            if isinstance(event, GroupDelivered):
                owner.begin(choice)
            run.observe(event)
            if track is not None:
                track(event)

        part = Part(
            spec=spec,
            environment=environment,
            share=Share(environment.name),
            path=run.groups,
            requests=run.stream(),
            observe=observe,
        )
        groups = GroupRun(
            [part],
            spec.settings,
            resume=choice.resume,
            overwrite=choice.overwrite,
            expected=run.shard.size(environment.config.total_steps),
            shared=self._shared,
            show=self._view.show,
            stop=self._stop,
            open_makers=lambda: nullcontext(self._makers),
        )
        try:
            await groups.run()
            owner.left -= not groups.stopped
        finally:
            self._view.ended(groups, spec.settings)

    def _reported(self, failures: Sequence[EnvserverError]) -> Evaluation:
        """Writes the report of the groups that were made; raises the error that ended the run
        early."""
        folder, view = self.folder, self._view
        stopped = self._stop.requested and any(part.left for part in self._parts)
        if stopped:
            view.say(f"Stopped early; the same command with --resume --out {folder} continues.")
        if not any(part.begun and _has_groups(part) for part in self._parts):
            if stopped:
                return Evaluation(folder, None, stopped)
            raise [*failures, _nothing()][0]
        reports = read_folder(folder, View())
        without = [report.name for report in reports if not report.run.counts.scored]
        if len(without) == len(reports):
            raise [*failures, _nothing()][0]
        report = write_report(folder, View())
        view.report(report, folder)
        if failures and not stopped:
            raise failures[0]
        if without and not stopped:
            raise AllFailed(f"{', '.join(without)}: no attempt has a score.")
        return Evaluation(folder, report, stopped)


def _check_passable(part: _Part, choice: Choice) -> None:
    environment = part.environment
    bounds, pass_at = range_of(environment), choice.view.pass_at
    if pass_at is not None and not bounds.low < pass_at <= bounds.high:
        raise ConfigError(
            f"--pass_at {pass_at:g} is outside of the rewards of {environment.name!r}: "
            f"({bounds.low:g}, {bounds.high:g}].",
            hint=f"A task is solved at {bounds.solved_at:g}.",
        )


def _nothing() -> AllFailed:
    return AllFailed("Nothing could be evaluated: no attempt has a score.")


def _has_groups(part: _Part) -> bool:
    run = part.runs[""]
    return run.groups.exists() and run.groups.stat().st_size > 0


def _new_folder(specs: Sequence[RunSpec[Any]]) -> Path:
    name = specs[0].name if len(specs) == 1 else "several"
    return Path("runs") / "evaluate" / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"


def _claimed(specs: Sequence[RunSpec[Any]], folder: Path, choice: Choice) -> list[_Part]:
    if choice.resume and choice.folder is None:
        raise ConfigError("--resume needs the folder to continue: --out DIR.")
    alone = len(specs) == 1
    parts = [_part(spec, folder if alone else folder / spec.name, choice) for spec in specs]
    if not alone:
        names = RunFile(parts=[spec.name for spec in specs])
        claim(folder, names, resume=choice.resume, overwrite=choice.overwrite)
    for part in parts:
        if not choice.overwrite:  # else the first group does, so that a failure replaces nothing
            part.begin(choice)
    for part in parts:
        _check_passable(part, choice)
    return parts


def _part(spec: RunSpec[Any], folder: Path, choice: Choice) -> _Part:
    environment = spec.make_environment()
    baselines = baselines_of(environment) if choice.baselines else {}
    shard = shard_of(choice.shard)
    runs = {
        name: _Run(player, groups_path(folder, name), tasks_path(folder, name), shard)
        for name, player in {"": environment, **baselines}.items()
    }
    for name, asking in choice.askings.items():
        place = groups_path(folder, name), tasks_path(folder, name)
        runs[name] = _Run(spec.make_environment(), *place, shard, asking)
    evaluated = _evaluated(environment, spec.settings, choice, list(baselines), shard)
    return _Part(spec, folder, evaluated, RunFile(name=spec.name, evaluated=evaluated), runs)


def _evaluated(
    environment: Environment,
    settings: MixSettings,
    choice: Choice,
    baselines: list[str],
    shard: Shard,
) -> Evaluated:
    config = environment.config
    return Evaluated(
        environment=environment.name,
        env=config.model_dump(mode="json", exclude=_NO_MATTER),
        sampling=settings.sampling.model_dump(mode="json"),
        agent=identity_of(settings.agent),
        split=config.split,
        group_size=config.group_size,
        seed=config.seed,
        simulated=settings.model == SIMULATED,
        shard=str(shard),
        baselines=[*baselines, *choice.askings],
        variants=settings_of(choice.askings),
    )


def baselines_of(environment: Environment) -> dict[str, Environment]:
    """Returns the environment with the settings of each baseline, except those equal to its own."""
    config, found = environment.config, {}
    for name, own in environment.baselines().items():
        if not _BASELINE.fullmatch(name):
            raise ConfigError(f"Baseline {name!r}: a name has small letters, digits and _ only.")
        try:
            changed = type(config).model_validate(config.model_dump() | dict(own))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            raise ConfigError(
                f"Baseline {name!r} of {environment.name!r} has wrong settings: {first['msg']}."
            ) from error
        if changed == config:
            continue
        other = type(environment)(changed)
        changed.agents = {
            key: agent for key, agent in changed.agents.items() if key in other.agents()
        }
        found[name] = other
    return found
