"""`envserver models list`: lists the named models as a table or as JSON."""

from __future__ import annotations

import sys

from rich.table import Table

from ..models.catalogue import ModelEntry, read_catalogue
from .console import Console, show_json
from .specs.models_list import COMMAND


def run(argv: list[str]) -> int:
    """Runs the command; returns 1 if no model has a name."""
    settings = COMMAND.read(argv)
    entries = list(read_catalogue(settings.models_file).values())
    if settings.as_json:
        show_json([entry.model_dump(mode="json", exclude_none=True) for entry in entries])
    elif entries:
        Console().print(_table(entries))
    if not entries:
        print(f"No models: {settings.models_file} lists none.", file=sys.stderr)
    return 0 if entries else 1


def _table(entries: list[ModelEntry]) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0))
    for column in ("name", "files", "by", "dtype", "tokens", "temp"):
        table.add_column(column, overflow="fold")
    for entry in entries:
        sampling = [
            "" if (value := entry.sampling.get(name)) is None else f"{value:g}"
            for name in ("max_tokens", "temperature")
        ]
        dtype = f"{entry.dtype}{', 4 bit' if entry.load_in_4bit else ''}"
        served = f" as {entry.served_name}" if entry.served_name else ""
        table.add_row(entry.name + served, entry.files, entry.backend, dtype, *sampling)
    return table
