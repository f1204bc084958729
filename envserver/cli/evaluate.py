"""An evaluation: the environment's tasks and its baselines through the machinery of `process`.

In its folder: `groups.jsonl` and `groups-<baseline>.jsonl` (as `process` writes them), `run.json`
(the settings that decide results: a resumed run must have the same), `report.json`, `report.md`.
What holds: each task of the stream is tried once per run, whether others failed or not.
"""

from __future__ import annotations

import itertools
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import orjson
from pydantic import ValidationError
from rich.console import Console

from ..config import Settings
from ..environment import Environment
from ..errors import AllFailed, ConfigError, InputError, StoreError
from ..evaluation.report import Failures, Report, Rules, difference, report_run
from ..evaluation.results import TaskFacts, TaskResult, facts_of, read_results, results_of_tasks
from ..evaluation.tables import markdown_of
from ..export.unified import write_json
from ..rollouts.events import Event, GroupDropped, RolloutFailed
from ..rollouts.stream import Ticket, tickets
from .engines import SIMULATED
from .process import write_groups
from .runtime import EngineRoom, engine_room

Show = Callable[[Console, Report, Path], object]

_BASELINE = re.compile(r"[a-z0-9_]+")
_NO_MATTER = {"total_steps", "data_path_to_save_groups", "max_token_length"}
"""Settings of an environment that change no result of a task."""


@dataclass(frozen=True)
class Choice:
    """What a person chose. Arguments as `EvaluateSettings` (`folder`: its `out`)."""

    folder: Path | None = None
    resume: bool = False
    overwrite: bool = False
    pass_at: float = 1.0
    failures: Failures = "drop"
    baselines: bool = True


@dataclass
class _Run:
    """One run over the tasks: its environment, its file and what became of its groups."""

    environment: Environment
    path: Path
    tasks: dict[str, TaskFacts] = field(default_factory=dict)
    failed: dict[str, Counter[str]] = field(default_factory=dict)
    dropped: set[str] = field(default_factory=set)
    model: str = ""
    results: list[TaskResult] = field(default_factory=list)

    def stream(self) -> Iterator[Ticket]:
        """Each task once."""
        steps = self.environment.config.total_steps
        for ticket in itertools.islice(tickets(self.environment, repeat=False), steps):
            self.tasks[ticket.group_id] = facts_of(ticket.task)
            yield ticket

    def observe(self, event: Event) -> None:
        if isinstance(event, RolloutFailed):
            self.failed.setdefault(event.group_id, Counter())[event.failure.kind] += 1
        elif isinstance(event, GroupDropped):
            self.dropped.add(event.group_id)

    def read(self) -> None:
        """Reads the results from the file."""
        size = self.environment.config.group_size
        found = read_results(self.path, group_size=size)
        dropped = {group_id: self.failed.get(group_id, Counter()) for group_id in self.dropped}
        self.model = found.model
        self.results = results_of_tasks(found.by_group, self.tasks, dropped, group_size=size)


async def evaluate(
    reference: str,
    environment: Environment,
    settings: Settings,
    choice: Choice,
    console: Console,
    show: Show,
) -> int:
    """Runs all, writes the report and shows it; 0, or 130 when it was stopped before its end.

    Raises:
        AllFailed: too many groups failed in a row (there is a report of those before), or there is
            nothing to report.
        ConfigError, InputError, StoreError: as of `write_groups`; or the folder is of another run.
    """
    at = time.strftime("%Y%m%d-%H%M%S")
    folder = choice.folder or Path("runs") / "evaluate" / f"{environment.name}-{at}"
    baselines = baselines_of(environment) if choice.baselines else {}
    _check_folder(folder, _decisive(environment, settings), choice)
    runs = {"": _Run(environment, folder / "groups.jsonl")}
    for name, other in baselines.items():
        runs[name] = _Run(other, folder / f"groups-{name}.jsonl")
    done: dict[str, _Run] = {}
    stopped, failure = False, None
    async with engine_room(settings, need_engine=True, need_exact=False) as room:
        for name, run in runs.items():
            if name:
                console.print(f"Baseline {name}", highlight=False, markup=False)
            try:
                stopped = await _make(run, reference, settings, choice, console, room)
            except AllFailed as error:
                failure = error
            run.read()
            done[name] = run
            if stopped or failure is not None:
                break
    if stopped:
        on = f"Stopped early; the same command with --resume --out {folder} goes on."
        console.print(on, highlight=False, markup=False, soft_wrap=True)
    if not any(result.attempts for result in done[""].results):
        if stopped:
            return 130
        raise failure or AllFailed("Nothing could be evaluated: no attempt has a score.")
    complete = not stopped and failure is None
    report = _report(done, settings, choice, complete=complete)
    write_json(folder / "report.json", msgspec.to_builtins(report, str_keys=True))
    _write_text(folder / "report.md", markdown_of(report))
    show(console, report, folder)
    if failure is not None:
        raise failure
    return 130 if stopped else 0


