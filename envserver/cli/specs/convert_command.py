"""The settings of `envserver convert`."""

from __future__ import annotations

from pathlib import Path

from ...config import Section
from ..command_line import CommandSpec

SUMMARY = """Converts files to unified trajectories: trajectories of other agents (JSON with
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


COMMAND = CommandSpec(
    "convert",
    SUMMARY,
    ConvertSettings,
    usage="SOURCE... --domain DOMAIN",
    arguments=("sources",),
    aliases={"input": "sources"},
)
