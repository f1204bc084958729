"""The Python API: what the commands do, as asynchronous functions with typed results.

    result = await process("math", model="sim", env={"total_steps": 4})
    async for group in groups("math", model="sim", env={"total_steps": 4}): ...
    async with serve("math", model="sim", server={"port": 0}) as server: server.url

Settings have the names of the command line (`envserver COMMAND --help`). Nothing is printed, no
signal handler is set, and a wrong setting is a ConfigError before anything runs. `blocking` has the
same functions for code without asyncio.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import json
import sys
import tempfile
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Coroutine,
    Iterable,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeAlias, TypeVar

import structlog
from envserver_records.errors import ConfigError, UsageError
from envserver_records.records import Group
from pydantic import BaseModel

from ..environment import Environment
from ..evaluation.folders import View
from ..evaluation.perturbations import askings
from ..registry import entry_point_names, find
from ..registry.hosted import HostedEnvironment
from ..sandbox.places import temporary_folder
from ..settings.config import EnvironmentSettings, MixSettings
from ..settings.section import Section
from ..telemetry.log_lines import text_processors
from ..workers.linux import killing_programs
from . import replaying, rescoring, scoring, verifying
from .evaluating import Choice, Evaluation, evaluate_members
from .group_run import Give, GroupRun, process_run
from .hosting import Members
from .judging import CACHE_NAME
from .mix import Member, RunSpec, alone, mixed
from .options import (
    Option,
    config_error,
    expanded,
    flatten,
    nearest,
    options_of,
    validated,
    with_environment,
)
from .prices import pricing_of
from .run_settings import (
    EvaluateSettings,
    ProcessSettings,
    ReplaySettings,
    RescoreSettings,
    ScoreSettings,
    ServeSettings,
    VerifySettings,
)
from .serving import Served, Serving, serving
from .stopping import Stop

if TYPE_CHECKING:
    from .ray_serving import RayServing


S = TypeVar("S", bound=EnvironmentSettings)
M = TypeVar("M", bound=MixSettings)
T = TypeVar("T", bound=Section)
R = TypeVar("R")
P = ParamSpec("P")

AnyEnvironment: TypeAlias = "str | Path | type[Environment[Any]] | Environment[Any]"
"""The name of an installed environment, a path (`my_env.py`, `my_env.py:Class`, a folder), an
Environment subclass, or an instance (its config is used)."""
Mix: TypeAlias = "AnyEnvironment | Sequence[AnyEnvironment] | Mapping[str, float]"
"""One environment, several, or several with their weights."""


def spec_of(
    kind: type[S],
    environment: AnyEnvironment,
    settings: Mapping[str, Any],
    *,
    defaults: Mapping[str, Any] | None = None,
) -> RunSpec[S]:
    """Checks the settings of one environment.
    `settings`: by name, nested (`env={"group_size": 4}`) or dotted (`**{"env.group_size": 4}`); a
    section may be an instance of its class. They override the tree `defaults`."""
    reference = reference_of(environment)
    found = find(reference)
    given = dict(settings)
    if isinstance(environment, Environment):
        own = environment.config.model_dump(exclude_unset=True)
        given["env"] = own | dict(_plain(given.get("env", {})))
    checked = checked_settings(
        with_environment(kind, found.Config),
        {**given, "environment": reference},
        defaults=defaults,
    )
    return RunSpec(checked, reference, found)


def checked_settings(
    model: type[T], settings: Mapping[str, Any], *, defaults: Mapping[str, Any] | None = None
) -> T:
    """Raises ConfigError with all problems at once."""
    options = options_of(model)
    nested = _plain(settings)
    options = expanded(options, flatten(nested, options))
    given = flatten(nested, options)
    if unknown := [path for path in given if path not in options]:
        raise config_error(_unknown(path, options) for path in unknown)
    return validated(model, given, options, lambda path: path, _plain(defaults or {}))


def members_of(kind: type[M], mix: Mix, settings: Mapping[str, Any]) -> list[Member[M]]:
    """Checks the settings of one environment or several, and makes the environments."""
    if isinstance(mix, Mapping):
        weights = dict(mix)
    elif isinstance(mix, Sequence) and not isinstance(mix, str):
        weights = {reference_of(environment): 1.0 for environment in mix}
    else:
        return [alone(spec_of(kind, mix, settings))]
    if not weights:
        raise UsageError("No environment is given.")
    specs = [spec_of(kind, reference, settings) for reference in weights]
    shares = [(weight, 0.0) for weight in weights.values()]
    return mixed(specs, shares, [False] * len(specs))


def reference_of(environment: AnyEnvironment) -> str:
    """Returns the name under which another process finds `environment`."""
    if isinstance(environment, Path):
        return str(environment)
    if isinstance(environment, str):
        return environment
    kind = environment if isinstance(environment, type) else type(environment)
    if issubclass(kind, HostedEnvironment):
        return kind.reference
    value = f"{kind.__module__}:{kind.__qualname__}"
    for name, point in entry_point_names().items():
        if point.value == value:
            return name
    try:
        file = inspect.getsourcefile(kind)
    except (OSError, TypeError):
        file = None
    if file is None or not Path(file).is_file():
        raise ConfigError(
            f"Workers cannot import {kind.__qualname__}: it is not in a file.",
            hint="In a notebook, write it to a file (%%writefile my_env.py) and give the path.",
        )
    return f"{Path(file).resolve()}:{_name_in_file(kind)}"


def _name_in_file(kind: type[Environment]) -> str:
    """Returns the name in its module: `Sums = from_rows(...)` has another one than the
    class itself."""
    known = vars(sys.modules[kind.__module__])
    named = [name for name, value in known.items() if value is kind]
    return kind.__qualname__ if kind.__qualname__ in named or not named else named[0]


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(exclude_unset=True)
    if isinstance(value, Mapping):
        return {name: _plain(field) for name, field in value.items()}
    return value


def _unknown(path: str, options: Mapping[str, Option]) -> str:
    near = nearest(path, options)
    return f"There is no setting {path!r}." + (f" Did you mean {near!r}?" if near else "")


if not structlog.is_configured():  # a library logs where Python's logging says, and prints nothing
    structlog.configure(
        processors=[structlog.stdlib.filter_by_level, *text_processors(colors=False)],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
    )

EVALUATION_DEFAULTS: dict[str, Any] = {
    "env": {"split": "test", "include_actions": True},
    "rollouts": {"min_group_size": 1},
}


@dataclass(frozen=True)
class ProcessResult:
    """The result of `process`.

    Args:
        groups: the groups, where they went to no file.
        files: groups in each file, those of an earlier run included.
        delivered: groups that this run delivered.
        mean_reward: over all scored rollouts; None without one.
        failures: failed attempts by kind; `messages`: the latest message of each kind.
        dropped: groups that were not delivered, by reason.
        flags: rollouts by flag, see `tokens.flags`.
        stopped: whether it was stopped before its end.
    """

    groups: list[Group]
    files: dict[Path, int]
    delivered: int
    mean_reward: float | None
    failures: dict[str, int]
    messages: dict[str, str]
    dropped: dict[str, int]
    flags: dict[str, int]
    stopped: bool


@dataclass(frozen=True)
class ScoreResult:
    """The result of `score`: output rows in the order of the input, and their counts."""

    rows: list[dict[str, Any]]
    summary: scoring.Summary


def _ending_programs(
    work: Callable[P, Coroutine[Any, Any, R]],
) -> Callable[P, Coroutine[Any, Any, R]]:
    """Has programs that an environment's code starts in this process end with `work`."""

    @functools.wraps(work)
    async def call(*args: P.args, **settings: P.kwargs) -> R:
        with killing_programs() as context:
            return await asyncio.create_task(work(*args, **settings), context=context)

    return call


