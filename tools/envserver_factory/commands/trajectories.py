"""`envserver convert` and `validate`: unified trajectories; each prints a summary."""

from __future__ import annotations

import sys
from pathlib import Path

from envserver_records.errors import UsageError
from pydantic import Field

from envserver.cli import lean_imports
from envserver.cli.command_line import CommandSpec
from envserver.settings.section import Section

_CONVERT = """Converts files to unified trajectories: trajectories of other agents (JSON with
steps or messages), traces of the text protocol, groups of `process`, logs of Inspect (.eval or
.json; with the extra `inspect`), and files that are already unified. Each is checked and written to
OUT/DOMAIN/TASK_ID.json. Documents that cannot be converted are listed as `path: reason`; the others
are still written. Exit status 0: all were converted; 1: some were not."""


class ConvertSettings(Section):
    """Settings of `convert`."""

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

        from ..trajectories.convert import convert
        from ..trajectories.documents import files_of

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
    """Settings of `validate`."""

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

        from ..trajectories.documents import files_of, validate

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
