"""Packages that `envserver env install` installed, each in a folder of its own below `home()`.

    NAME/installed.json     what it is; written last: a folder without it is not installed
    NAME/environment.yaml   its manifests, one document per environment
    NAME/packages/          the package alone, where envserver's interpreter has what it needs
    NAME/venv/              else its own virtual environment, with all its dependencies

Packages of the first kind are added to `sys.path`, behind everything else, and found as any other
entry point. Those of the second kind are never imported in this process (see `hosted`).
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Iterable, Iterator
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

import msgspec
from envserver_records.errors import ConfigError
from envserver_records.files import user_folder

from ..integration_interface import Integration
from ..version import __version__
from .description import Description

RECORD = "installed.json"
MANIFEST = "environment.yaml"
PACKAGES = "packages"
VENV = "venv"


class Interpreter(msgspec.Struct, frozen=True, kw_only=True):
    """A Python of an environment's own virtual environment. `own_path`: its `sys.path`, without
    envserver; `version`: `major.minor`."""

    executable: str
    own_path: list[str]
    version: str

    @property
    def search_path(self) -> list[str]:
        """Its `sys.path` with this process's behind it, so that it runs this envserver.

        What the virtual environment has comes first: its versions win.
        """
        ours = (str(Path(entry).absolute()) for entry in sys.path if entry)
        return [*self.own_path, *(entry for entry in ours if entry not in self.own_path)]


class Installed(msgspec.Struct, frozen=True, kw_only=True):
    """An installed package. `source`: what was given to `env install`; `interpreter`: None: it runs
    in envserver's; `envserver`: the version that described its environments, "" in older records.
    """

    package: str
    version: str
    source: str
    environments: list[Description]
    interpreter: Interpreter | None = None
    envserver: str = __version__

    @property
    def folder(self) -> Path:
        return home() / self.package

    @property
    def names(self) -> list[str]:
        return [environment.name for environment in self.environments]


def this_version() -> str:
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def usable_interpreter(package: Installed) -> Interpreter:
    python = package.interpreter
    assert python is not None
    if python.version != this_version() or not Path(python.executable).exists():
        raise ConfigError(
            f"{package.package} was installed for Python {python.version} in {python.executable}, "
            f"which is gone or cannot run with this Python {this_version()}.",
            hint=_again(package),
        )
    if package.envserver != __version__:
        _warn(
            f"{package.package} was installed by envserver "
            f"{package.envserver or 'of an older version'}; settings that changed since are "
            f"not known. {_again(package)}"
        )
    return python


def _again(package: Installed) -> str:
    return f"envserver env install {package.source} --replace true"


def home() -> Path:
    return user_folder("XDG_DATA_HOME", ".local/share") / "envserver" / "environments"


def installed() -> list[Installed]:
    """Returns all installed packages, by name; makes those importable that run in this Python."""
    found = sorted(_installed(), key=lambda package: package.package)
    for package in found:
        packages = str(package.folder / PACKAGES)
        if package.interpreter is None and packages not in sys.path:
            sys.path.append(packages)
    return found


def with_own_interpreter() -> dict[str, tuple[Installed, Description]]:
    return {
        described.name: (package, described)
        for package in installed()
        if package.interpreter is not None
        for described in package.environments
    }


def write_record(package: Installed) -> None:
    partial = package.folder / f"{RECORD}.partial"
    # Not msgspec's JSON: an end of a reward range may be infinite.
    partial.write_text(json.dumps(msgspec.to_builtins(package), indent=2) + "\n")
    partial.replace(package.folder / RECORD)


def _installed() -> Iterator[Installed]:
    try:
        records = list(home().glob(f"*/{RECORD}"))
    except (ConfigError, PermissionError):  # no home, or another user's: nothing is installed in it
        return
    for path in records:
        try:
            data: Any = json.loads(path.read_bytes())
            yield msgspec.convert({"envserver": "", **data}, Installed)
        except (OSError, ValueError) as error:  # being removed, or of another version
            _warn(f"{path} cannot be read: {error}. Install it again.")


@functools.cache
def _warn(text: str) -> None:
    """Says it once."""
    sys.stderr.write(f"envserver: {text}\n")


# An entry point of the group `envserver.integrations` is an `Integration`. Its environments run in
# this interpreter if it has the framework, else in the virtual environment that `envserver env
# install SCHEME:REST` made.

ENVIRONMENTS = "envserver.environments"
INTEGRATIONS = "envserver.integrations"


def integration_points() -> dict[str, EntryPoint]:
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
    """A file of each package is read once for all groups."""
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
