"""Commands on one rollout: `run` (with `--watch` again after each change of the environment) and
`replay`. The flags of a question are the fields of the environment's `Question`.
"""

from __future__ import annotations

import inspect
import itertools
import json
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from envserver_records.errors import ConfigError, Failure, UsageError
from pydantic import create_model
from pydantic.fields import FieldInfo

from ..running.run_settings import ReplaySettings, RunSettings
from ..settings.section import descriptions
from ..telemetry.redaction import counted, printable
from . import lean_imports
from .command_line import ENGINE, SAMPLING, CommandSpec, read_run_spec
from .sources import Given, as_list

if TYPE_CHECKING:
    from ..environment import Environment
    from ..running.asking import Answered
    from ..running.mix import RunSpec
    from ..running.replaying import Record, Replayed
    from .console import Console


SUMMARY = """Runs an environment's agent once, on a question or on one of its tasks (--task ID), and
writes a unified trajectory: readable actions, the final answer, and the reward if the expected
answer is known. To find a mistake: --debug, --watch, --interactive."""


def settings_for(environment: type[Environment]) -> type[RunSettings]:
    """Adds the fields of the environment's question, none required: there may be a task instead."""
    question = environment.Question
    if taken := set(question.model_fields) & set(RunSettings.model_fields):
        raise ConfigError(
            f"The environment's Question has a field {min(taken)!r}, which is a setting of `run`.",
            hint="Rename the field.",
        )
    texts = descriptions(question)
    fields = {
        name: _optional(field, texts.get(name)) for name, field in question.model_fields.items()
    }
    return create_model("RunSettings", __base__=RunSettings, **fields)


def _optional(field: FieldInfo, description: str | None) -> Any:
    annotation: Any = field.annotation
    optional = copy(field)
    optional.description = description
    if not field.is_required():
        return annotation, optional
    optional.default = None
    return annotation | None, optional


COMMAND = CommandSpec(
    "run",
    SUMMARY,
    RunSettings,
    usage="--env NAME (--question TEXT | --task ID)",
    frequent=(
        *("environment", "task", "debug", "watch", "interactive", "verbose", *ENGINE),
        *("env.max_token_length", *SAMPLING, "out", "include_tokens"),
    ),
    settings_for=settings_for,
    openai_variables="openai",
)


def run(argv: list[str]) -> int:
    with lean_imports():
        from ..export.unified import write_json
        from ..registry import interpreter_of
        from ..registry.interpreters import become
        from ..running.asking import EnvironmentRaised, ask, asking
        from .console import Console
        from .conversation import Person, show_rollout
        from .loop import configure_logs, run_loop

    line = read_run_spec(COMMAND, argv)
    settings = line.settings
    console = Console(stderr=True, highlight=False, soft_wrap=True)

    def failed(failure: Failure) -> None:
        console.say(f"Trying again: {failure.message}")

    if settings.watch:
        return watch([*argv, "--watch", "false"], line, console)
    if settings.debug and (python := interpreter_of(line.reference)) is not None:
        sys.stderr.flush()
        become(python, ["run", *argv])
    configure_logs("warning" if settings.debug else settings.log_level, settings.log_format)
    person = Person(console).answer if settings.interactive else None
    try:
        answered = run_loop(ask(asking(line), failed, person))
    except EnvironmentRaised as raised:
        traceback.print_exception(raised.error)
        return 1
    if settings.verbose:
        show_rollout(console, answered.trajectory)
    path = settings.out or _free_path(line.environment_class.name, answered.task_id)
    write_json(path, answered.document)
    _show(answered, path, console)
    return 0


def _show(answered: Answered, path: Path, console: Console) -> None:
    answer, trajectory = answered.document["final_answer"], answered.trajectory
    shown = printable(answer or "", keep="\n\t") if sys.stdout.isatty() else answer
    sys.stdout.write(f"{shown}\n" if shown else "")
    sys.stdout.flush()
    if not answer:
        console.say("There is no final answer.")
    if trajectory.limit is not None:
        console.say(f"The rollout hit its limit: {trajectory.limit}.")
    if trajectory.score.reward is not None:
        console.say(f"Reward: {trajectory.score.reward:g}")
    if answered.judge:
        console.say(answered.judge)
    console.say(f"Trajectory: {path}")


def _free_path(environment: str, task_id: str) -> Path:
    name = "".join(c if c.isalnum() or c in "-_." else "_" for c in task_id)[:80]
    stem = f"{environment}_{name.removeprefix(f'{environment}-')}"
    folder = Path("runs")
    path, number = folder / f"{stem}.traj.json", 1
    while path.exists():
        number += 1
        path = folder / f"{stem}-{number}.traj.json"
    return path


_POLL_SECONDS = 0.3
_END_SECONDS = 3.0
"""Seconds in which the command may end by itself; one that stands in a debugger does not."""
_SUFFIXES = {".py", ".md", ".txt", ".jinja", ".json", ".jsonl", ".yaml", ".yml", ".toml", ".csv"}
_MOST_FILES = 1000

Times = dict[Path, int]


