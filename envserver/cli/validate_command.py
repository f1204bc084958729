"""`envserver validate PATH...`: are these unified trajectories? See `export/validation`."""

from __future__ import annotations

import sys

from pydantic import Field
from rich.console import Console

from ..config import Section
from .command_line import CommandSpec
from .reading_bar import reading_bar

SUMMARY = """Checks unified trajectories: the schema, steps from 1 without gaps, times in their
order, the domain, numbers that are numbers, ids that stand once. Lists every problem as
`path: reason`. Exit status 0: all are good; 1: one is not; 2: the command line is wrong."""


class ValidateSettings(Section):
    """The settings that `validate` has."""

    sources: list[str]
    """Files (.json; .jsonl, also .gz and .zst), folders and globs; may be the first words."""
    domains: list[str] = Field(default_factory=list)
    """Domains that are there beside swe, math, code, video, mhqa, tau, router and gaia: those of
    your own environments."""
    quiet: bool = False
    """Only the exit status and the sum."""


COMMAND = CommandSpec(
    "validate", SUMMARY, ValidateSettings, usage="PATH...", arguments=("sources",)
)


def run(argv: list[str]) -> int:
    """The command.

    Raises:
        UsageError: a setting is wrong, or a source names no file.
    """
    from ..export.documents import files_of
    from ..export.unified import DOMAINS
    from ..export.validation import validate

    settings = COMMAND.read(argv)
    if settings is None:
        return 0

    def bad(place: str, reason: str) -> None:
        if not settings.quiet:
            sys.stdout.write(f"{place}: {reason}\n")

    size = sum(path.stat().st_size for path in files_of(settings.sources))
    with reading_bar("trajectories", size) as told:
        report = validate(
            settings.sources, bad=bad, told=told, domains=(*DOMAINS, *settings.domains)
        )
    text = (
        f"{report.documents:,} trajectories in {report.files:,} files: "
        f"{report.bad:,} bad, in {report.bad_files:,} files"
    )
    Console(stderr=True).print(text, highlight=False, soft_wrap=True)
    return 1 if report.bad else 0
