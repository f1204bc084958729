"""What is shipped: the four packages with their data, and the rules between them."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("envserver", "environments", "tools", "clients")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", folder],
        cwd=ROOT,
        check=True,
        capture_output=True,
        timeout=120,
    )
    (path,) = folder.glob("*.whl")
    return zipfile.ZipFile(path)


def test_the_wheel_holds_every_file_of_the_packages(wheel: zipfile.ZipFile) -> None:
    tracked = subprocess.run(
        ["git", "ls-files", *PACKAGES], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if tracked.returncode != 0:
        pytest.skip("not a git checkout: nothing to compare the wheel with")
    files = {name for name in tracked.stdout.split("\n") if name and (ROOT / name).exists()}
    assert files - set(wheel.namelist()) == set()
    assert "envserver/configs/models.yaml" in wheel.namelist()


def test_the_wheel_holds_nothing_else(wheel: zipfile.ZipFile) -> None:
    tops = {name.split("/")[0] for name in wheel.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == set(PACKAGES)
    assert not [name for name in wheel.namelist() if "__pycache__" in name]


def test_the_wheel_has_its_command_and_its_licence(wheel: zipfile.ZipFile) -> None:
    names = wheel.namelist()
    (entry_points,) = [name for name in names if name.endswith("/entry_points.txt")]
    assert "envserver = envserver.cli:main" in wheel.read(entry_points).decode()
    (licence,) = [name for name in names if name.endswith("/licenses/LICENSE")]
    assert "Apache License" in wheel.read(licence).decode()


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
