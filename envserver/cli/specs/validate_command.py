"""The settings of `envserver validate`."""

from __future__ import annotations

from pydantic import Field

from ...config import Section
from ..command_line import CommandSpec

SUMMARY = """Checks unified trajectories: the schema, steps numbered from 1 without gaps, times
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


COMMAND = CommandSpec(
    "validate",
    SUMMARY,
    ValidateSettings,
    usage="PATH...",
    arguments=("sources",),
    aliases={"schema": "schema_only"},
)
