"""The generation of verifiers that a package needs, and its virtual environment."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement

from envserver import Backend

CLASSIC = Backend(name="verifiers-classic", requirements=["verifiers==0.3.1"])
V1 = Backend(name="verifiers-v1", requirements=["verifiers==0.4.0"])
_LOADS = re.compile(rb"^def load_environment\b", re.MULTILINE)


def is_classic(version: str) -> bool:
    major, minor = (int(part) for part in version.split(".")[:2])
    return (major, minor) < (0, 4)


def backend_of(name: str, packages: Sequence[str]) -> Backend:
    """`verifiers<0.4` or `verifiers>=0.4` among the packages installed with it decides; else a
    folder or wheel with `load_environment` is classic; else it is a task set."""
    for package in packages:
        wanted = _requirement(package)
        if wanted is not None and wanted.name == "verifiers" and wanted.specifier:
            pinned = CLASSIC.requirements[0].partition("==")[2]
            return CLASSIC if wanted.specifier.contains(pinned) else V1
    sources = (source for package in packages for source in _sources(Path(package).expanduser()))
    return CLASSIC if any(_LOADS.search(source) for source in sources) else V1


def _requirement(package: str) -> Requirement | None:
    try:
        return Requirement(package)
    except InvalidRequirement:
        return None


def _sources(path: Path) -> Iterator[bytes]:
    if path.is_dir():
        hidden = (each for each in path.rglob("*.py") if not _is_hidden(each.relative_to(path)))
        yield from (each.read_bytes() for each in hidden)
    elif path.suffix == ".whl" and path.is_file():
        with zipfile.ZipFile(path) as archive:
            names = [each for each in archive.namelist() if each.endswith(".py")]
            yield from map(archive.read, names)


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") or part in ("build", "node_modules") for part in path.parts)
