"""The settings of `envserver validate`."""

from __future__ import annotations

from pydantic import Field

from ...config import Section
from ..command_line import CommandSpec

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
