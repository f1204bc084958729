"""Files that programs never see, although they lie in directories that programs do see.

In: the environments that Python can import here, and paths that the server names (environments
given by path, their data, its working folder). Out: real paths. What always holds: wherever an
environment is loaded from, its code and its data are hidden, and so is whatever leads Python there.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from importlib.metadata import Distribution, distributions
from pathlib import Path

OUR_PACKAGES = (
    "envserver",
    "envserver_records",
    "envserver_environments",
    "envserver_integrations",
    "envserver_tools",
    "envserver_local",
    "envserver_factory",
    "envserver_clients",
)
_OUR_DISTRIBUTIONS = ("envserver", "envserver-clients")
_ENTRY_POINTS = "envserver.environments"


def hidden_paths(private: Iterable[str] = ()) -> set[str]:
    """Returns the real paths that no program may see; not all of them need to exist.

    Args:
        private: further paths, of environments and data that are not installed.
    """
    sites = _site_directories()
    found = {os.path.realpath(path) for path in private} - sites
    with_environments = _with_environments()
    for name in {*OUR_PACKAGES, *_packages(with_environments)}:
        for place in package_places(name):
            found |= {place, str(Path(place).parent)} - sites
    for site in sites:
        found.update(f"{site}/{name}" for name in _pointers(site))
    for distribution in with_environments:
        found.update(
            os.path.realpath(str(distribution.locate_file(name)))
            for name in _top_level(distribution)
        )
    return found


def environment_packages() -> set[str]:
    """Returns the import names of all installed packages that environments are in."""
    return _packages(_with_environments())


def package_places(name: str) -> set[str]:
    """Returns the real folders of a package, or the file of a module; nothing if it is absent."""
    spec = importlib.util.find_spec(name)
    if spec is None:
        return set()
    places = list(spec.submodule_search_locations or [])
    if not places and spec.has_location and spec.origin is not None:
        places = [spec.origin]
    return {os.path.realpath(place) for place in places}


def _with_environments() -> list[Distribution]:
    """Returns our own distributions and all others with environments.

    It reads the names of none of them, for parsing the metadata of hundreds takes 50 ms.
    """
    ours = [each for name in _OUR_DISTRIBUTIONS for each in distributions(name=name)]
    return ours + [each for each in distributions() if _environment_modules(each)]


def _packages(with_environments: Iterable[Distribution]) -> set[str]:
    return {name for each in with_environments for name in _environment_modules(each)}


def _environment_modules(distribution: Distribution) -> set[str]:
    """Returns the top-level modules that a distribution's environments are in."""
    if _ENTRY_POINTS not in (distribution.read_text("entry_points.txt") or ""):
        return set()
    points = distribution.entry_points.select(group=_ENTRY_POINTS)
    return {point.module.partition(".")[0] for point in points}


def _site_directories() -> set[str]:
    """Returns the real directories that hold packages of many authors, and Python's own modules."""
    known = {sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib", "platstdlib")}
    known.update(path for path in sys.path if path.endswith(("site-packages", "dist-packages")))
    return {os.path.realpath(path) for path in known if Path(path).is_dir()}


def _pointers(site: str) -> Iterator[str]:
    """Yields names in a site directory that lead Python to projects in other folders."""
    for name in (entry.name for entry in os.scandir(site)):
        if name.startswith(("__editable__", "_editable_impl_")) or name.endswith(".egg-link"):
            yield name
        elif name.endswith(".pth"):
            lines = Path(site, name).read_text(errors="replace").splitlines()
            if any(line.strip().startswith(("/", ".")) or "editable" in line for line in lines):
                yield name


def _top_level(distribution: Distribution) -> set[str]:
    tops = {path.parts[0] for path in distribution.files or [] if path.parts}
    return tops - {"..", "/", "__pycache__"}