@_ending_programs
async def process(
    environment: Mix, *, out: Path | str | None = None, **settings: Any
) -> ProcessResult:
    """Makes groups of rollouts, as `envserver process` does.

    Args:
        environment: one, several, or several by weight (`{"math": 2, "code": 1}`).
        out: JSONL file for the groups; unset: they are in the result.
        settings: see `ProcessSettings`.

    Raises:
        ConfigError, NotFoundError: a setting is wrong, or there is no such environment.
        EngineError: the engine does not answer.
        AllFailed: too many groups failed in a row.
        StoreError: the file cannot be written.
    """
    kept: list[Group] = []

    async def keep(group: Group) -> None:
        kept.append(group)

    run = _group_run(environment, out, settings, keep if out is None else None, Stop())
    await run.run()
    tally = run.tally
    return ProcessResult(
        groups=kept,
        files=run.written(),
        delivered=run.groups.total(),
        mean_reward=tally.rewards.mean,
        failures=dict(tally.failures),
        messages=dict(tally.last_words),
        dropped=dict(tally.drops),
        flags=dict(tally.flags),
        stopped=run.stopped,
    )


async def groups(
    environment: Mix, *, out: Path | str | None = None, **settings: Any
) -> AsyncGenerator[Group]:
    """Yields groups as they finish. Arguments and errors as for `process`.

    The run waits while its groups are not taken. Closing the iterator cancels what is open.
    """
    finished: asyncio.Queue[Group] = asyncio.Queue(maxsize=1)
    with killing_programs() as context:
        run = context.run(_group_run, environment, out, settings, finished.put, Stop())
        task = asyncio.create_task(run.run(), name="envserver.groups", context=context)
        try:
            while (group := await _next_group(finished, task)) is not None:
                yield group
            await task
        finally:
            task.cancel()
            await asyncio.wait([task])


