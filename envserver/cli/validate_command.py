"""`envserver validate PATH...`: checks unified trajectories; the work is in `envserver_factory`."""

from __future__ import annotations

import sys

from envserver_records.errors import UsageError

from .console import Console
from .reading_bar import reading_bar
from .specs.validate_command import COMMAND


def run(argv: list[str]) -> int:
    from envserver_factory.trajectories.documents import files_of
    from envserver_factory.trajectories.validation import validate

    from ..export.unified import DOMAINS, SCHEMA_FILE

    settings = COMMAND.read(argv)
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