async def _make(
    run: _Run,
    reference: str,
    settings: Settings,
    choice: Choice,
    console: Console,
    room: EngineRoom,
) -> bool:
    """Makes the groups of a run; whether a signal stopped it."""
    run.environment.config.max_token_length = sys.maxsize  # long answers count like others
    written = await write_groups(
        reference,
        run.environment,
        settings,
        run.stream(),
        run.path,
        console,
        resume=choice.resume,
        overwrite=choice.overwrite,
        wanted=None,
        expected=run.environment.config.total_steps,
        drop_zero_variance=False,
        room=room,
        observer=run.observe,
    )
    return written.stopped


def baselines_of(environment: Environment) -> dict[str, Environment]:
    """The environment as each of its baselines has it, but those that it is itself.

    Raises:
        ConfigError: a baseline's name or settings cannot be.
    """
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
        changed.agents = {key: one for key, one in changed.agents.items() if key in other.agents()}
        found[name] = other
    return found


def _decisive(environment: Environment, settings: Settings) -> dict[str, Any]:
    """The settings that decide results, JSON-like, without secrets."""
    config = environment.config.model_dump(mode="json", exclude=_NO_MATTER)
    return {
        "environment": environment.name,
        "env": config,
        "sampling": settings.sampling.model_dump(mode="json"),
    }


def _check_folder(folder: Path, decisive: Mapping[str, Any], choice: Choice) -> None:
    """Sees that `folder` is new, or of a run with these settings, and writes them there.

    Raises:
        ConfigError: it is not.
        InputError: what it says of its settings cannot be read.
    """
    if choice.resume and choice.overwrite:
        raise ConfigError("--resume and --overwrite exclude each other.")
    if choice.resume and choice.folder is None:
        raise ConfigError("--resume needs the folder to go on in: --out DIR.")
    path = folder / "run.json"
    if path.exists() and not choice.overwrite:
        if not choice.resume:
            raise ConfigError(
                f"{folder} holds an evaluation.",
                hint="Go on with it by --resume, replace it by --overwrite.",
            )
        _check_same(path, decisive)
        return
    write_json(path, dict(decisive))


def _check_same(path: Path, decisive: Mapping[str, Any]) -> None:
    try:
        before = orjson.loads(path.read_bytes())
        pairs = {
            name: (before[section].get(name), value)
            for section in ("env", "sampling")
            for name, value in decisive[section].items()
        }
    except (OSError, orjson.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path} cannot be read: {error}.", place=str(path)) from error
    differing = [f"{name} {old} (now {new})" for name, (old, new) in pairs.items() if old != new]
    if before.get("environment") != decisive["environment"]:
        differing.insert(0, f"env {before.get('environment')}")
    if differing:
        raise ConfigError(
            f"{path.parent} is of a run with {', '.join(differing)}.",
            hint="Resume with the settings of that run, or name another folder.",
        )


def _report(
    runs: Mapping[str, _Run], settings: Settings, choice: Choice, *, complete: bool
) -> Report:
    main = runs[""]
    config = main.environment.config
    rules = Rules(
        group_size=config.group_size,
        pass_at=choice.pass_at,
        failures=choice.failures,
        seed=config.seed,
    )
    baselines = {name: run.results for name, run in runs.items() if name}
    differences = {
        name: found
        for name, results in baselines.items()
        if (found := difference(main.results, results, rules)) is not None
    }
    return Report(
        env=main.environment.name,
        split=config.split,
        model=main.model,
        complete=complete,
        simulated=settings.model == SIMULATED,
        created_at=time.time(),
        rules=rules,
        settings=_decisive(main.environment, settings),
        run=report_run(main.results, rules),
        baselines={name: report_run(results, rules) for name, results in baselines.items()},
        differences=differences,
    )


def _write_text(path: Path, text: str) -> None:
    beside = path.with_name(f".{path.name}.part")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    except OSError as error:
        raise StoreError(f"{path} cannot be written: {error.strerror}.") from error
