"""Fresh virtual environments with the versions of constraints.txt."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def fresh_environment(folder: Path, *requirements: str | Path) -> Path:
    """Installs `requirements` into a new environment below `folder`; returns its bin folder.

    This Python's pip installs, so the environment holds what was asked for and nothing else.
    """
    environment = folder / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    versions = folder / "versions.txt"
    versions.write_text(_versions((ROOT / "constraints.txt").read_text()))
    pip = [sys.executable, "-m", "pip", "--python", environment / "bin" / "python", "install"]
    settings = ["--quiet", "--only-binary", ":all:", "--constraint", versions]
    subprocess.run([*pip, *settings, *requirements], check=True)
    return environment / "bin"


def site_packages(folder: Path) -> Path:
    """Returns where the packages of `folder`'s environment are."""
    (packages,) = (folder / "venv/lib").glob("python*/site-packages")
    return packages


def _versions(locked: str) -> str:
    """Returns names and versions without hashes: pip takes no hashes for files of our own."""
    lines = (line.removesuffix("\\").strip() for line in locked.splitlines())
    return "\n".join(line for line in lines if line and not line.startswith(("--hash", "#")))
