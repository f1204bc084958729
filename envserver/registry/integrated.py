"""Environments of other frameworks, by scheme: `--env SCHEME:REST`.

An entry point of the group `envserver.integrations` is an `Integration`. Its environments run in
this interpreter if it has the framework, else in the virtual environment that `envserver env
install SCHEME:REST` made.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Iterable
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from envserver_records.errors import ConfigError, NotFoundError

from ..environment import Environment
from ..integration_interface import Integration
from .installed import Installed, installed, with_own_interpreter

ENVIRONMENTS = "envserver.environments"
INTEGRATIONS = "envserver.integrations"


def integration_points() -> dict[str, EntryPoint]:
    """Returns the entry points of all integrations, by scheme."""
    return {point.name: point for point, _ in offered(INTEGRATIONS)}


def offered(group: str) -> tuple[tuple[EntryPoint, str], ...]:
    """Returns the entry points that installed packages offer to this interpreter, each with the
    name of its package. They are read again when a folder of `sys.path` has changed."""
    installed()  # adds their folders to sys.path
    return _offered(tuple((folder, _changed_at(folder)) for folder in sys.path))[group]


@functools.lru_cache(maxsize=2)
def _offered(
    folders: tuple[tuple[str, int], ...],
) -> dict[str, tuple[tuple[EntryPoint, str], ...]]:
    """Returns what `offered` returns, by group: a file of each package is read once for all."""
    everything = entry_points()
    return {group: _named(everything.select(group=group)) for group in (ENVIRONMENTS, INTEGRATIONS)}


def _named(points: Iterable[EntryPoint]) -> tuple[tuple[EntryPoint, str], ...]:
    names = {dist: "" if dist is None else dist.name for dist in {point.dist for point in points}}
    return tuple((point, names[point.dist]) for point in points)


def _changed_at(folder: str) -> int:
    try:
        return Path(folder).stat().st_mtime_ns
    except OSError:
        return 0


def split(reference: str) -> tuple[str, str] | None:
    """Returns the scheme and the rest of `SCHEME:REST`; None: `reference` is something else."""
    scheme, colon, rest = reference.partition(":")
    return (scheme, rest) if colon and scheme in integration_points() else None


@functools.cache
def integration(scheme: str) -> Integration:
    """Returns the integration of a scheme.
    Raises ConfigError: its module cannot be imported, or offers something else.
    """
    point = integration_points()[scheme]
    try:
        loaded = point.load()
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"The integration {scheme!r} ({point.value}) cannot be imported: {error}"
        ) from error
    if not isinstance(loaded, Integration):
        raise ConfigError(f"Entry point {scheme!r} ({point.value}) is not an Integration.")
    return loaded


def absolute(scheme: str, rest: str) -> str:
    """Returns `SCHEME:REST` as another process, in another folder, understands it."""
    return f"{scheme}:{integration(scheme).absolute(rest)}"


def integrated_class(scheme: str, rest: str) -> type[Environment]:
    """Returns the environment class of `SCHEME:REST`: its own, or one that stands for it."""
    if not rest:
        raise NotFoundError(f"--env {scheme}: needs a name: {scheme}:NAME.")
    one = integration(scheme)
    reference = absolute(scheme, rest)
    if (own := with_own_interpreter().get(reference)) is not None and not _runs_in(own[0]):
        from .hosted import hosted_class

        return hosted_class(*own)
    if one.module and importlib.util.find_spec(one.module) is None:
        raise _not_installed(scheme, rest, one)
    return one.environment(reference.partition(":")[2])


def _not_installed(scheme: str, rest: str, one: Integration) -> NotFoundError:
    if one.backend is None:
        text = f"{scheme}:{rest} needs the package {one.module!r}, which is not installed here."
        return NotFoundError(text, hint=f"pip install {one.module}")
    beside = [name for name in with_own_interpreter() if name.startswith(f"{scheme}:")]
    text = (
        f"{scheme}:{rest} is not installed; others of {scheme} are, so it takes seconds."
        if beside
        else f"{scheme}:{rest} needs the package {one.module!r}, which is not installed here."
    )
    hint = f"envserver env install {scheme}:{rest} (--with PACKAGE, if it is in one of its own)"
    return NotFoundError(text, hint=hint)


def _runs_in(one: Installed) -> bool:
    """Whether this process runs in the package's own interpreter."""
    return one.interpreter is not None and one.interpreter.executable == sys.executable
