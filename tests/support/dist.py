"""Builds wheel and sdist of both projects into dist/ and installs both in fresh environments.

    python tests/support/dist.py

Fails when the built page is missing, when an sdist makes another wheel than the checkout, when the
client needs the server, or when an installed command does not work. What both projects require
comes from the package index that pip is set to, in the versions of constraints.txt.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

from fresh import ROOT, fresh_environment

DIST = ROOT / "dist"
PROJECTS = {"envserver-clients": ROOT / "clients", "envserver": ROOT}


def main() -> None:
    shutil.rmtree(DIST, ignore_errors=True)
    wheels = {name: _build(folder) for name, folder in PROJECTS.items()}
    if "envserver/dashboard/static/index.html" not in _contents(wheels["envserver"]):
        sys.exit("The wheel lacks the built page: make dashboard")
    for wheel in wheels.values():
        _check_sdist(wheel)
    with tempfile.TemporaryDirectory() as folder:
        _try_client(Path(folder), wheels["envserver-clients"])
    with tempfile.TemporaryDirectory() as folder:
        _try_server(Path(folder), list(wheels.values()))
    for path in sorted(DIST.iterdir()):
        print(f"{path.stat().st_size / 1e6:6.2f} MB  {path.relative_to(ROOT)}")


def _build(project: Path, folder: Path = DIST, target: str = "") -> Path:
    """Builds both forms of a project, or only `target`; returns the newest wheel in `folder`."""
    only = ["--target", target] if target else []
    command = [sys.executable, "-m", "hatchling", "build", "--directory", str(folder), *only]
    subprocess.run(command, cwd=project, check=True, stdout=subprocess.DEVNULL)
    return max(folder.glob("*.whl"), key=lambda path: path.stat().st_mtime_ns)


def _check_sdist(wheel: Path) -> None:
    name, version, *_ = wheel.name.split("-")
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(DIST / f"{name}-{version}.tar.gz") as archive:
            archive.extractall(folder, filter="data")
        made = _build(Path(folder, f"{name}-{version}"), Path(folder, "made"), "wheel")
        if _contents(made) != _contents(wheel):
            sys.exit(f"The sdist of {name} makes another wheel than the checkout.")


def _contents(wheel: Path) -> dict[str, int]:
    with zipfile.ZipFile(wheel) as archive:
        return {file.filename: file.CRC for file in archive.infolist()}


def _try_client(folder: Path, wheel: Path) -> None:
    programs = fresh_environment(folder, wheel)
    code = "import envserver_clients, importlib.util; print(importlib.util.find_spec('envserver'))"
    if _run(programs / "python", "-c", code, folder=folder).strip() != "None":
        sys.exit("The client brings the server.")


def _try_server(folder: Path, wheels: list[Path]) -> None:
    clients, server = wheels
    command = fresh_environment(folder, clients, f"{server}[math]") / "envserver"
    if "math" not in _run(command, "list", folder=folder):
        sys.exit("`envserver list` does not show math.")
    groups = folder / "groups.jsonl"
    words = ("process", "--env", "math", "--model", "sim", "--env.total_steps", "1")
    _run(command, *words, "--env.data_path_to_save_groups", str(groups), folder=folder)
    if len(groups.read_text().splitlines()) != 1:
        sys.exit("`envserver process` did not write one group.")


def _run(*words: str | Path, folder: Path) -> str:
    ended = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
    if ended.returncode != 0:
        sys.exit(f"{' '.join(map(str, words))} failed:\n{ended.stdout}{ended.stderr}")
    return ended.stdout


if __name__ == "__main__":
    main()
