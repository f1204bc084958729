"""`envserver list`: lists the environments that --env accepts, one per line."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

from envserver_records.errors import EnvserverError, UsageError

from ..environment import Environment
from ..registry import builtin_names, entry_point_names, find
from ..registry.installed import with_own_interpreter
from ..registry.integrated import integration, integration_points

HELP = """Usage: envserver list

Shows every environment that --env can name: its name, its isolation, where it comes from and the
first line of its docstring; then the schemes of other frameworks (SCHEME:NAME). A
path/to/file.py[:Class] or a folder can be named too."""


def run(argv: list[str]) -> int:
    """Prints the table."""
    if argv in (["--help"], ["-h"]):
        print(HELP)
        return 0
    if argv:
        raise UsageError("`envserver list` takes no arguments.")
    rows = [("NAME", "ISOLATION", "FROM", "WHAT"), *_rows()]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        print("  ".join([*cells, row[3]]).rstrip())
    return 0


def _rows() -> Iterator[tuple[str, str, str, str]]:
    built_in = builtin_names()
    for name in built_in:
        yield _row(name, "built in")
    for name, point in sorted(entry_point_names().items()):
        if name not in built_in:
            yield _row(name, point.dist.name if point.dist else point.value)
    for name, (package, _) in sorted(with_own_interpreter().items()):
        if name not in entry_point_names():
            yield _row(name, f"{package.package} (own venv)")
    for scheme, point in sorted(integration_points().items()):
        origin = point.dist.name if point.dist else point.value
        yield (f"{scheme}:NAME", "", origin, _what(scheme))


def _what(scheme: str) -> str:
    try:
        return integration(scheme).what
    except EnvserverError as error:
        return f"cannot be loaded: {error}"


def _row(name: str, origin: str) -> tuple[str, str, str, str]:
    try:
        environment = find(name)
    except (EnvserverError, ImportError) as error:
        return (name, "?", origin, f"cannot be loaded: {error}")
    return (name, environment.isolation, origin, _first_line(environment))


def _first_line(environment: type[Environment]) -> str:
    return (inspect.getdoc(environment) or "").partition("\n")[0]