async def _next_group(finished: asyncio.Queue[Group], run: asyncio.Task[None]) -> Group | None:
    getting = asyncio.create_task(finished.get())
    try:
        await asyncio.wait({getting, run}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        if not getting.done():
            getting.cancel()
    if getting.done() and not getting.cancelled():
        return getting.result()
    return None if finished.empty() else finished.get_nowait()


def _group_run(
    environment: Mix,
    out: Path | str | None,
    settings: Mapping[str, Any],
    give: Give | None,
    stop: Stop,
) -> GroupRun:
    path = None if out is None else Path(out)
    members = members_of(ProcessSettings, environment, settings)
    return process_run(members, path_of=lambda environment: path, give=give, stop=stop)


@dataclass(frozen=True)
class Server:
    """A running server; see `serve`.

    Args:
        url: where trainers connect.
        model_url: endpoint of the model, for remote environments; "" with `ray`.
    """

    url: str
    model_url: str
    _stop: Stop
    _task: asyncio.Task[Served]

    async def wait(self) -> Served:
        """Waits until as many groups as wanted were made and acknowledged."""
        return await asyncio.shield(self._task)

    async def stop(self) -> Served:
        """Finishes the open groups (at most `server.drain_seconds`), then ends the server."""
        self._stop.finish()
        return await self.wait()


@contextlib.asynccontextmanager
async def serve(environment: Mix, **settings: Any) -> AsyncIterator[Server]:
    """Serves groups to trainers, as `envserver serve` does, while the block runs.

    At the end of the block open groups are cancelled; `Server.stop` finishes them first. What was
    accepted stays in the store.

    Args:
        settings: see `ServeSettings`; `server={"port": 0}` takes a free port, `store` names
            the file.

    Raises:
        ConfigError, NotFoundError: a setting is wrong, or there is no such environment.
        StoreError, EngineError: the store cannot be opened, or the engine does not answer.
    """
    stop = Stop()
    opening: asyncio.Future[Serving | RayServing] = asyncio.get_running_loop().create_future()
    with killing_programs() as context:
        work = _serve(environment, settings, stop, opening)
        task = asyncio.create_task(work, name="envserver.serve", context=context)
        either: list[asyncio.Future[Any]] = [opening, task]
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if opening.done():
                opened = opening.result()
                yield Server(opened.url, opened.model_url, stop, task)
        finally:
            if not opening.done():
                task.cancel()
            elif not task.done():
                stop.at_once()
            await asyncio.wait([task])
    task.result()


async def _serve(
    environment: Mix,
    settings: Mapping[str, Any],
    stop: Stop,
    opening: asyncio.Future[Serving | RayServing],
) -> Served:
    members: Members = members_of(ServeSettings, environment, settings)
    serves: contextlib.AbstractAsyncContextManager[Serving | RayServing]
    if members[0].settings.ray.address:
        from .ray_serving import ray_serving

        serves = ray_serving(members)
    else:
        serves = serving(members)
    async with serves as opened:
        opening.set_result(opened)
        return await opened.run(stop, lambda line: None)


@_ending_programs
async def evaluate(
    environment: Mix, *, out: Path | str | None = None, **settings: Any
) -> Evaluation:
    """Measures a model, as `envserver evaluate` does.

    Args:
        environment: one or several; the weights of a mapping have no effect.
        out: folder for groups and report; unset: runs/evaluate/<environment>-<time>.
        settings: see `EvaluateSettings`.

    Raises:
        ConfigError, NotFoundError: a setting is wrong, or there is no such environment.
        AllFailed: nothing could be evaluated, or too many groups failed in a row.
    """
    several = isinstance(environment, Mapping) or (
        isinstance(environment, Sequence) and not isinstance(environment, str)
    )
    listed: list[Any] = list(environment) if several else [environment]  # type: ignore[arg-type]
    given = settings if out is None else {**settings, "out": Path(out)}
    specs = [
        spec_of(EvaluateSettings, environment, given, defaults=EVALUATION_DEFAULTS)
        for environment in listed
    ]
    members = [replace(spec, name=spec.environment_class.name) for spec in specs]
    return await evaluate_members(members, choice_of(specs[0].settings))


def choice_of(settings: EvaluateSettings) -> Choice:
    return Choice(
        folder=settings.out,
        resume=settings.resume,
        overwrite=settings.overwrite,
        baselines=not settings.no_baselines,
        shard=settings.shard,
        askings=askings(settings.perturb, settings.paraphrases),
        view=View(
            pass_at=settings.pass_at,
            failures=settings.failures,
            truncated=settings.truncated,
            pricing=pricing_of(settings.prices, settings.model, settings.engine.models_file),
        ),
    )


@_ending_programs
async def score(
    environment: AnyEnvironment,
    rows: Path | str | Iterable[Mapping[str, Any]],
    **settings: Any,
) -> ScoreResult:
    """Scores answers without a model, as `envserver score` does.

    Args:
        rows: a JSONL file, or rows {"task": id of a task or row of the data set, "response": ...}.
        settings: see `ScoreSettings`.

    Raises:
        ConfigError, NotFoundError: a setting is wrong, or there is no such environment or file.
    """
    with tempfile.TemporaryDirectory("", "envserver-score-", temporary_folder()) as folder:
        source, target = Path(folder, "rows.jsonl"), Path(folder, "scores.jsonl")
        if isinstance(rows, (str, Path)):
            source = Path(rows)
        else:
            source.write_text("".join(json.dumps(dict(row)) + "\n" for row in rows))
        given = {**settings, "input": source, "out": target}
        spec = spec_of(ScoreSettings, environment, given)
        judge = spec.settings.judge  # its answers are kept, unlike the output
        judge.cache = judge.cache or Path("data", CACHE_NAME)
        summary = await scoring.run_score(spec)
        lines = (await asyncio.to_thread(target.read_text)).splitlines()
        scored = [json.loads(line) for line in lines]
    return ScoreResult(scored, summary)


@_ending_programs
async def rescore(
    environment: AnyEnvironment,
    source: Path | str | Sequence[Path | str],
    out: Path | str,
    **settings: Any,
) -> rescoring.Tally:
    """Scores delivered groups again, as `envserver rescore` does.

    Args:
        source: files of `process`, folders of them, a store, or the address of a server.
        out: JSONL file for the groups with their new scores.
        settings: see `RescoreSettings`; `rubric="file.py:Class"` scores instead of the environment.

    Raises:
        ConfigError, NotFoundError: a setting is wrong, or there is no such environment or source.
        InputError: a source holds something that is not a group.
        StoreError: `out` cannot be written.
    """
    sources = [source] if isinstance(source, (str, Path)) else list(source)
    given = {**settings, "source": [str(place) for place in sources], "out": Path(out)}
    spec = spec_of(RescoreSettings, environment, given)
    return await rescoring.rescore(spec)


@_ending_programs
async def replay(
    source: Path | str,
    rollout: str,
    *,
    environment: AnyEnvironment | None = None,
    **settings: Any,
) -> replaying.Replayed:
    """Runs a recorded rollout again and compares, as `envserver replay` does.

    Args:
        source: a file of `process`, a folder of them, a store, or the address of a server.
        rollout: id of the rollout.
        environment: unset: the installed one that made it, by its name.
        settings: see `ReplaySettings`; unset ones are as they were then, but for text that could
            name code, files or addresses.

    Raises:
        ConfigError, NotFoundError: a setting is wrong, or there is no such environment or rollout.
    """
    record = replaying.read_record([str(source)], rollout)
    given = {**settings, "source": [str(source)], "rollout": rollout}
    chosen = environment if environment is not None else replaying.recorded_environment(record)
    recorded = replaying.recorded_settings(record, find(reference_of(chosen)).Config)
    spec = spec_of(ReplaySettings, chosen, given, defaults=recorded)
    return await replaying.replay(record, spec)


async def verify(source: Path | str, **settings: Any) -> verifying.Report:
    """Checks delivered tokens against the engine, as `envserver verify` does.

    Args:
        source: a JSONL file, or the address of a running server.
        settings: see `VerifySettings`.

    Raises:
        ConfigError: a setting is wrong.
        NotFoundError: there is no such file.
        EngineError: the engine does not answer.
    """
    own = checked_settings(VerifySettings, {**settings, "source": str(source)})
    report, _ = await verifying.verify_source(own)
    return report
