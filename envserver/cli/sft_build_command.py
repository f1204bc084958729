"""`envserver sft build SOURCE...`: builds rows by `envserver_factory` and prints the result."""

from __future__ import annotations

from pathlib import Path

from rich.table import Table

from .console import Console
from .reading_bar import reading_bar
from .specs.sft_build_command import COMMAND


def run(argv: list[str]) -> int:
    from envserver_factory.sft_building.per_tool import Choice, build
    from envserver_factory.sft_building.templates import Shown, read_templates
    from envserver_factory.trajectories.documents import files_of

    settings = COMMAND.read(argv)
    check_upload(settings.upload)
    templates = read_templates(settings.templates)
    choice = Choice(
        seed=settings.seed,
        val_ratio=settings.val_ratio,
        strict_split=settings.strict_split,
        group_by=settings.group_by,
        min_reward=settings.min_reward,
        form=settings.form,
        shown=Shown(settings.context, settings.notes, settings.characters),
    )
    size = sum(path.stat().st_size for path in files_of(settings.sources))
    with reading_bar("trajectories", size) as on_progress:
        report = build(settings.sources, templates, settings.out, choice, on_progress=on_progress)
    console = Console()
    console.print(_table(report.summary))
    left_out = [
        f"{report.read} trajectories read",
        f"{report.below} below the minimum reward",
        f"{report.without_template} actions without a template",
        f"{report.empty} empty actions",
        f"{report.errors} failed or refused actions",
        f"{report.blank} with an empty placeholder",
    ]
    for domain, tools in sorted(report.yields.items()):
        rows = ", ".join(f"{tool} {count:,}" for tool, count in sorted(tools.items()))
        line = f"{domain}: {sum(tools.values()):,} rows ({rows or 'no action became one'})"
        console.say(line)
    console.print(f"{'; '.join(left_out)}.", highlight=False)
    console.say(f"In {settings.out}")
    if settings.upload is not None:
        put(settings.out, settings.upload, console)
    return 0


def check_upload(target: str | None) -> None:
    """Checks the upload target before any work is done.
    Raises ConfigError: it is not a valid target, or a library for it is not installed.
    """
    if target is not None:
        from envserver_factory.publishing.upload import check_target

        check_target(target)


def put(folder: Path, target: str, console: Console) -> None:
    """Uploads a finished folder and prints the address of each file."""
    from envserver_factory.publishing.upload import upload

    def on_progress(address: str) -> None:
        console.say(f"Uploaded {address}")

    upload(folder, target, on_progress=on_progress)


def _table(summary: dict[str, dict[str, int]]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("tool")
    for name in ("train", "val"):
        table.add_column(name, justify="right")
    for tool, counts in summary.items():
        table.add_row(tool, *(f"{counts[name]:,}" for name in ("train", "val")))
    return table
