"""`envserver env install SCHEME:REST`: environments of other frameworks, in their backend.

A backend is a virtual environment with the framework in a version of ours, and the packages that
environments in it need. What always holds: an environment is listed only if it could be imported;
a new backend is made wholly or not at all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
from envserver_records.errors import ConflictError, InputError
from packaging.requirements import InvalidRequirement, Requirement

from ..integration_interface import Backend
from ..registry import integrated
from ..registry.installed import MANIFEST, Installed, Interpreter, home, installed, write_record
from ..registry.manifest import Manifest, as_yaml, completed
from .own_venv import describe, folder_of, make_venv, pip, run


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

    Raises:
        InputError: environments of this scheme need no installation.
        ConflictError: it is installed already.
        ConfigError: something cannot be installed, or the environment cannot be imported.
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
