"""`envserver env WORD`: installs, lists, removes and shares packages of environments."""

from __future__ import annotations

import sys

from ..registry.installed import MANIFEST, Installed, installed
from ..running.installing import install, remove
from .specs.env_command import INSTALL, LIST, REMOVE


def run_install(argv: list[str]) -> int:
    """Installs a package; prints the names of its environments, one per line.

    Raises:
        UsageError: see `running.installing.install`; nothing was installed.
    """
    settings = INSTALL.read(argv)
    one = install(
        settings.source,
        interpreter=settings.interpreter,
        replace=settings.replace,
        on_progress=lambda text: print(f"{text} ...", file=sys.stderr),
    )
    print(
        f"Installed {one.package} {one.version} {_where(one)}. Its manifest: "
        f"{one.folder / MANIFEST}",
        file=sys.stderr,
    )
    print("\n".join(one.names))
    return 0


def run_list(argv: list[str]) -> int:
    """Prints a table of the installed packages."""
    LIST.read(argv)
    rows = [("PACKAGE", "VERSION", "PYTHON", "ENVIRONMENTS", "FROM"), *map(_row, installed())]
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    for row in rows:
        print("  ".join(map(str.ljust, row, widths)).rstrip())
    return 0


def run_remove(argv: list[str]) -> int:
    """Removes a package.

    Raises:
        NotFoundError: it is not installed.
    """
    one = remove(REMOVE.read(argv).name)
    print(f"Removed {one.package} {one.version}.", file=sys.stderr)
    return 0


def _row(one: Installed) -> tuple[str, ...]:
    python = "shared" if one.interpreter is None else "own venv"
    return (one.package, one.version, python, ",".join(one.names), one.source)


def _where(one: Installed) -> str:
    return "in its own virtual environment" if one.interpreter else "beside envserver"
