"""The settings of `envserver convert`."""

from __future__ import annotations

from pathlib import Path

from ...config import Section
from ..command_line import CommandSpec

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