def watch(argv: Sequence[str], spec: RunSpec[RunSettings], console: Console) -> int:
    try:
        while True:
            seen = modified(spec)
            process = subprocess.Popen([sys.executable, "-m", "envserver", "run", *argv])
            try:
                changed = _next_change(spec, seen, process, console)
            finally:
                _end(process)
            console.say(f"{changed.name} has changed: running again.")
    except KeyboardInterrupt:
        return 130


def modified(spec: RunSpec[RunSettings]) -> Times:
    """Returns the files of an environment with the times of their last change, in nanoseconds: its
    own file, those beside it in a package, and those that its reference and its settings name."""
    from ..registry.hosted import HostedEnvironment

    kind = spec.environment_class
    file = kind.file if issubclass(kind, HostedEnvironment) else inspect.getfile(kind)
    own = Path(file).resolve()
    files = [own, *_named(spec.reference), *_named(spec.settings.env.model_dump())]
    if (own.parent / "__init__.py").exists():
        beside = (path for path in own.parent.rglob("*") if path.suffix in _SUFFIXES)
        files += itertools.islice(beside, _MOST_FILES)
    times = {}
    for path in files:
        try:
            times[path] = path.stat().st_mtime_ns
        except FileNotFoundError:  # an editor is replacing it
            times[path] = 0
    return times


def _named(value: Any) -> Iterator[Path]:
    if isinstance(value, str | Path):
        path = Path(str(value).partition(":")[0])
        if path.suffix in _SUFFIXES and path.is_file():
            yield path.resolve()
    elif isinstance(value, dict | list | tuple):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _named(inner)


def _next_change(
    spec: RunSpec[RunSettings],
    seen: Times,
    process: subprocess.Popen[bytes],
    console: Console,
) -> Path:
    waiting = False
    while True:
        now = modified(spec)
        if now != seen:
            return next(path for path in {**seen, **now} if seen.get(path) != now.get(path))
        if not waiting and process.poll() is not None:
            waiting = True
            console.say("Waiting for a change; Ctrl-C ends.")
        time.sleep(_POLL_SECONDS)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


_REPLAY = """Runs one recorded rollout again and answers its calls with the recorded answers:
`envserver replay FILE --rollout ID`. It stops at the first difference in what the agent sends,
and reports at the end whether result and score are the same (exit status 1: they are not).
--debug runs the agent in this process and stops it in pdb."""

REPLAY = CommandSpec(
    "replay",
    _REPLAY,
    ReplaySettings,
    usage="FILE --rollout ID",
    arguments=("source",),
    frequent=(
        "source",
        "rollout",
        "environment",
        "services",
        "debug",
        "without_walls",
        "log_level",
    ),
)

_SHOWN = 70


def run_replay(argv: list[str]) -> int:
    with lean_imports():
        from ..registry import find
        from ..running.asking import debuggable
        from ..running.replaying import recorded_environment, recorded_settings, replay
        from .console import Console
        from .loop import configure_logs, run_loop

    record = _named_record(REPLAY.sources(argv).flags)
    name = REPLAY.named_environment(argv) or recorded_environment(record)
    recorded = recorded_settings(record, find(name).Config)
    line = read_run_spec(REPLAY, argv, defaults=recorded, environment=name)
    settings = line.settings
    configure_logs("warning" if settings.debug else settings.log_level, settings.log_format)
    spec = debuggable(line) if settings.debug else line
    done = run_loop(replay(record, spec, debug=settings.debug))
    _show_replay(Console(highlight=False, soft_wrap=True), record, done)
    return 0 if done.same else 1


def _named_record(flags: Sequence[Given]) -> Record:
    from ..running.replaying import read_record

    sources = [str(item) for flag in flags if flag.path == "source" for item in as_list(flag.value)]
    if not sources:
        raise UsageError(
            "`envserver replay` needs a file of rollouts.",
            hint="envserver replay FILE --rollout ID",
        )
    ids = [str(flag.value) for flag in flags if flag.path == "rollout" and flag.value]
    return read_record(sources, ids[-1] if ids else "")


def _show_replay(console: Console, record: Record, done: Replayed) -> None:
    from .console import table

    how = "calls recorded" if record.kept else "calls reconstructed from its conversations"
    console.say(f"{record.rollout.rollout_id} ({record.place}): {how}.")
    if done.difference is not None:
        console.say(f"DIFFERENT at call {done.difference.call}: {done.difference.what}")
        for text in done.difference.diff:
            console.say(f"  {text}")
        if record.rollout.limit and not done.left:
            console.say(
                f"The recording hit a limit ({record.rollout.limit}): is the limit the same now?"
            )
        return
    if done.failure:
        console.say(f"FAILED after {counted(done.played, 'call')}: {done.failure}")
        return
    if done.left:
        console.say(f"DIFFERENT: it ended {counted(done.left, 'call')} earlier than recorded.")
    rows = []
    for fact in done.facts:
        now = f"differs at {', '.join(fact.places[:3])}: {_short(fact.now)}"
        rows.append((fact.name, _short(fact.then), "the same" if fact.same else now))
    console.print(table(("", "then", "now"), rows))
    if done.same:
        console.say(f"The same: {counted(done.played, 'call')}, the result and the score.")
    else:
        console.say(f"DIFFERENT: {', '.join(fact.name for fact in done.facts if not fact.same)}.")


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]} ..."
