"""`envserver process`: rollouts of one environment into a JSONL file."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from textwrap import shorten

from envserver_records.errors import ConfigError
from rich.console import Console

from ..config import OpenAIConfig, Settings
from ..environment import Environment
from ..export.jsonl import FailuresFile, JsonlSink, open_sink
from ..rollouts.estimates import Scored
from ..rollouts.events import Event, Observer
from ..rollouts.group import RolloutContext
from ..rollouts.scheduler import Scheduler
from ..rollouts.stream import GroupRequest
from ..running.context import SharedEngine, rollout_context
from ..running.curricula import Book, has_curriculum, stream_of
from ..running.engines import SIMULATED
from ..running.run_settings import ProcessSettings
from ..running.stopping import run_until_stopped
from ..running.tally import Tally, counted
from ..tokens.flags import FLAGS, Actions, chosen
from .command_line import FREQUENT, CommandSpec, program, read_run_spec
from .logs import configure_logs
from .loop import run_loop
from .mixing import read_mix
from .progress import ProgressView, summary_table

SUMMARY = """Runs rollouts of an environment, or of several, and writes each finished group as a
line of JSON. Ctrl-C once finishes the open groups and stops; twice stops at once. Nothing written
is lost."""

_DONE = {"train": "trained", "mask": "such calls masked", "drop": "not fit for RL"}
LONGEST_WORDS = 200
"""Of a failure's message, on the terminal; the whole stands in the failures file."""


COMMAND = CommandSpec(
    "process",
    SUMMARY,
    ProcessSettings,
    usage="--env NAME[=WEIGHT,NAME=WEIGHT]",
    frequent=(*FREQUENT, "env.data_path_to_save_groups", "resume", "overwrite"),
)


def run(argv: list[str]) -> int:
    """The command.

    Raises:
        EnvserverError: it cannot be run, or every group failed.
    """
    members = read_mix(COMMAND, argv)
    if members is not None:
        from .mixed_process import process_mix

        configure_logs(members[0].spec.settings.log_level, members[0].spec.settings.log_format)
        return run_loop(process_mix(members, Console(stderr=True)))
    line = read_run_spec(COMMAND, argv)
    if line is None:
        return 0
    configure_logs(line.settings.log_level, line.settings.log_format)
    environment = line.make_environment()
    return run_loop(process(line.reference, environment, line.settings, Console(stderr=True)))


async def process(
    reference: str, environment: Environment, settings: ProcessSettings, console: Console
) -> int:
    """Makes the groups; returns the exit status: 0, or 130 when it was stopped before its end.

    Raises:
        AllFailed: too many groups failed in a row; what was written stays.
        ConfigError, InputError, StoreError: see `open_sink`; or the file is of another model.
    """
    config = environment.config
    steps = config.total_steps
    output = config.data_path_to_save_groups or Path("data") / f"{environment.name}.jsonl"
    rules = settings.curriculum
    book = Book(environment, rules) if has_curriculum(rules) else None
    written = await write_groups(
        reference,
        environment,
        settings,
        stream_of(environment, None if book is None else book.curriculum, repeat=steps is not None),
        output,
        console,
        resume=settings.resume,
        overwrite=settings.overwrite,
        wanted=steps,
        expected=steps,
        drop_zero_variance=bool(config.ensure_scores_are_not_same),
        observer=None if book is None else book.observe,
        tell=None if book is None else book.read,
    )
    if written.stopped:
        console.print("Stopped early; the same command with --resume goes on.")
    elif written.tally.groups:
        exact = "missing_token_ids" not in written.tally.flags
        show_suggestions(console, reference, settings, output, exact=exact)
    return 130 if written.stopped else 0


@dataclass(frozen=True)
class Written:
    """What a run did: whether a signal stopped it before its end, and its counts."""

    stopped: bool
    tally: Tally


