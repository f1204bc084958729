"""`envserver env install SCHEME:REST`: environments of other frameworks, in their backend.

A backend is a virtual environment with the framework in a version of ours, and the packages that
environments in it need. What always holds: an environment is listed only if it could be imported;
a new backend is made wholly or not at all.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import msgspec
from envserver_records.errors import ConfigError, ConflictError, InputError
from packaging.requirements import InvalidRequirement, Requirement

from ..integration_interface import Backend
from ..registry import integrated
from ..registry.description import Description
from ..registry.installed import (
    MANIFEST,
    VENV,
    Installed,
    Interpreter,
    home,
    installed,
    this_version,
    write_record,
)
from ..registry.integrated import INTEGRATIONS
from ..registry.interpreters import variables
from ..registry.manifest import Manifest, as_yaml, completed

# Installing changes nothing in envserver's own interpreter, and a package's folder is there wholly
# or not at all.

_OURS = ("envserver", "envserver-clients")
_DESCRIBE = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from envserver.registry.description import main; main(*sys.argv[2:])"
)
_LAST_LINES = 12


@contextmanager
def folder_of(package: str) -> Iterator[Path]:
    """Makes the package's folder anew; it is gone if the block raises."""
    place = home() / package
    shutil.rmtree(place, ignore_errors=True)  # of a replaced package, or one that was cut off
    place.mkdir(parents=True)
    try:
        yield place
    except BaseException:
        shutil.rmtree(place, ignore_errors=True)
        raise


def make_venv(place: Path) -> Interpreter:
    """Makes a virtual environment in `place`, which takes envserver as installed."""
    folder = place / VENV
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python = folder / "bin" / "python"
    asked = subprocess.run(
        [python, "-I", "-c", "import json, sys; print(json.dumps(sys.path))"],
        check=True,
        capture_output=True,
    )
    own_path = list(filter(None, json.loads(asked.stdout)))
    _claim_ours(next(Path(entry) for entry in own_path if entry.endswith("site-packages")))
    return Interpreter(executable=str(python), own_path=own_path, version=this_version())


def _claim_ours(site: Path) -> None:
    """Makes pip take envserver as installed and without dependencies: it comes from here.

    Its optional dependencies (`envserver[math]`) stay.
    """
    for name in _OURS:
        held = distribution(name)
        lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {held.version}"]
        lines += [f"Provides-Extra: {one}" for one in held.metadata.get_all("Provides-Extra") or []]
        lines += [f"Requires-Dist: {one}" for one in held.requires or [] if "extra ==" in one]
        info = site / f"{name.replace('-', '_')}-{held.version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("\n".join(lines) + "\n")
        # This claim hides the true distribution there, and the integrations that it offers.
        points = [
            f"{one.name} = {one.value}" for one in held.entry_points.select(group=INTEGRATIONS)
        ]
        (info / "entry_points.txt").write_text("\n".join([f"[{INTEGRATIONS}]", *points]) + "\n")


def describe(
    references: Sequence[str], python: str, path: Sequence[str], place: Path, failure: str
) -> list[Description]:
    """Imports environments in a process of `python` with `sys.path` `path`.

    Args:
        references: as `--env` takes them.
        place: a folder for its answer.
        failure: what is said first if one cannot be imported.
    """
    out = place / "described.json"
    words = [python, "-P", "-c", _DESCRIBE, json.dumps(list(path)), str(out), *references]
    run(words, failure)
    data: Any = json.loads(out.read_text())
    out.unlink()
    return msgspec.convert(data, list[Description])


def pip(*words: str | Path, failure: str) -> None:
    """Runs pip; see `run`."""
    command = [sys.executable, "-m", "pip", "--no-input", "--disable-pip-version-check", *words]
    run(list(map(str, command)), failure)


def run(words: list[str], failure: str) -> None:
    """Runs a program without the server's settings: building a package runs foreign code.
    Raises ConfigError: it fails; the message has the end of its output.
    """
    ended = subprocess.run(
        words,
        env=variables(os.environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if ended.returncode != 0:
        lines = "\n".join(ended.stdout.strip().splitlines()[-_LAST_LINES:])
        raise ConfigError(f"{failure}:\n{lines}")


def install_environment(
    scheme: str,
    rest: str,
    packages: Sequence[str],
    *,
    replace: bool,
    on_progress: Callable[[str], None],
) -> Installed:
    """Adds `SCHEME:REST` to its backend, which is made if there is none.

    Args:
        packages: what pip installs beside the framework: paths, wheels, requirements.
        replace: the backend is made anew, with all its environments.
    """
    integration = integrated.integration(scheme)
    if integration.backend is None:
        raise InputError(
            f"Environments of {scheme!r} need no installation.", hint=f"--env {scheme}:{rest}"
        )
    backend = integration.backend(rest, packages)
    reference = integrated.absolute(scheme, rest)
    before = next((one for one in installed() if one.package == backend.name), None)
    if before is not None and reference in before.names and not replace:
        raise ConflictError(
            f"{reference} is installed already, in {backend.name}.",
            hint="--replace true makes its virtual environment anew.",
        )
    kept = before.names if before is not None else []
    with _place(backend, anew=before is None or replace) as place:
        python = before.interpreter if before is not None and not replace else None
        if python is None:
            on_progress(f"Making a virtual environment for {backend.name}")
            python = make_venv(place)
        on_progress(f"Installing {', '.join([*backend.requirements, *packages])}")
        failure = f"{reference} cannot be installed"
        wanted = [*backend.requirements, *map(_as_pip_takes_it, packages)]
        pip("--python", python.executable, "install", *wanted, failure=failure)
        if backend.prepare:
            run([python.executable, "-c", backend.prepare], failure)
        return _record(backend, sorted({*kept, reference}), python, reference)


@contextlib.contextmanager
def _place(backend: Backend, anew: bool) -> Iterator[Path]:
    if not anew:
        yield home() / backend.name
        return
    with folder_of(backend.name) as place:
        yield place


def _record(backend: Backend, references: list[str], python: Interpreter, source: str) -> Installed:
    """Describes the backend's environments, and writes that they are installed."""
    place = home() / backend.name
    cannot = f"{backend.name} cannot be used"
    described = describe(references, python.executable, python.search_path, place, cannot)
    one = Installed(
        package=backend.name,
        version=_version(backend),
        source=source,
        environments=described,
        interpreter=python,
    )
    manifests = [
        completed(Manifest(name=each.name), each, one.version, "", str(place / MANIFEST))
        for each in described
    ]
    (place / MANIFEST).write_text(as_yaml(manifests))
    write_record(one)
    return one


def _version(backend: Backend) -> str:
    return str(Requirement(backend.requirements[0]).specifier).removeprefix("==")


def _as_pip_takes_it(package: str) -> str:
    """Returns a path that pip does not take for a name, and everything else as it is."""
    path = Path(package).expanduser()
    if path.exists():
        return str(path.resolve())
    with contextlib.suppress(InvalidRequirement):
        Requirement(package)
        return package
    if "://" in package:
        return package
    raise InputError(f"--with {package!r} is no path, no requirement and no address.")


def forget(one: Installed, name: str) -> Installed:
    """Takes an environment out of a backend that has others; the packages stay.

    Returns:
        what is left.
    """
    rest = [each for each in one.environments if each.name != name]
    left = msgspec.structs.replace(one, environments=rest, source=rest[0].name)
    write_record(left)
    return left
