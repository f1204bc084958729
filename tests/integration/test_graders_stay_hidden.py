"""However envserver is installed, no program sees its graders and their data.

Each way of installing gets a small environment of its own, with wheels that are built once; the
libraries come from the environment of these tests. Backends that this machine lacks are skipped. A
program of each sandbox looks for the graders, whatever the probe says.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import orjson
import pytest
from support.installed import ASK, LOOK, ROOT, add_libraries, build_wheels, run

from envserver.sandbox import selection

UV = Path(sys.prefix, "bin", "uv")


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """A folder that every user can read, as sandboxes of a root server need it."""
    place = Path(tempfile.mkdtemp(prefix="installed-"))
    place.chmod(0o755)
    yield place
    shutil.rmtree(place)


@pytest.fixture(scope="module")
def wheels(folder: Path) -> list[str]:
    return build_wheels(folder)


def base_python() -> str:
    """Python without an environment; one that all users may execute."""
    name = f"bin/python3.{sys.version_info.minor}"
    candidates = (f"{sys.base_prefix}/{name}", f"/usr/{name}")
    for path in map(os.path.realpath, candidates):
        open_to_all = all(parent.stat().st_mode & 1 for parent in Path(path).parents)
        if Path(path).exists() and open_to_all:
            return path
    pytest.skip("every Python is in a closed folder")


def in_venv(folder: Path, wheels: list[str]) -> tuple[Path, dict[str, str]]:
    python = folder / "standard/bin/python"
    run(base_python(), "-m", "venv", "--without-pip", folder / "standard")
    _pip(python, "--no-index", *wheels)
    return python, {}


def in_venv_of_uv(folder: Path, wheels: list[str]) -> tuple[Path, dict[str, str]]:
    if not UV.exists():
        pytest.skip("no uv")
    python = folder / "made-by-uv/bin/python"
    run(UV, "venv", "--quiet", "--offline", "--python", base_python(), folder / "made-by-uv")
    install = [UV, "pip", "install", "--quiet", "--offline", "--no-deps", "--python", python]
    run(*install, *wheels)
    return python, {}


def editable(folder: Path, wheels: list[str]) -> tuple[Path, dict[str, str]]:
    python = folder / "editable/bin/python"
    run(base_python(), "-m", "venv", "--without-pip", folder / "editable")
    _libraries(folder / "editable")
    for project in (ROOT, ROOT / "clients"):
        _pip(python, "--no-build-isolation", "--editable", project)
    return python, {}


def for_the_user(folder: Path, wheels: list[str]) -> tuple[Path, dict[str, str]]:
    variables = {"PYTHONUSERBASE": str(folder / "user")}
    python = Path(base_python())
    _pip(python, "--no-index", "--break-system-packages", "--user", *wheels, env=variables)
    return python, variables


Install = Callable[[Path, list[str]], tuple[Path, dict[str, str]]]


@pytest.mark.thorough
@pytest.mark.parametrize("install", [in_venv, in_venv_of_uv, editable, for_the_user])
def test_no_program_sees_the_graders(install: Install, folder: Path, wheels: list[str]) -> None:
    python, variables = install(folder, wheels)
    _libraries(python.parents[1] if not variables else folder / "user")
    refused = {}
    for backend in selection.ORDER:
        told = run(python, "-c", ASK, backend, LOOK, env=variables, cwd=folder)
        seen, tries = orjson.loads(told.splitlines()[-1])
        if tries < 0:
            refused[backend] = seen
            assert "graders" not in seen, "the view of programs is wrong, not the machine"
        else:
            assert tries > 20
            assert seen == "", backend
    if len(refused) == len(selection.ORDER):
        pytest.skip(f"no backend works here: {refused}")


def _pip(python: Path, *words: object, env: dict[str, str] | None = None) -> None:
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "--quiet",
        "--no-deps",
        "--no-compile",
    ]
    run(*pip, "--no-warn-script-location", *words, env=env)


def _libraries(prefix: Path) -> None:
    (site,) = prefix.glob("lib/python*/site-packages")
    add_libraries(site)
