"""`envserver process` with several environments at once, in a file each or in one for all.

What holds: groups are begun by weight, no environment gets less than its minimum share while it has
tasks; one that ends or fails does not end the others; `--resume` makes no group twice.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from envserver_records.errors import ConfigError
from rich.console import Console
from rich.table import Table

from ..export.jsonl import FailuresFile, JsonlSink, open_sink
from ..rollouts.estimates import Scored
from ..rollouts.events import Event, GroupDelivered, Observer
from ..rollouts.mixing import Shares, Turns, targets
from ..rollouts.scheduler import Scheduler
from ..rollouts.stream import id_prefix
from ..running.context import SharedEngine, rollout_context, shared_engine
from ..running.curricula import Book, has_curriculum, stream_of
from ..running.mix import Member, Several
from ..running.run_settings import ProcessSettings
from ..running.stopping import run_until_stopped
from ..running.tally import Rewards
from ..tokens.flags import Actions, chosen
from .process import show_notes
from .progress import ProgressView, summary_table

Members = list[Member[ProcessSettings]]


async def process_mix(members: Members, console: Console) -> int:
    """Makes the groups; returns the exit status: 0, or 130 when it was stopped before its end.

    Raises:
        AllFailed: an environment failed; the others came to their ends.
        ConfigError, InputError, StoreError: see `open_sink`.
    """
    settings = members[0].spec.settings
    if settings.resume and settings.overwrite:
        raise ConfigError("--resume and --overwrite exclude each other.")
    actions = chosen(settings.tokens.train, settings.tokens.mask, settings.tokens.drop)
    async with contextlib.AsyncExitStack() as stack:
        books = {
            one.environment.name: Book(one.environment, settings.curriculum)
            for one in members
            if has_curriculum(settings.curriculum)
        }
        files = await _open_files(members, settings, stack, books)
        room = await stack.enter_async_context(
            shared_engine(settings, need_engine=True, need_exact=False)
        )
        already = {
            one.share.name: files[_path(one)].sink.already_of(id_prefix(one.environment))
            for one in members
        }
        view = ProgressView(console, _total(members, settings), sum(already.values()))
        shown = _Shown(members)

        def observer(file: _File, book: Book | None) -> Observer:
            def observe(event: Event) -> None:
                file.failures.write(event)
                view(event)
                shown(event)
                if book is not None:
                    book.observe(event)

            return observe

        try:
            stopped = await _run(
                members, settings, room, files, already, actions, observer, view, books
            )
        finally:
            if view.tally.first_groups:
                console.print(summary_table(view.tally))
                console.print(shown.table(members))
            written = Counter({path: file.sink.already for path, file in files.items()})
            for one in members:
                written[_path(one)] += shown.groups[one.share.name]
            show_notes(console, view.tally, list(written.items()), settings, actions)
    if stopped:
        console.print("Stopped early; the same command with --resume goes on.")
    return 130 if stopped else 0


async def _run(
    members: Members,
    settings: ProcessSettings,
    room: SharedEngine,
    files: dict[Path, _File],
    already: dict[str, int],
    actions: Actions,
    observer: Callable[[_File, Book | None], Observer],
    view: ProgressView,
    books: Mapping[str, Book],
) -> bool:
    """Runs all of them; whether a signal stopped it."""
    wanted = settings.total_groups
    turns = Turns(
        Shares(targets(one.share for one in members), already),
        room=settings.rollouts.max_concurrent,
        wanted=None if wanted is None else max(0, wanted - sum(already.values())),
    )
    schedulers: dict[str, Scheduler] = {}
    async with contextlib.AsyncExitStack() as stack:
        for one in members:
            file, config = files[_path(one)], one.environment.config
            book = books.get(one.environment.name)
            parts = await stack.enter_async_context(
                rollout_context(
                    one.spec.settings,
                    one.environment,
                    one.spec.reference,
                    observer=observer(file, book),
                    drop_zero_variance=bool(config.ensure_scores_are_not_same),
                    shared=room,
                )
            )
            file.sink.expect(parts.model)
            steps = config.total_steps
            made = already[one.share.name]
            schedulers[one.share.name] = Scheduler(
                parts,
                stream_of(
                    one.environment,
                    None if book is None else book.curriculum,
                    repeat=steps is not None or wanted is not None,
                ),
                file.sink,
                wanted=None if steps is None else max(0, steps - made),
                stop_on_failures=True,
                lane=turns.lane(one.share.name),
            )
        several = Several(schedulers)
        with view:
            return await run_until_stopped(several.run(view.say), several, view.say) != "done"


class _File:
    """An output file and that of its failures."""

    def __init__(self, sink: JsonlSink, failures: FailuresFile) -> None:
        self.sink = sink
        self.failures = failures


async def _open_files(
    members: Members,
    settings: ProcessSettings,
    stack: contextlib.AsyncExitStack,
    books: Mapping[str, Book],
) -> dict[Path, _File]:
    files: dict[Path, _File] = {}

    def tell(scored: Scored) -> None:
        books[scored.env].read(scored)

    for path in dict.fromkeys(map(_path, members)):
        first, *others = (one.environment.config for one in members if _path(one) == path)
        names = [one.environment.name for one in members if _path(one) == path]
        forms = {(c.include_messages, c.include_actions, c.score_range) for c in (first, *others)}
        if len(forms) > 1:
            raise ConfigError(
                f"{path} is for {' and '.join(names)}, which write their groups in other forms.",
                hint="Set include_messages, include_actions and score_range alike.",
            )
        identities: list[dict[str, Any]] = [
            {"env": name, "split": config.split, "seed": config.seed}
            for name, config in zip(names, (first, *others), strict=True)
        ]
        sink = await stack.enter_async_context(
            open_sink(
                path,
                **identities[0],
                beside=identities[1:],
                resume=settings.resume,
                overwrite=settings.overwrite,
                include_messages=first.include_messages,
                include_actions=first.include_actions,
                score_range=first.score_range,
                tell=tell if books else None,
            )
        )
        files[path] = _File(sink, FailuresFile(path, resume=settings.resume))
    return files


def _path(member: Member[ProcessSettings]) -> Path:
    environment = member.environment
    own: Path | None = environment.config.data_path_to_save_groups
    return own or Path("data") / f"{environment.name}.jsonl"


def _total(members: Members, settings: ProcessSettings) -> int | None:
    steps = [one.environment.config.total_steps for one in members]
    of_each = None if None in steps else sum(step or 0 for step in steps)
    totals = [total for total in (settings.total_groups, of_each) if total is not None]
    return min(totals, default=None)


class _Shown:
    """An Observer: what became of each environment's share."""

    def __init__(self, members: Members) -> None:
        self.groups: Counter[str] = Counter()
        self._rewards = {one.share.name: Rewards() for one in members}

    def __call__(self, event: Event) -> None:
        if isinstance(event, GroupDelivered):
            self.groups[event.group.env] += 1
            for trajectory in event.group.trajectories:
                if trajectory.score.reward is not None:
                    self._rewards[event.group.env].add(trajectory.score.reward)

    def table(self, members: Members) -> Table:
        """Groups and rewards of each."""
        table = Table()
        for name in ("environment", "groups", "share", "wanted", "mean"):
            table.add_column(name, justify="left" if name == "environment" else "right")
        parts = targets(one.share for one in members)
        for name, part in parts.items():
            mean = self._rewards[name].mean
            share = self.groups[name] / max(1, self.groups.total())
            table.add_row(
                name,
                str(self.groups[name]),
                f"{share:.0%}",
                f"{part:.0%}",
                "-" if mean is None else f"{mean:.2f}",
            )
        return table
