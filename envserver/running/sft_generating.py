"""The work of `envserver sft-gen`: runs an environment and writes its best rollouts as rows.

In: one environment. Out: rows for supervised training in a JSONL file. What holds: rows already
written stay in the file, however the run ends.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from envserver_records.cancelling import cancel_and_wait
from envserver_records.errors import ConfigError

from ..environment import Environment
from ..export.sft import Choice, Decode, SftSink
from ..models.catalogue import find_tokenizer
from ..rollouts.events import Event, Observer
from ..rollouts.scheduler import Scheduler
from ..rollouts.stream import group_requests
from .context import rollout_context
from .group_run import Show
from .metrics import Tally
from .mix import RunSpec
from .run_settings import SftSettings
from .stopping import Ending, Stop, run_until_stopped


@dataclass(frozen=True)
class Generated:
    """The result: `rows` in the file, made from `groups`, and how the run ended."""

    rows: int
    groups: int
    ending: Ending


async def generate(
    spec: RunSpec[SftSettings], environment: Environment, show: Show, stop: Stop
) -> Generated:
    """Writes rows until there are enough, all groups are made, or the run is stopped."""
    settings, tally = spec.settings, Tally()
    config = environment.config
    config.include_messages = True
    observers: list[Observer] = [tally]

    def observe(event: Event) -> None:
        for one in observers:
            one(event)

    with _sink(settings, pm1=config.score_range == "pm1") as sink:
        async with rollout_context(
            settings,
            environment,
            spec.reference,
            observer=observe,
            need_exact=not settings.save_messages,
            drop_zero_variance=bool(config.ensure_scores_are_not_same),
        ) as context:
            scheduler = Scheduler(
                context,
                group_requests(environment, repeat=True),
                sink,
                wanted=config.total_steps,
                stop_on_failures=True,
            )
            with show(tally, config.total_steps, 0) as view:
                observers.append(view)
                ending = await run_until_stopped(_until_full(scheduler, sink), scheduler, stop)
    return Generated(sink.rows, tally.groups, ending)


def _sink(settings: SftSettings, *, pm1: bool) -> SftSink:
    choice = Choice(
        top=settings.save_top_n_per_group,
        allow_negative=settings.allow_negative_scores,
        min_difference=settings.minimum_score_diff_max_min,
        pm1=pm1,
    )
    return SftSink(
        settings.filepath,
        choice,
        None if settings.save_messages else _decoder(settings.tokenizer),
        wanted=settings.num_seqs_to_save,
        append=settings.append_to_previous,
    )


def _decoder(tokenizer: str | None) -> Decode:
    """Returns the decoder of the model's tokens."""
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
        await cancel_and_wait(running, full)
