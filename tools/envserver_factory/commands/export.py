"""`envserver export`, `convert` and `validate`: stored rollouts and trajectories in other forms."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from envserver_records.errors import ConfigError, UsageError
from envserver_records.tasks import Json
from pydantic import Field, PositiveInt

from envserver.cli import lean_imports
from envserver.cli.command_line import CommandSpec
from envserver.settings.config import LogFormat, LogLevel
from envserver.settings.section import Section
from envserver.telemetry.redaction import counted

if TYPE_CHECKING:
    from envserver.cli.console import Console

    from ..exporting.export import Tally, Wanted
    from ..exporting.formats import Format


SUMMARY = """Selects stored rollouts and writes them in another format, with checksums:
`envserver export FILE... --to messages --out FOLDER`. The export is atomic: it appears complete
or not at all."""


class ExportSettings(Section):
    source: list[str] = Field(default_factory=list)
    """Files of `process` (.jsonl, .gz, .zst), folders or globs of them, `-`, a store (SQLite
    file or postgresql:// URL), or a running server. Can be given as the first arguments."""
    to: str
    """The output format: atropos (groups), messages (chats for SFT), unified (readable records),
    dpo (pairs), traces, parquet (typed columns), html (pages) or inspect (logs that Inspect View
    opens; with the extra `inspect`)."""
    out: Path
    """Output folder; or a file if the name ends in .jsonl or in an extension of the format."""
    where: str | None = None
    """Keep only rollouts for which this expression is true, such as "reward >= 0.8 and turns < 6
    and 'lossy_detok' not in flags"; names are env, task_id, model, reward, components['...'],
    length (tokens), sampled, turns, flags, limit, truncated, finish_reason, split,
    policy_version, messages ..."""
    min_reward: float | None = Field(default=None, allow_inf_nan=False)
    """Minimum reward of a rollout."""
    per_group: Literal["all", "best", "shortest"] = "all"
    """Which of the remaining rollouts of each group to keep: all, the one with the highest
    reward, or the shortest."""
    dedupe: bool = False
    """Leave out rollouts with the same text as an earlier one."""
    against: list[str] = Field(default_factory=list)
    """Evaluation sets (.jsonl, .json, .txt, or folders). Rollouts that contain an n-gram of one
    are left out."""
    against_words: int = Field(default=13, ge=2, le=1000)
    """Length of these n-grams, in words."""
    shard_rows: PositiveInt = 50_000
    """Maximum number of rows in a shard (part-00000.jsonl, ...)."""
    tokens: bool = False
    """Include the training rows in unified records and in logs of Inspect."""
    jsonl: bool = False
    """Write unified records and traces as lines of shards instead of one file each."""
    label: str = "auto"
    """Label of traces; auto: solved, partial or failed."""
    embed: str = ""
    """Sentence-transformers model that adds an embedding of its text to each step of traces
    (needs the extra `embeddings`); unset: no embeddings."""
    embed_cache: Path = Path("data/embeddings")
    """Cache folder for embeddings, keyed by text and model."""
    margin: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Minimum reward difference of a pair (dpo)."""
    title: str = ""
    """Title of the export, for readers."""
    tokenizer: str = ""
    """Tokenizer that shows tokens in pages: a folder with tokenizer.json, or a model in the
    cache; unset: by the model's name."""
    push_to_hub: str | None = None
    """Data set on the Hugging Face hub (OWNER/NAME): the folder gets a data card and is pushed
    there, private if the data set is new; HF_TOKEN is sent."""
    dry_run: bool = False
    """With --push_to_hub: write the folder but do not push it."""
    overwrite: bool = False
    """Replace an existing export."""
    skip_bad: bool = False
    """Skip invalid lines and count them."""
    log_level: LogLevel = "warning"
    """Minimum log level."""
    log_format: LogFormat = "auto"
    """Format of log lines; auto: console. json is for log collectors."""


EXPORT = CommandSpec(
    "export",
    SUMMARY,
    ExportSettings,
    usage="SOURCE... --to FORMAT --out PLACE",
    arguments=("source",),
    frequent=(
        *("source", "to", "out", "where", "min_reward", "per_group", "dedupe", "against"),
        *("tokens", "jsonl", "margin", "tokenizer", "push_to_hub", "dry_run", "overwrite"),
        *("skip_bad", "log_level"),
    ),
)


def run_export(argv: list[str]) -> int:
    with lean_imports():
        from envserver.cli.console import Console
        from envserver.cli.loop import show_logs

    settings = EXPORT.read(argv)
    show_logs(settings)
    console = Console(stderr=True)
    out = settings.out
    try:
        tally = _export(settings, out, console)
    except KeyboardInterrupt:
        console.say(f"Stopped: {out} was not changed.")
        raise
    _show(console, tally, f"in {out}")
    if settings.push_to_hub is not None:
        _push(console, out, settings.push_to_hub, dry_run=settings.dry_run)
    return 0


def _export(settings: ExportSettings, out: Path, console: Console) -> Tally:
    from envserver.export.stored_sources import size_of

    from ..exporting.export import export
    from ..exporting.formats import Options, format_of

    if not settings.source:
        raise UsageError("`envserver export` needs a source.", hint="Give a file of `process`.")
    if settings.dry_run and settings.push_to_hub is None:
        raise ConfigError("--dry_run needs --push_to_hub.", hint="Add a data set: OWNER/NAME.")
    jsonl = settings.jsonl or out.suffix == ".jsonl"
    if out.suffix == ".jsonl" and settings.to in ("parquet", "html"):
        raise ConfigError(f"{settings.to} cannot be a .jsonl file.", hint="Use --out FOLDER.")
    names = {"tokens", "label", "margin", "title", "embed", "embed_cache", "tokenizer"}
    options = Options(jsonl=jsonl, **settings.model_dump(include=names))
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


def _wanted(settings: ExportSettings) -> tuple[Wanted, Json]:
    from ..exporting.export import Forbidden, Seen, Wanted, Where

    forbidden = None
    if settings.against:
        forbidden = Forbidden(settings.against_words)
        forbidden.read(settings.against)
    names = ("where", "min_reward", "per_group", "dedupe", "against", "against_words")
    facts: Json = {"filter": {name: getattr(settings, name) for name in names}}
    if forbidden is not None:
        facts["against"] = {"texts": forbidden.texts, "too_short": forbidden.too_short}
    facts |= _public_facts(settings, facts)
    wanted = Wanted(
        where=Where(settings.where) if settings.where is not None else None,
        min_reward=settings.min_reward,
        forbidden=forbidden,
        per_group=settings.per_group,
        distinct=Seen() if settings.dedupe else None,
    )
    return wanted, facts


def _push(console: Console, folder: Path, name: str, *, dry_run: bool) -> None:
    from ..publishing.models import push

    if dry_run:
        console.say(f"Not pushed: {folder} has what would be pushed to {name}.")
    else:
        console.say(f"Pushed to {push(folder, name)}")


def _with_card(format: Format, settings: ExportSettings, out: Path, name: str) -> Format:
    from ..publishing.card import Asked, WithCard, public_name
    from ..publishing.models import check_name

    check_name(name)
    if out.suffix in (".jsonl", format.suffix):
        raise ConfigError("Only a folder can be pushed.", hint="Use --out FOLDER.")
    chosen = {"where": settings.where, "min_reward": settings.min_reward}
    chosen |= {"dedupe": settings.dedupe or None}
    chosen |= {"per_group": None if settings.per_group == "all" else settings.per_group}
    wanted = Asked(
        title=settings.title or name.partition("/")[2],
        sources=[public_name(source) for source in settings.source],
        filter={key: value for key, value in chosen.items() if value is not None},
        against=[public_name(path) for path in settings.against],
        against_words=settings.against_words,
    )
    return WithCard(format, wanted)


def _public_facts(settings: ExportSettings, facts: Json) -> Json:
    """Removes paths and user names before a push, and from URLs."""
    from ..publishing.card import public_name

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
    from envserver.cli.console import facts_bar

    with facts_bar(console, size) as update:

        def on_progress(tally: Tally, read: int) -> None:
            facts = f"{tally.rollouts:,} rollouts read, {tally.kept:,} kept"
            update(advance=read, facts=facts)

        yield on_progress


def _show(console: Console, tally: Tally, place: str) -> None:
    from ..exporting.export import DROPPED

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
        console.say(text)


_CONVERT = """Converts files to unified trajectories: trajectories of other agents (JSON with
steps or messages), traces of the text protocol, groups of `process`, logs of Inspect (.eval or
.json; with the extra `inspect`), and files that are already unified. Each is checked and written to
OUT/DOMAIN/TASK_ID.json. Documents that cannot be converted are listed as `path: reason`; the others
are still written. Exit status 0: all were converted; 1: some were not."""


class ConvertSettings(Section):
    sources: list[str]
    """Files (.json, .eval; .jsonl, also .gz and .zst), folders and globs. Can be given as the first
    arguments."""
    domain: str | None = None
    """Domain of trajectories of other agents: swe, math, code, video, mhqa, tau, router or gaia;
    unset: the domain in the file, else the name of a parent folder."""
    tokens: bool = False
    """Include the training rows of groups, and of Inspect logs that were exported with theirs."""
    out: Path = Path("data/unified")
    """Output folder, or a .jsonl file, which is written atomically."""


CONVERT = CommandSpec(
    "convert",
    _CONVERT,
    ConvertSettings,
    usage="SOURCE... --domain DOMAIN",
    arguments=("sources",),
    aliases={"input": "sources"},
)


def run_convert(argv: list[str]) -> int:
    with lean_imports():
        from envserver.cli.console import Console, reading_bar

        from ..trajectories import convert, files_of

    settings = CONVERT.read(argv)
    size = sum(path.stat().st_size for path in files_of(settings.sources))
    with reading_bar("documents", size) as on_progress:
        report = convert(
            settings.sources,
            settings.out,
            domain=settings.domain,
            tokens=settings.tokens,
            failed=lambda place, reason: print(f"{place}: {reason}"),
            on_progress=on_progress,
        )
    written = ", ".join(f"{count:,} {name}" for name, count in sorted(report.written.items()))
    console = Console(stderr=True)
    text = f"{report.read:,} documents: {written or 'no trajectory'}; {report.failed:,} failed"
    for line in (text, f"In {settings.out}"):
        console.say(line)
    return 1 if report.failed else 0


_VALIDATE = """Checks unified trajectories: the schema, steps numbered from 1 without gaps, times
in order, the domain, finite numbers, and unique ids. Lists every problem as `path: reason`. Exit
status 0: all are valid; 1: at least one is not; 2: the command line is wrong."""


class ValidateSettings(Section):
    sources: list[str] = Field(default=[])
    """Files (.json; .jsonl, also .gz and .zst), folders and globs. Can be given as the first
    arguments."""
    domains: list[str] = Field(default_factory=list)
    """Additional domains of your own environments, besides swe, math, code, video, mhqa, tau,
    router and gaia."""
    schema_only: bool = False
    """Only print the JSON schema of a trajectory, for other programs."""
    quiet: bool = False
    """Print only the totals; the exit status is unchanged."""


VALIDATE = CommandSpec(
    "validate",
    _VALIDATE,
    ValidateSettings,
    usage="PATH...",
    arguments=("sources",),
    aliases={"schema": "schema_only"},
)


def run_validate(argv: list[str]) -> int:
    with lean_imports():
        from envserver.cli.console import Console, reading_bar
        from envserver.export.unified import DOMAINS, SCHEMA_FILE

        from ..trajectories import files_of, validate

    settings = VALIDATE.read(argv)
    if settings.schema_only:
        sys.stdout.write(SCHEMA_FILE.read_text())
        return 0
    if not settings.sources:
        raise UsageError("The files to check are needed: envserver validate PATH...")

    def bad(place: str, reason: str) -> None:
        if not settings.quiet:
            sys.stdout.write(f"{place}: {reason}\n")

    size = sum(path.stat().st_size for path in files_of(settings.sources))
    with reading_bar("trajectories", size) as on_progress:
        report = validate(
            settings.sources,
            bad=bad,
            on_progress=on_progress,
            domains=(*DOMAINS, *settings.domains),
        )
    text = (
        f"{report.documents:,} trajectories in {report.files:,} files: "
        f"{report.bad:,} bad, in {report.bad_files:,} files"
    )
    Console(stderr=True).say(text)
    return 1 if report.bad else 0
