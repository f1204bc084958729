"""`envserver convert SOURCE...`: converts trajectories to the unified format; see
`export/convert`."""

from __future__ import annotations

import sys

from .console import Console
from .reading_bar import reading_bar
from .specs.convert_command import COMMAND


def run(argv: list[str]) -> int:
    from envserver_factory.trajectories.convert import convert
    from envserver_factory.trajectories.documents import files_of

    settings = COMMAND.read(argv)
    size = sum(path.stat().st_size for path in files_of(settings.sources))
    with reading_bar("documents", size) as on_progress:
        report = convert(
            settings.sources,
            settings.out,
            domain=settings.domain,
            tokens=settings.tokens,
            failed=_failed,
            on_progress=on_progress,
        )
    written = ", ".join(f"{count:,} {name}" for name, count in sorted(report.written.items()))
    console = Console(stderr=True)
    text = f"{report.read:,} documents: {written or 'no trajectory'}; {report.failed:,} failed"
    for line in (text, f"In {settings.out}"):
        console.say(line)
    return 1 if report.failed else 0


def _failed(place: str, reason: str) -> None:
    sys.stdout.write(f"{place}: {reason}\n")
