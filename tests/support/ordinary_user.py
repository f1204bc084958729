"""Runs a command as an ordinary user without an account, for tests that are started by root.

    python -m tests.support.ordinary_user python -m pytest tests/test_sandbox_backends.py

The interpreter and the project may lie where only root looks (/root): in a mount namespace of the
command's own, directories on the way to them are replaced by open ones that hold just that.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from envserver.sandbox import linux

from .waiting import PATIENCE

UID = 61_000 + os.getpid() % 4_000
"""Of no other command that runs at the same time: users of one name may signal each other."""
PROJECT = Path(__file__).resolve().parents[2]


def run_as_ordinary_user(argv: list[str]) -> subprocess.CompletedProcess[str]:
    """The command's result; `argv[0]` may be "python". Only root can call it."""
    return subprocess.run(
        [sys.executable, "-m", "tests.support.ordinary_user", *argv],
        cwd=PROJECT,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


def become_ordinary() -> None:
    """Turns this process into one of an ordinary user, for good."""
    linux.unshare(linux.CLONE_NEWNS)
    linux.mount("", "/", flags=linux.MS_REC | linux.MS_PRIVATE)
    needed = [Path(sys.base_prefix).resolve(), Path(sys.prefix).resolve(), PROJECT]
    for place in {_closed_parent(path) for path in needed} - {None}:
        assert place is not None
        _open(place, [path for path in needed if path.is_relative_to(place)])
    os.setgroups([])
    os.setresgid(UID, UID, UID)
    os.setresuid(UID, UID, UID)


def _closed_parent(path: Path) -> Path | None:
    """The first directory on the way to `path` that others may not pass."""
    for parent in reversed(path.parents):
        if not parent.stat().st_mode & 0o001:
            return parent
    return None


def _open(place: Path, kept: list[Path]) -> None:
    with tempfile.TemporaryDirectory() as aside:
        for number, path in enumerate(kept):
            copy = Path(aside, str(number))
            copy.mkdir()
            linux.mount(str(path), str(copy), flags=linux.MS_BIND | linux.MS_REC)
        linux.mount("tmpfs", str(place), "tmpfs", data="mode=0755,size=1m")
        for number, path in enumerate(kept):
            path.mkdir(parents=True, exist_ok=True)
            linux.mount(f"{aside}/{number}", str(path), flags=linux.MS_BIND | linux.MS_REC)
            linux.unmount(f"{aside}/{number}")


def main(argv: list[str]) -> None:
    home = tempfile.mkdtemp(prefix="ordinary-")
    os.chown(home, UID, UID)
    become_ordinary()
    # pytest keeps the folders of all users without a name in one place, and wants it to be its own.
    places = {"HOME": home, "PYTEST_DEBUG_TEMPROOT": home}
    environ = {**os.environ, **places, "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, *argv[1:]] if argv[0] == "python" else argv
    try:
        status = subprocess.run(command, cwd=PROJECT, env=environ, check=False).returncode
    finally:
        shutil.rmtree(home, ignore_errors=True)
    sys.exit(status if status >= 0 else 128 - status)


if __name__ == "__main__":
    main(sys.argv[1:])
