"""`envserver models list`: the models that have names, for people or as JSON."""

from __future__ import annotations

import sys
from pathlib import Path

import orjson
from rich.console import Console
from rich.table import Table

from ..config import EngineConfig, Section
from ..models.catalogue import ModelEntry, read_catalogue
from .command_line import CommandSpec

SUMMARY = "Shows the models that have names, and how each is served and sampled."


class ListSettings(Section):
    """The settings that `models list` has."""

    models_file: Path = EngineConfig().models_file
    """Where models have their names."""
    as_json: bool = False
    """JSON, not a table."""


COMMAND = CommandSpec(
    "models list",
    SUMMARY,
    ListSettings,
)


def run(argv: list[str]) -> int:
    """The command; its status is 1 where no model has a name.

    Raises:
        ConfigError: a setting is wrong, or the file is.
    """
    settings = COMMAND.read(argv)
    if settings is None:
        return 0
    entries = list(read_catalogue(settings.models_file).values())
    if settings.as_json:
        facts = [entry.model_dump(mode="json", exclude_none=True) for entry in entries]
        sys.stdout.write(orjson.dumps(facts, option=orjson.OPT_INDENT_2).decode() + "\n")
    elif entries:
        Console().print(_table(entries))
    if not entries:
        print(f"No model has a name: there is none in {settings.models_file}.", file=sys.stderr)
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
