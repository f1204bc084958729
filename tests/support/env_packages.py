"""Wheels of environments, and `envserver env install` without an index."""

import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from .commands import envserver


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that packages are installed in; pip asks no index."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    return tmp_path / "data" / "envserver" / "environments"


def wheel(
    folder: Path,
    package: str,
    files: Mapping[str, str],
    *,
    version: str = "1.0",
    requires: Sequence[str] = (),
    environments: Sequence[str] = (),
) -> Path:
    """Writes a wheel; `environments` are entry points: `name = module:Class`."""
    info = f"{package.replace('-', '_')}-{version}.dist-info"
    metadata = ["Metadata-Version: 2.1", f"Name: {package}", f"Version: {version}", "License: MIT"]
    metadata += [f"Requires-Dist: {one}" for one in requires]
    content = {
        **files,
        f"{info}/METADATA": "\n".join(metadata) + "\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    if environments:
        content[f"{info}/entry_points.txt"] = "\n".join(["[envserver.environments]", *environments])
    content[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in (*content, f"{info}/RECORD"))
    path = folder / f"{package.replace('-', '_')}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in content.items():
            archive.writestr(name, text)
    return path


def run(*words: object, folder: Path) -> str:
    """The standard output of a command that must succeed."""
    ended = envserver(*words, folder=folder)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def refused(*words: object, folder: Path) -> str:
    """What a command says that must refuse."""
    ended = envserver(*words, folder=folder)
    assert ended.returncode == 2, ended.stdout + ended.stderr
    return " ".join(ended.stderr.split())
