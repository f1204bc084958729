"""Installs packages of environments: `envserver env install`, `env list`, `env remove`.

A package (a folder, a wheel, a git repository, a name on the hub) is installed wholly or not at
all, and only if all its environments can be imported; envserver's own interpreter is never changed.
A package whose dependencies this interpreter satisfies shares it. Any other gets a virtual
environment with its dependencies; only envserver itself, and what a worker needs of its libraries
where the package brings none, comes from this interpreter.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from importlib.metadata import PackageNotFoundError, PathDistribution, distribution
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import yaml
from envserver_records.errors import ConfigError, ConflictError, InputError, NotFoundError
from envserver_records.extras import install_command
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from ..registry import ENTRY_POINT_GROUP, known_names, make_environment
from ..registry import installed as installations
from ..registry.description import Description
from ..registry.installed import (
    INTEGRATIONS,
    MANIFEST,
    PACKAGES,
    VENV,
    Installed,
    Interpreter,
    home,
    installed,
    this_version,
    write_record,
)
from ..registry.interpreters import variables
from ..registry.manifest import Manifest, as_yaml, completed, read_manifests

_OURS = ("envserver", "envserver-clients")
_DESCRIBE = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from envserver.registry.describing import main; main(*sys.argv[2:])"
)
_LAST_LINES = 12
_LICENCES = ("License-Expression", "License")


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
    """Makes a virtual environment that takes envserver as installed."""
    folder = place / VENV
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python = folder / "bin" / "python"
    printed = subprocess.run(
        [python, "-I", "-c", "import json, sys; print(json.dumps(sys.path))"],
        check=True,
        capture_output=True,
    )
    own_path = list(filter(None, json.loads(printed.stdout)))
    _claim_ours(next(Path(entry) for entry in own_path if entry.endswith("site-packages")))
    return Interpreter(executable=str(python), own_path=own_path, version=this_version())


def _claim_ours(site: Path) -> None:
    """Makes pip take envserver as installed and without dependencies: it comes from here.
    Its optional dependencies (`envserver[math]`) stay."""
    for name in _OURS:
        held = distribution(name)
        lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {held.version}"]
        lines += [
            f"Provides-Extra: {extra}" for extra in held.metadata.get_all("Provides-Extra") or []
        ]
        lines += [
            f"Requires-Dist: {require}" for require in held.requires or [] if "extra ==" in require
        ]
        info = site / f"{name.replace('-', '_')}-{held.version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("\n".join(lines) + "\n")
        # This claim hides the true distribution there, and the integrations that it offers.
        points = [
            f"{entry.name} = {entry.value}"
            for entry in held.entry_points.select(group=INTEGRATIONS)
        ]
        (info / "entry_points.txt").write_text("\n".join([f"[{INTEGRATIONS}]", *points]) + "\n")


def describe(
    references: Sequence[str], python: str, path: Sequence[str], place: Path, failure: str
) -> list[Description]:
    out = place / "described.json"
    words = [python, "-P", "-c", _DESCRIBE, json.dumps(list(path)), str(out), *references]
    run(words, failure)
    data: Any = json.loads(out.read_text())
    out.unlink()
    return msgspec.convert(data, list[Description])


def pip(*words: str | Path, failure: str) -> None:
    command = [sys.executable, "-m", "pip", "--no-input", "--disable-pip-version-check", *words]
    run(list(map(str, command)), failure)


def run(words: list[str], failure: str) -> None:
    """Runs a program without the server's settings: building a package runs foreign code."""
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
    integration = installations.integration(scheme)
    if integration.backend is None:
        raise InputError(
            f"Environments of {scheme!r} need no installation.", hint=f"--env {scheme}:{rest}"
        )
    backend = integration.backend(rest, packages)
    reference = installations.absolute(scheme, rest)
    before = next((package for package in installed() if package.package == backend.name), None)
    if before is not None and reference in before.names and not replace:
        raise ConflictError(
            f"{reference} is installed already, in {backend.name}.",
            hint="--replace true makes its virtual environment again.",
        )
    kept = before.names if before is not None else []
    python = before.interpreter if before is not None and not replace else None
    opened = folder_of(backend.name) if python is None else nullcontext(home() / backend.name)
    with opened as place:
        if python is None:
            on_progress(f"Making a virtual environment for {backend.name}")
            python = make_venv(place)
        on_progress(f"Installing {', '.join([*backend.requirements, *packages])}")
        failure = f"{reference} cannot be installed"
        wanted = [*backend.requirements, *map(_as_pip_takes_it, packages)]
        pip("--python", python.executable, "install", *wanted, failure=failure)
        if backend.prepare:
            run([python.executable, "-c", backend.prepare], failure)
        version = str(Requirement(backend.requirements[0]).specifier).removeprefix("==")
        return _record(
            Installed(
                package=backend.name,
                version=version,
                source=reference,
                environments=[],
                interpreter=python,
            ),
            sorted({*kept, reference}),
        )


