"""What is shipped: the packages with their data, and the rules between them."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from fnmatch import fnmatch
from pathlib import Path

import pytest
from support.waiting import PATIENCE

ROOT = Path(__file__).parents[2]
# The folder that each package lies in, by the project that ships it.
PACKAGES = {
    ".": {
        "envserver": ".",
        "envserver_environments": "environments",
        "envserver_integrations": "environments",
        "envserver_tools": "tools",
        "envserver_local": "tools",
        "envserver_factory": "tools",
    },
    "clients": {"envserver_clients": "clients", "envserver_records": "clients"},
}


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, zipfile.ZipFile]:
    """The wheel of each project, by its folder."""
    built = {}
    for project in PACKAGES:
        folder = tmp_path_factory.mktemp("wheel")
        subprocess.run(
            [
                sys.executable,
                "-m",
                "hatchling",
                "build",
                "--target",
                "wheel",
                "--directory",
                folder,
            ],
            cwd=ROOT / project,
            check=True,
            capture_output=True,
            timeout=PATIENCE,
        )
        (path,) = folder.glob("*.whl")
        built[project] = zipfile.ZipFile(path)
    return built


@pytest.mark.parametrize("project", PACKAGES)
def test_a_wheel_holds_every_file_of_its_packages(
    wheels: dict[str, zipfile.ZipFile], project: str
) -> None:
    names = set(wheels[project].namelist())
    for package, folder in PACKAGES[project].items():
        tracked = subprocess.run(
            ["git", "ls-files", package],
            cwd=ROOT / folder,
            capture_output=True,
            text=True,
            check=False,
        )
        if tracked.returncode != 0:
            pytest.skip("not a git checkout: nothing to compare the wheel with")
        files = {name for name in tracked.stdout.split() if (ROOT / folder / name).exists()}
        source = {name for name in files - names if name.startswith("envserver/dashboard/")}
        assert files - names == source
        # What the page is built from: users need no Node.js.
        assert not [name for name in source if name.endswith((".py", ".md")) or "/static/" in name]
        assert f"{package}/py.typed" in names
    assert ("envserver/configs/models.yaml" in names) == (project == ".")


@pytest.mark.parametrize("project", PACKAGES)
def test_a_wheel_holds_nothing_else(wheels: dict[str, zipfile.ZipFile], project: str) -> None:
    names = wheels[project].namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == set(PACKAGES[project])
    assert not [name for name in names if "__pycache__" in name or "node_modules" in name]
    assert not [name for name in names if name.endswith((".ts", ".tsx"))]


def test_the_wheels_have_command_entry_points_and_licence(
    wheels: dict[str, zipfile.ZipFile],
) -> None:
    for project, wheel in wheels.items():
        names = wheel.namelist()
        (licence,) = [name for name in names if name.endswith("/licenses/LICENSE")]
        assert "Apache License" in wheel.read(licence).decode()
        if project == ".":
            own = "envserver-*.dist-info/entry_points.txt"  # vLLM's plug-in has some, too
            (points,) = [name for name in names if fnmatch(name, own)]
            text = wheel.read(points).decode()
            assert "envserver = envserver.cli:main" in text
            assert "math = envserver_environments.math.env:Math" in text


def test_import_rules_hold() -> None:
    lint_imports = Path(sys.executable).with_name("lint-imports")
    checked = subprocess.run(
        [lint_imports, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_the_lock_has_hashes_and_no_addresses() -> None:
    locked = (ROOT / "constraints.txt").read_text()
    assert not re.search(r"://|^--?(?!-hash)(i|index|extra|find|f|trusted)\b", locked, re.MULTILINE)
    requirements = re.split(r"\n(?=[a-z0-9])", locked.partition("\n")[2])
    pinned = [entry for entry in requirements if "==" in entry.split("\n")[0]]
    assert len(pinned) > 40
    assert [entry.split("==")[0] for entry in pinned if "--hash=sha256:" not in entry] == []
