"""Prepares a project of environments for the hub: `envserver env push`.

In: a project's folder. Out: a folder to upload, with its files, a manifest that is complete, and a
card that the hub can read. What always holds: hidden files, keys and what git ignores stay at home,
and the project itself is not changed.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from envserver_records.errors import ConfigError, InputError
from packaging.utils import canonicalize_name

from ..registry import ENTRY_POINT_GROUP
from ..registry.description import Description
from ..registry.installed import MANIFEST, installed
from ..registry.manifest import Manifest, as_yaml, completed, read_manifests

CARD = "README.md"
_LEFT_OUT = re.compile(r"__pycache__|build|dist|node_modules|venv|.*\.egg-info|\..*")
_KEYS = re.compile(r".*\.(pem|key|p12|pfx)|id_(rsa|ed25519|ecdsa)|credentials.*|secrets?\..*")
_TAG = "envserver-environment"
_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def prepare(project: Path, to: str, folder: Path) -> list[Manifest]:
    """Copies what is shared of `project` to `folder`.

    Args:
        project: with a pyproject.toml, and an `environment.yaml` there or in the package.
        to: OWNER/NAME on the hub.

    Returns:
        The manifests of its environments.

    Raises:
        InputError: it is not a project of environments, or a file in it looks like a key.
        ConfigError: `to` is not a name, or a manifest is missing, incomplete or wrong.
    """
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
    """Yields the files that are shared, relative to `project`."""
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
    here = _described(facts)
    found = []
    for name in names:
        if name not in written:
            raise ConfigError(f"{place} has no manifest of {name!r}.")
        version, licence = str(facts.get("version", "")), _licence(facts)
        manifest = completed(written[name], here.get(name), version, licence, str(place))
        _check_complete(manifest, project, str(place))
        found.append(manifest)
    return found


def _described(facts: dict[str, Any]) -> dict[str, Description]:
    """Returns what is known of the environments here, if this version is installed."""
    package, version = canonicalize_name(facts.get("name", "")), facts.get("version")
    for one in installed():
        if one.package == package and one.version == version:
            return {described.name: described for described in one.environments}
    return {}


def _licence(facts: dict[str, Any]) -> str:
    said = facts.get("license", "")
    return str(said.get("text", "")) if isinstance(said, dict) else str(said)


def _check_complete(manifest: Manifest, project: Path, place: str) -> None:
    missing = [name for name in Manifest.__struct_fields__ if not getattr(manifest, name)]
    if missing:
        raise ConfigError(
            f"{place}: {manifest.name!r} has no {', '.join(missing)}.",
            hint="Who uses it must know. `env install` fills in what the code says, "
            "`envserver check` makes the score card.",
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
