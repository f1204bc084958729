"""`envserver export`: prints the result of an export; the work is in `running.exporting`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from envserver_records.errors import ConfigError, UsageError

from ..export.formats import Format, Options, format_of
from ..running.exporting import DROPPED, Tally, Wanted, export
from ..running.tally import counted
from .console import Console
from .logs import show_logs
from .reading_bar import facts_bar
from .specs.export_command import COMMAND, ExportSettings


def run(argv: list[str]) -> int:
    settings = COMMAND.read(argv)
    show_logs(settings)
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    out = settings.out
    try:
        tally = _export(settings, out, console)
    except KeyboardInterrupt:
        console.print(f"Stopped: {out} was not changed.", markup=False)
        raise
    _show(console, tally, f"in {out}")
    if settings.push_to_hub is not None:
        _push(console, out, settings.push_to_hub, dry_run=settings.dry_run)
    return 0


def _export(settings: ExportSettings, out: Path, console: Console) -> Tally:
    from ..export.stored_sources import size_of

    if not settings.source:
        raise UsageError("`envserver export` needs a source.", hint="Give a file of `process`.")
    if settings.dry_run and settings.push_to_hub is None:
        raise ConfigError("--dry_run needs --push_to_hub.", hint="Add a data set: OWNER/NAME.")
    jsonl = settings.jsonl or out.suffix == ".jsonl"
    if out.suffix == ".jsonl" and settings.to in ("parquet", "html"):
        raise ConfigError(f"{settings.to} cannot be a .jsonl file.", hint="Use --out FOLDER.")
    options = Options(
        tokens=settings.tokens,
        label=settings.label,
        margin=settings.margin,
        title=settings.title,
        jsonl=jsonl,
        embed=settings.embed,
        embed_cache=settings.embed_cache,
        tokenizer=settings.tokenizer,
    )
    format = format_of(settings.to, options)
    if settings.push_to_hub is not None:
        format = _with_card(format, settings, out, settings.push_to_hub)
    wanted, facts = _wanted(settings)
    with _bar(console, size_of(settings.source)) as on_progress:
        return export(
            settings.source,
            format,
            out,
            wanted=wanted,
            facts=facts,
            shard_rows=settings.shard_rows,
            overwrite=settings.overwrite,
            skip_bad=settings.skip_bad,
            on_progress=on_progress,
        )


def _wanted(settings: ExportSettings) -> tuple[Wanted, dict[str, Any]]:
    from ..export.decontaminate import Forbidden
    from ..export.filters import Seen, Where

    forbidden = None
    if settings.against:
        forbidden = Forbidden(settings.against_words)
        forbidden.read(settings.against)
    names = ("where", "min_reward", "per_group", "dedupe", "against", "against_words")
    facts: dict[str, Any] = {"filter": {name: getattr(settings, name) for name in names}}
    if forbidden is not None:
        facts["against"] = {"texts": forbidden.texts, "too_short": forbidden.too_short}
    facts |= _told_to_all(settings, facts)
    wanted = Wanted(
        where=Where(settings.where) if settings.where is not None else None,
        min_reward=settings.min_reward,
        forbidden=forbidden,
        per_group=settings.per_group,
        distinct=Seen() if settings.dedupe else None,
    )
    return wanted, facts


def _push(console: Console, folder: Path, name: str, *, dry_run: bool) -> None:
    from envserver_factory.publishing.upload import push

    if dry_run:
        console.print(f"Not pushed: {folder} has what would be pushed to {name}.", markup=False)
    else:
        console.print(f"Pushed to {push(folder, name)}", markup=False)


def _with_card(format: Format, settings: ExportSettings, out: Path, name: str) -> Format:
    from envserver_factory.publishing.card import Asked, WithCard, public_name
    from envserver_factory.publishing.upload import check_name

    check_name(name)
    if out.suffix in (".jsonl", format.suffix):
        raise ConfigError("Only a folder can be pushed.", hint="Use --out FOLDER.")
    chosen = {"where": settings.where, "min_reward": settings.min_reward}
    chosen |= {"dedupe": settings.dedupe or None}
    chosen |= {"per_group": None if settings.per_group == "all" else settings.per_group}
    asked = Asked(
        title=settings.title or name.partition("/")[2],
        sources=[public_name(source) for source in settings.source],
        filter={key: value for key, value in chosen.items() if value is not None},
        against=[public_name(path) for path in settings.against],
        against_words=settings.against_words,
    )
    return WithCard(format, asked)


def _told_to_all(settings: ExportSettings, facts: dict[str, Any]) -> dict[str, Any]:
    """Returns source names for publication: paths and user names are removed before a push, and
    from URLs."""
    from envserver_factory.publishing.card import public_name

    def named(source: str) -> str:
        is_private = settings.push_to_hub is not None or "://" in source
        return public_name(source) if is_private else source

    against = [named(path) for path in settings.against]
    return {
        "sources": [named(source) for source in settings.source],
        "filter": {**facts["filter"], "against": against},
    }


@contextlib.contextmanager
def _bar(console: Console, size: int | None) -> Iterator[Callable[[Tally, int], None]]:
    with facts_bar(console, size) as update:

        def on_progress(tally: Tally, read: int) -> None:
            facts = f"{tally.rollouts:,} rollouts read, {tally.kept:,} kept"
            update(advance=read, facts=facts)

        yield on_progress


def _show(console: Console, tally: Tally, place: str) -> None:
    read = f"{counted(tally.rollouts, 'rollout')} of {counted(tally.groups, 'group')} read"
    lines = [f"{read}, {tally.kept} kept: {counted(tally.rows, 'row')}."]
    for reason, words in DROPPED.items():
        if number := tally.dropped[reason]:
            lines.append(f"Left out: {number} {words}.")
    if tally.bad:
        lines.append(f"Skipped: {counted(tally.bad, 'bad line')}. First: {tally.first_bad}")
    if not tally.rows:
        lines.append("The export is EMPTY.")
    files = f"{counted(tally.files, 'file')}, {tally.bytes:,} bytes, "
    lines.append(f"{files if tally.files else ''}{place}")
    for text in lines:
        console.print(text, markup=False)
