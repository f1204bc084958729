"""`envserver sft-gen FILE`: rows for supervised training, of the best rollouts of an environment.

It has the flags of Atropos' `atropos-sft-gen`, which fetches rollouts from a server; this command
makes them.
"""

from __future__ import annotations

import asyncio

from envserver_records.errors import ConfigError
from rich.console import Console

from ..environment import Environment
from ..export.sft import Choice, Decode, SftSink
from ..models.model_files import find_tokenizer
from ..rollouts.events import Event
from ..rollouts.scheduler import Scheduler
from ..rollouts.stream import group_requests
from ..running.context import rollout_context
from ..running.stopping import run_until_stopped
from ..running.tally import Tally, counted
from .command_line import read_run_spec
from .logs import configure_logs
from .loop import run_loop
from .progress import ProgressView
from .signals import SignalStop
from .specs.sft_command import COMMAND, SftSettings


def run(argv: list[str]) -> int:
    """Runs the command.

    Raises:
        EnvserverError: it cannot be run, or every group failed.
    """
    line = read_run_spec(COMMAND, argv)
    configure_logs(line.settings.log_level, line.settings.log_format)
    environment = line.make_environment()
    return run_loop(generate(line.reference, environment, line.settings, Console(stderr=True)))


async def generate(
    reference: str, environment: Environment, settings: SftSettings, console: Console
) -> int:
    """Writes the rows; returns the exit status: 0, or 130 if it was stopped early.

    Raises:
        AllFailed: too many groups failed in a row; rows already written are kept.
        ConfigError, StoreError: see `SftSink`; or the tokenizer is missing.
    """
    config = environment.config
    choice = Choice(
        top=settings.save_top_n_per_group,
        allow_negative=settings.allow_negative_scores,
        min_difference=settings.minimum_score_diff_max_min,
        pm1=config.score_range == "pm1",
    )
    config.include_messages = True
    tally = Tally()
    view = ProgressView(console, tally, config.total_steps, 0)

    def observe(event: Event) -> None:
        tally(event)
        view(event)

    sink = SftSink(
        settings.filepath,
        choice,
        None if settings.save_messages else _decoder(settings.tokenizer),
        wanted=settings.num_seqs_to_save,
        append=settings.append_to_previous,
    )
    with sink:
        async with rollout_context(
            settings,
            environment,
            reference,
            observer=observe,
            need_exact=not settings.save_messages,
            drop_zero_variance=bool(config.ensure_scores_are_not_same),
        ) as parts:
            scheduler = Scheduler(
                parts,
                group_requests(environment, repeat=True),
                sink,
                wanted=config.total_steps,
                stop_on_failures=True,
            )
            with view:
                work = _until_full(scheduler, sink)
                stopped = await run_until_stopped(work, scheduler, SignalStop(view.say)) != "done"
    rows = f"{counted(sink.rows, 'row')} of {counted(tally.groups, 'group')} in {sink.path}"
    console.print(rows, highlight=False, markup=False, soft_wrap=True)
    return 130 if stopped else 0


def _decoder(tokenizer: str | None) -> Decode:
    """
    Raises:
        ConfigError: none is given, or it is not found.
    """
    from ..tokens.vocabulary import Vocabulary

    if tokenizer is None:
        raise ConfigError(
            "--tokenizer is needed to write text.",
            hint="Or use --save-messages.",
        )
    return Vocabulary.load(find_tokenizer(tokenizer)).decode


async def _until_full(scheduler: Scheduler, sink: SftSink) -> None:
    """Runs the stream until there are enough rows, then abandons open groups."""
    running = asyncio.create_task(scheduler.run())
    full = asyncio.create_task(sink.full.wait())
    try:
        await asyncio.wait({running, full}, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            running.result()
    finally:
        for task in (running, full):
            task.cancel()
        await asyncio.gather(running, full, return_exceptions=True)
