"""The settings of `envserver sample`."""

from __future__ import annotations

from pathlib import Path

from ...config import Section
from ..command_line import CommandSpec

SUMMARY = """Writes sample files of an environment's inputs (rows, documents, repositories,
captions) in the form in which it reads yours. Prints the files and the command that reads them."""


class SampleSettings(Section):
    """Settings of `sample`."""

    environment: str
    """Name of the environment, or its path. Can be given as the first argument."""
    out: Path | None = None
    """New folder for the files; unset: samples/<environment>."""


COMMAND = CommandSpec("sample", SUMMARY, SampleSettings, usage="NAME", arguments=("environment",))
