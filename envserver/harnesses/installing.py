"""Installs programs that play agents, each in a folder of its own, in a pinned version.

$XDG_DATA_HOME/envserver/agents/NAME     node_modules/ (npm), or bin/ and lib/ (PyPI)
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

from envserver_records.errors import ConfigError, NotFoundError
from envserver_records.files import storing, user_folder

from .programs import Harness, Package

LEAST_NODE: Final = 18
_INSTALL_SECONDS: Final = 1800
_SAID: Final = 800
_MANIFEST: Final = "agent.json"
_SYSTEM: Final = ("/usr/", "/bin/")
"""Programs there are seen in every sandbox."""


def agents_folder(folder: Path | None = None) -> Path:
    if folder is not None:
        return folder.resolve()
    return user_folder("XDG_DATA_HOME", ".local/share") / "envserver/agents"


def installed_version(name: str, folder: Path | None = None) -> str:
    """Returns the version of an installed program, or ""."""
    try:
        return version_in(agents_folder(folder) / name)
    except ConfigError:  # without a home nothing is installed in it
        return ""


def installed_place(harness: Harness, folder: Path | None = None) -> Path:
    place = agents_folder(folder) / harness.name
    if not version_in(place):
        raise NotFoundError(
            f"The agent {harness.name!r} is not installed in {place.parent}.",
            hint=f"envserver agents install {harness.name}",
        )
    return place


def version_in(place: Path) -> str:
    try:
        return str(json.loads((place / _MANIFEST).read_text())["version"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def install(harness: Harness, folder: Path | None = None, version: str = "") -> Path:
    """Installs a program, in place of an earlier version; returns its folder. `version`: unset: the
    one that is tested with this version of envserver."""
    package = harness.package
    if package is None:
        raise NotFoundError(f"{harness.name!r} is not a program that can be installed.")
    version = version or package.version
    place = agents_folder(folder) / harness.name
    fresh = place.with_name(f".{harness.name}-{os.getpid()}")
    shutil.rmtree(fresh, ignore_errors=True)
    try:
        with storing(fresh.parent, "--folder DIR names another one."):
            fresh.mkdir(parents=True)
        if package.registry == "npm":
            _install_npm(package, version, fresh)
        else:
            _install_pypi(package, version, fresh)
        facts = {"name": harness.name, "package": package.name, "version": version}
        (fresh / _MANIFEST).write_text(json.dumps(facts))
        shutil.rmtree(place, ignore_errors=True)
        fresh.rename(place)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return place


def _install_npm(package: Package, version: str, place: Path) -> None:
    node = _node()
    npm = shutil.which("npm")
    if npm is None:
        raise ConfigError("npm is not installed.", hint="It comes with Node.js.")
    command = [npm, "install", "--no-audit", "--no-fund", "--no-save", "--prefix", str(place)]
    _ran([*command, f"{package.name}@{version}"], place)
    if not node.startswith(_SYSTEM):  # sandboxes do not see it where it is
        (place / "bin").mkdir()
        shutil.copy2(node, place / "bin/node")


def _node() -> str:
    hint = f"Install Node.js {LEAST_NODE} or newer: https://nodejs.org"
    found = shutil.which("node")
    if found is None:
        raise ConfigError("This agent needs Node.js, which is not installed.", hint=hint)
    said = subprocess.run([found, "--version"], capture_output=True, text=True, check=False).stdout
    known = re.match(r"v(\d+)", said)
    if known is None or int(known[1]) < LEAST_NODE:
        raise ConfigError(f"This agent needs a newer Node.js than {said.strip()!r}.", hint=hint)
    return os.path.realpath(found)


def _install_pypi(package: Package, version: str, place: Path) -> None:
    _ran([sys.executable, "-m", "venv", "--symlinks", str(place)], place)
    pip = [f"{place}/bin/python", "-m", "pip", "install", "--disable-pip-version-check"]
    _ran([*pip, f"{package.name}=={version}"], place)


def _ran(command: list[str], place: Path) -> None:
    try:
        done = subprocess.run(
            command,
            cwd=place,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_INSTALL_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{Path(command[0]).name} did not run: {error}.") from error
    if done.returncode:
        said = (done.stderr or done.stdout).strip()[-_SAID:]
        raise ConfigError(f"The installation failed: {said}", hint=" ".join(command))
