"""`envserver convert SOURCE...`: trajectories in any form -> unified ones; see `export/convert`."""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console

from ..config import Section
from .command_line import CommandSpec
from .reading_bar import reading_bar

SUMMARY = """Makes unified trajectories of files: trajectories of other agents (JSON with steps or
messages), traces of the text protocol, groups of `process`, and what is unified already. Each is
checked and written to OUT/DOMAIN/TASK_ID.json. What cannot become one is listed as `path: reason`;
the others are written all the same. Exit status 0: all of them became one; 1: not all."""


class ConvertSettings(Section):
    """The settings that `convert` has."""

    sources: list[str]
    """Files (.json; .jsonl, also .gz and .zst), folders and globs; may be the first words."""
    domain: str | None = None
    """Of trajectories of others: swe, math, code, video, mhqa, tau, router or gaia; unset: what
    they say themselves, else the name of a folder above them."""
    out: Path = Path("data/unified")
    """Folder, or a .jsonl file, which then appears whole."""


COMMAND = CommandSpec(
    "convert",
    SUMMARY,
    ConvertSettings,
    usage="SOURCE... --domain DOMAIN",
    arguments=("sources",),
    aliases={"input": "sources"},
)


def run(argv: list[str]) -> int:
    """The command.

    Raises:
        UsageError: a setting or a source is wrong.
        StoreError: a file cannot be written.
    """
    from ..export.convert import convert
    from ..export.documents import files_of

    settings = COMMAND.read(argv)
    if settings is None:
        return 0
    size = sum(path.stat().st_size for path in files_of(settings.sources))
    with reading_bar("documents", size) as told:
        report = convert(
            settings.sources, settings.out, domain=settings.domain, failed=_failed, told=told
        )
    written = ", ".join(f"{count:,} {name}" for name, count in sorted(report.written.items()))
    console = Console(stderr=True)
    text = f"{report.read:,} documents: {written or 'no trajectory'}; {report.failed:,} failed"
    for line in (text, f"In {settings.out}"):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    return 1 if report.failed else 0


def _failed(place: str, reason: str) -> None:
    sys.stdout.write(f"{place}: {reason}\n")