def _record(
    package: Installed,
    references: Sequence[str],
    written: Mapping[str, Manifest] | None = None,
    licence: str = "",
) -> Installed:
    """Describes the environments of a package in their interpreter, and records it.
    `written`: the manifests that it has, by name."""
    place, python = package.folder, package.interpreter
    executable, path = sys.executable, [*filter(None, sys.path), str(place / PACKAGES)]
    if python is not None:
        executable, path = python.executable, python.search_path
    unusable = f"{package.package} cannot be used"
    described = describe(references, executable, path, place, unusable)
    package = msgspec.structs.replace(package, environments=described)
    if python is not None:
        from ..registry.hosted import hosted_class

        for each in described:
            hosted_class(package, each, make_environment)
    known, where = written or {}, f"{MANIFEST} of {package.package}"
    manifests = [
        completed(known.get(name, Manifest(name=name)), each, package.version, licence, where)
        for name, each in zip(package.names, described, strict=True)
    ]
    (place / MANIFEST).write_text(as_yaml(manifests))
    write_record(package)
    return package


def _as_pip_takes_it(package: str) -> str:
    path = Path(package).expanduser()
    if path.exists():
        return str(path.resolve())
    with contextlib.suppress(InvalidRequirement):
        Requirement(package)
        return package
    if "://" in package:
        return package
    raise InputError(f"--with {package!r} is not a path, a requirement or an address.")


def forget(package: Installed, name: str) -> Installed:
    """Takes an environment out of a backend that has others; the packages stay."""
    rest = [each for each in package.environments if each.name != name]
    left = msgspec.structs.replace(package, environments=rest, source=rest[0].name)
    write_record(left)
    return left


InterpreterChoice = Literal["auto", "shared", "own"]
HUB = "hub:"
_GIT = ("git+", "git@", "ssh://")

OnProgress = Callable[[str], None]


class _Wheel(NamedTuple):
    path: Path
    package: str
    version: str
    licence: str
    requirements: list[Requirement]
    names: list[str]
    manifest: str


def install(
    source: str,
    *,
    packages: Sequence[str] = (),
    interpreter: InterpreterChoice = "auto",
    replace: bool = False,
    on_progress: OnProgress = lambda text: None,
) -> Installed:
    """Installs a package of environments, or an environment of another framework.

    Args:
        source: a folder, a wheel, a git address, `hub:owner/name[@revision]`, or `SCHEME:NAME`.
        packages: with `SCHEME:NAME`: paths, wheels, requirements beside the framework.
        interpreter: auto: its own one if its dependencies ask for it.
    """
    if importlib.util.find_spec("pip") is None:
        raise ConfigError(
            f"{sys.executable} has no pip, which installs environments.",
            hint="python -m ensurepip",
        )
    if (parts := installations.split(source)) is not None:
        return install_environment(*parts, packages, replace=replace, on_progress=on_progress)
    if packages:
        raise InputError("--with is for SCHEME:NAME; a package names its dependencies itself.")
    with tempfile.TemporaryDirectory(prefix="envserver-install-") as folder:
        wheel = _read(_wheel_of(source, Path(folder), on_progress), source)
        _check_names(wheel, replace)
        unmet = _unmet(wheel.requirements)
        if interpreter == "shared" and unmet:
            raise ConfigError(
                f"{wheel.package} needs {', '.join(unmet)}, which this interpreter does not have.",
                hint="--interpreter own gives it a virtual environment.",
            )
        own = interpreter == "own" or (interpreter == "auto" and bool(unmet))
        if own and unmet:
            on_progress(f"{wheel.package} gets its own virtual environment: {', '.join(unmet)}")
        cannot = f"{wheel.package} {wheel.version} cannot be installed"
        python: Interpreter | None = None
        with folder_of(wheel.package) as place:
            if own:
                python = make_venv(place)
                pip("--python", python.executable, "install", wheel.path, failure=cannot)
            else:
                target = place / PACKAGES
                pip("install", "--no-deps", "--target", target, wheel.path, failure=cannot)
            package = Installed(
                package=wheel.package,
                version=wheel.version,
                source=source,
                environments=[],
                interpreter=python,
            )
            return _record(package, wheel.names, _written(wheel), wheel.licence)