async def write_groups(
    reference: str,
    environment: Environment,
    settings: Settings,
    stream: Iterator[GroupRequest],
    output: Path,
    console: Console,
    *,
    resume: bool,
    overwrite: bool,
    wanted: int | None,
    expected: int | None,
    drop_zero_variance: bool,
    room: SharedEngine | None = None,
    observer: Observer | None = None,
    tell: Callable[[Scored], None] | None = None,
) -> Written:
    """Makes the groups of `stream`, writes them to `output`, shows how it goes and what came out.

    Args:
        resume, overwrite: what is done about an output that exists.
        wanted: groups in the output before stopping, None for as many as `stream` has.
        expected: groups in the end, as far as it is known, for the bar.
        room: the engine, where others use it too; unset: one of its own.
        observer: told of each event, too.
        tell: see `open_sink`.

    Raises:
        AllFailed: too many groups failed in a row; what was written stays.
        ConfigError, InputError, StoreError: see `open_sink`; or the file is of another model.
    """
    if resume and overwrite:
        raise ConfigError("--resume and --overwrite exclude each other.")
    actions = chosen(settings.tokens.train, settings.tokens.mask, settings.tokens.drop)
    config = environment.config
    async with open_sink(
        output,
        env=environment.name,
        split=config.split,
        seed=config.seed,
        resume=resume,
        overwrite=overwrite,
        include_messages=config.include_messages,
        include_actions=config.include_actions,
        score_range=config.score_range,
        tell=tell,
    ) as sink:
        failures = FailuresFile(output, resume=resume)
        view = ProgressView(console, expected, sink.already)

        def observe(event: Event) -> None:
            failures.write(event)
            view(event)
            if observer is not None:
                observer(event)

        try:
            async with rollout_context(
                settings,
                environment,
                reference,
                observer=observe,
                drop_zero_variance=drop_zero_variance,
                shared=room,
            ) as parts:
                sink.expect(parts.model)
                left = None if wanted is None else max(0, wanted - sink.already)
                with view:
                    stopped = await _run(parts, sink, stream, left, view)
        finally:
            show_result(console, view.tally, sink, failures, settings, actions)
        return Written(stopped, view.tally)


async def _run(
    parts: RolloutContext,
    sink: JsonlSink,
    stream: Iterator[GroupRequest],
    wanted: int | None,
    view: ProgressView,
) -> bool:
    """Runs the stream; whether it was stopped by a signal."""
    scheduler = Scheduler(parts, stream, sink, wanted=wanted, stop_on_failures=True)
    return await run_until_stopped(scheduler.run(), scheduler, view.say) != "done"


def show_result(
    console: Console,
    tally: Tally,
    sink: JsonlSink,
    failures: FailuresFile,
    settings: Settings,
    actions: Actions,
) -> None:
    """What came out and where it lies."""
    if tally.first_groups:
        console.print(summary_table(tally))
    show_notes(console, tally, [(sink.path, sink.already + tally.groups)], settings, actions)
    if failures.lines:
        console.print(f"Why: {failures.path}", highlight=False, markup=False, soft_wrap=True)


def show_notes(
    console: Console,
    tally: Tally,
    files: list[tuple[Path, int]],
    settings: Settings,
    actions: Actions,
) -> None:
    """What there is to say of a run, whatever it ran.

    Args:
        files: where groups lie, and how many.
    """
    if settings.model == SIMULATED:
        console.print("The model was simulated: these rewards are no measure of any real one.")

    def say(line: str) -> None:
        console.print(line, highlight=False, markup=False, soft_wrap=True)

    for path, groups in files:
        say(f"{counted(groups, 'group')} in {path}")
    for reason, count in sorted(tally.drops.items()):
        say(f"{counted(count, 'group')} not written: {reason}")
    for kind, count in sorted(tally.failures.items()):
        words = shorten(tally.last_words[kind], LONGEST_WORDS, placeholder=" ...")
        say(f"{counted(count, 'failed attempt')}: {kind} ({words})")
    for flag, count in sorted(tally.flags.items()):
        meaning = f" ({FLAGS[flag].meaning})" if flag in FLAGS else ""
        say(f"{counted(count, 'rollout')} flagged, {_DONE[actions.of(flag)]}: {flag}{meaning}")


def show_suggestions(
    console: Console, reference: str, settings: Settings, path: Path, *, exact: bool
) -> None:
    """What to try next."""
    console.print("Try next:")
    for command in suggestions(reference, settings, path, exact=exact):
        console.print(f"  {command}", highlight=False, markup=False, soft_wrap=True)


def suggestions(reference: str, settings: Settings, path: Path, *, exact: bool) -> Iterator[str]:
    """Commands that go on from here, as they can be typed.

    Args:
        exact: the engine gave token ids.
    """
    yield f"head -c 600 {quote(os.fspath(path))}"
    envserver, environment = program(), f"--env {quote(reference)}"
    if settings.model != SIMULATED:
        if exact:
            urls = quote(",".join(settings.openai.base_urls))
            engine = f"--model {quote(settings.model)}" if settings.model else ""
            engine = engine or f"--openai.base_url {urls}"
            yield f"{envserver} verify {quote(os.fspath(path))} {engine}"
            yield f"{envserver} serve {environment} {engine}   # for a trainer"
        return
    replaced = "" if settings.env.data_path_to_save_groups else " --overwrite"
    url = OpenAIConfig().base_urls[0]
    yield (f"{envserver} process {environment} --openai.base_url {url}{replaced}   # a real engine")
    yield f"{envserver} serve {environment} --model sim   # for a trainer"
