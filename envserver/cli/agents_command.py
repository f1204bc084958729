"""`envserver agents WORD`: installs and lists programs that play agents (`--agent NAME`)."""

from __future__ import annotations

import sys

from envserver_records.errors import UsageError

from ..harnesses import HARNESSES, harness_of
from ..harnesses.installing import install, installed_version
from .console import show_rows
from .specs.agents_command import INSTALL, LIST


def run_install(argv: list[str]) -> int:
    """Installs programs; prints the folder of each."""
    settings = INSTALL.read(argv)
    chosen = [harness_of(name) for name in settings.names]
    if settings.version and len(chosen) > 1:
        raise UsageError("--version is for a single agent.")
    for harness in chosen:
        print(f"Installing {harness.name} ...", file=sys.stderr)
        print(install(harness, settings.folder, settings.version))
    return 0


def run_list(argv: list[str]) -> int:
    """Prints a table of the programs, installed or not."""
    settings = LIST.read(argv)
    rows = [("AGENT", "INSTALLED", "TESTED", "PACKAGE")]
    for harness in HARNESSES.values():
        package = harness.package
        assert package is not None
        installed = installed_version(harness.name, settings.folder) or "-"
        origin = f"{package.registry}:{package.name}"
        rows.append((harness.name, installed, package.version, origin))
    show_rows(rows)
    return 0