def remove(name: str) -> Installed:
    found = installed()
    for package in found:
        if (
            name in package.names
            and installations.split(name) is not None
            and len(package.names) > 1
        ):
            return forget(package, name)
        if name in (package.package, *package.names):
            shutil.rmtree(package.folder)
            return package
    known = ", ".join(package.package for package in found) or "nothing"
    raise NotFoundError(f"{name!r} is not installed.", hint=f"Installed: {known}.")


def _wheel_of(source: str, folder: Path, on_progress: OnProgress) -> Path:
    wanted = source
    if source.startswith(HUB):
        on_progress(f"Fetching {source}")
        wanted = str(_from_hub(source.removeprefix(HUB), folder / "hub"))
    elif source.startswith(_GIT) or source.endswith(".git"):
        wanted = source if source.startswith("git+") else f"git+{source}"
    else:
        path = Path(source).expanduser().resolve()
        if path.suffix == ".whl" and path.is_file():
            return path
        if not (path / "pyproject.toml").is_file():
            raise InputError(
                f"{source!r} is not a package: there is no pyproject.toml.",
                hint="Name a project's folder, a wheel, git+https://... or hub:owner/name. "
                "A file of one environment needs no installation: --env my_env.py.",
            )
        wanted = str(path)
    on_progress(f"Building {source}")
    built = folder / "wheel"
    pip("wheel", "--no-deps", "--wheel-dir", built, wanted, failure=f"{source} cannot be built")
    (wheel,) = built.glob("*.whl")
    return wheel


def _from_hub(name: str, folder: Path) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise ConfigError(
            f"{HUB}{name} needs huggingface_hub.", hint=install_command("data")
        ) from error
    repository, _, revision = name.partition("@")
    try:
        got = snapshot_download(
            repository, repo_type="dataset", revision=revision or None, local_dir=folder
        )
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise InputError(f"{HUB}{name} cannot be fetched: {reason}") from error
    return Path(got)


def _read(path: Path, source: str) -> _Wheel:
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            (metadata,) = (each for each in names if each.endswith(".dist-info/METADATA"))
            held = PathDistribution(zipfile.Path(archive, metadata.removesuffix("METADATA")))
            facts, requirements = held.metadata, held.requires or []
            offered = held.entry_points.select(group=ENTRY_POINT_GROUP)
            manifests = [each for each in names if Path(each).name == MANIFEST]
            manifest = archive.read(manifests[0]).decode() if manifests else ""
    except (OSError, ValueError, TypeError, zipfile.BadZipFile) as error:
        raise InputError(f"{source} is not a wheel: {error}") from error
    if not offered:
        raise InputError(
            f"{facts['Name']} offers no environment.",
            hint=f'Its pyproject.toml needs [project.entry-points."{ENTRY_POINT_GROUP}"].',
        )
    return _Wheel(
        path=path,
        package=canonicalize_name(facts["Name"]),
        version=facts["Version"],
        licence=next((facts[key] for key in _LICENCES if key in facts), ""),
        requirements=[Requirement(each) for each in requirements],
        names=sorted(offered.names),
        manifest=manifest,
    )


def _check_names(wheel: _Wheel, replace: bool) -> None:
    before = next((package for package in installed() if package.package == wheel.package), None)
    if before is not None and not replace:
        raise ConflictError(
            f"{wheel.package} {before.version} is installed already.",
            hint="--replace true installs it again.",
        )
    ours = before.names if before is not None else []
    if taken := [name for name in wheel.names if name in known_names() and name not in ours]:
        raise ConflictError(
            f"There already is an environment {taken[0]!r}.",
            hint="`envserver list` says where it comes from.",
        )


def _unmet(requirements: Sequence[Requirement], extra: str = "") -> list[str]:
    found = []
    for each in requirements:
        if each.marker is not None and not each.marker.evaluate({"extra": extra}):
            continue
        try:
            held = distribution(each.name)
        except PackageNotFoundError:
            found.append(str(each))
            continue
        if each.url is not None or not each.specifier.contains(held.version, prereleases=True):
            found.append(f"{each} (here: {held.version})")
            continue
        behind = [Requirement(require) for require in held.requires or []] if each.extras else []
        for name in each.extras:
            found += _unmet(
                [requirement for requirement in behind if requirement.marker is not None], name
            )
    return found


def _written(wheel: _Wheel) -> dict[str, Manifest]:
    place = f"{MANIFEST} of {wheel.package}"
    written = read_manifests(wheel.manifest, place)
    if unknown := [name for name in written if name not in wheel.names]:
        raise ConfigError(f"{place}: the package has no environment {unknown[0]!r}.")
    return written


CARD = "README.md"
_LEFT_OUT = re.compile(r"__pycache__|build|dist|node_modules|venv|.*\.egg-info|\..*")
_KEYS = re.compile(r".*\.(pem|key|p12|pfx)|id_(rsa|ed25519|ecdsa)|credentials.*|secrets?\..*")
_TAG = "envserver-environment"
_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def prepare(project: Path, to: str, folder: Path) -> list[Manifest]:
    """Copies what is shared of `project` to `folder`; returns the manifests of its environments.
    `to`: OWNER/NAME on the hub."""
    if not _NAME.fullmatch(to):
        raise ConfigError(f"{to!r} is not a name on the hub.", hint="--to OWNER/NAME")
    facts = _project_facts(project)
    files = sorted(_shared_files(project))
    if keys := [path for path in files if _KEYS.fullmatch(path.name)]:
        raise InputError(f"{keys[0]} looks like a key.", hint="Move it out of the project.")
    manifests = _manifests(project, files, facts)
    for path in files:
        place = folder / path
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(project / path, place)
    (folder / MANIFEST).write_text(as_yaml(manifests))
    card = folder / CARD
    card.write_text(_card(card.read_text() if card.exists() else "", manifests))
    return manifests


def _project_facts(project: Path) -> dict[str, Any]:
    place = project / "pyproject.toml"
    try:
        facts: dict[str, Any] = tomllib.loads(place.read_text())["project"]
    except (OSError, KeyError, tomllib.TOMLDecodeError) as error:
        raise InputError(f"{place} has no project: {error}") from error
    if not facts.get("entry-points", {}).get(ENTRY_POINT_GROUP):
        raise InputError(
            f"{place} offers no environment.",
            hint=f'It needs [project.entry-points."{ENTRY_POINT_GROUP}"].',
        )
    return facts


def _shared_files(project: Path) -> Iterator[Path]:
    listed = subprocess.run(
        ["git", "-C", project, "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode == 0:
        paths = [Path(name) for name in listed.stdout.split("\0") if name]
    else:
        paths = [path.relative_to(project) for path in project.rglob("*")]
    for path in paths:
        whole = project / path
        left_out = any(_LEFT_OUT.fullmatch(part) for part in path.parts)
        if whole.is_file() and not whole.is_symlink() and not left_out:
            yield path


def _manifests(project: Path, files: list[Path], facts: dict[str, Any]) -> list[Manifest]:
    names = sorted(facts["entry-points"][ENTRY_POINT_GROUP])
    places = [path for path in files if path.name == MANIFEST]
    if not places:
        raise ConfigError(
            f"{project} has no {MANIFEST}.",
            hint="`env install` writes one: take it from there, and complete it.",
        )
    place = project / min(places, key=lambda path: len(path.parts))
    written = read_manifests(place.read_text(), str(place))
    if unknown := written.keys() - set(names):
        raise ConfigError(f"{place}: the project has no environment {min(unknown)!r}.")
    here = _described_project(facts)
    found = []
    for name in names:
        if name not in written:
            raise ConfigError(f"{place} has no manifest of {name!r}.")
        version, licence = str(facts.get("version", "")), _licence(facts)
        manifest = completed(written[name], here.get(name), version, licence, str(place))
        _check_complete(manifest, project, str(place))
        found.append(manifest)
    return found


def _described_project(facts: dict[str, Any]) -> dict[str, Description]:
    package, version = canonicalize_name(facts.get("name", "")), facts.get("version")
    for other in installed():
        if other.package == package and other.version == version:
            return {described.name: described for described in other.environments}
    return {}


def _licence(facts: dict[str, Any]) -> str:
    said = facts.get("license", "")
    return str(said.get("text", "")) if isinstance(said, dict) else str(said)


def _check_complete(manifest: Manifest, project: Path, place: str) -> None:
    missing = [name for name in Manifest.__struct_fields__ if not getattr(manifest, name)]
    if missing:
        raise ConfigError(
            f"{place}: {manifest.name!r} has no {', '.join(missing)}.",
            hint="Its users need to know. `env install` fills in what the code says, `envserver "
            "check` makes the score card.",
        )
    card = manifest.score_card.partition("#")[0]
    if not (project / card).is_file():
        raise ConfigError(f"{place}: the score card {card!r} is not a file of the project.")


def _card(text: str, manifests: list[Manifest]) -> str:
    """Returns the README with a head that the hub reads; one that has a head stays as it is."""
    if text.startswith("---\n"):
        return text
    head = {"license": manifests[0].licence.lower(), "tags": [_TAG]}
    return f"---\n{yaml.safe_dump(head, sort_keys=False)}---\n\n{text}"
