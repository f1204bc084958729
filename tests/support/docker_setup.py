"""`make docker-engine`: what tests in a real Docker engine need, in the folder `.docker-base/`.

In: this machine's apt and its own sources. Out: `base.tar.zst`, a small Debian with Python, pip,
venv and git, which stands in for `python:3.12-slim` where no registry can be reached; Docker's
plugins compose and buildx; promtool. Where a Docker engine answers, only the image `python:X.Y` is
pulled. Programs that are missing are installed as root; an ordinary user is told what to install.
"""

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

ROOT = Path(__file__).parents[2]
FOLDER: Final = ROOT / ".docker-base"
BASE: Final = FOLDER / "base.tar.zst"
CONFIG: Final = FOLDER / "config"
PROMTOOL: Final = FOLDER / "bin" / "promtool"
OWN_IMAGE: Final = f"python:{sys.version_info.major}.{sys.version_info.minor}"

_PROGRAMS: Final = {
    "dockerd": "docker.io",
    "docker": "docker.io",
    "mmdebstrap": "mmdebstrap",
    "zstd": "zstd",
}
_PLUGINS: Final = ("compose", "buildx")
_PACKAGES: Final = "python3,python3-venv,python3-pip,ca-certificates,git"
_LIKE_PYTHON_SLIM: Final = (
    'rm -f "$1"/usr/lib/python3*/EXTERNALLY-MANAGED'
    ' && ln -s ../../bin/python3 "$1"/usr/local/bin/python'
    ' && ln -s ../../bin/pip3 "$1"/usr/local/bin/pip'
)
_UNREAD: Final = ("man", "doc", "locale", "info")
# The first Debian whose packages of Docker's plugins are of their second generation.
_OLD, _NEW = "bookworm", "trixie"


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    _add_promtool()
    if _pulled():
        return
    _install([package for name, package in _PROGRAMS.items() if shutil.which(name) is None])
    _add_plugins()
    if not BASE.exists():
        _make_base()


def find_promtool() -> str | None:
    """The promtool of this machine, else the one in `.docker-base/`."""
    return shutil.which("promtool") or (str(PROMTOOL) if PROMTOOL.exists() else None)


def _pulled() -> bool:
    """Whether an engine runs already, has both plugins, and has or can pull its image."""
    if shutil.which("docker") is None or any(not _has_plugin(name) for name in _PLUGINS):
        return False
    here = ["docker", "image", "inspect", OWN_IMAGE]
    return any(_succeeds(words) for words in (here, ["docker", "pull", "--quiet", OWN_IMAGE]))


def _install(packages: list[str]) -> None:
    if not packages:
        return
    names = " ".join(dict.fromkeys(packages))
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        sys.exit(f"Missing for a Docker engine: {names}. As root: apt-get install {names}")
    with _apt(_codename()) as apt:
        _run(*apt, "install", "--yes", "--no-install-recommends", *names.split())


def _add_plugins() -> None:
    missing = [name for name in _PLUGINS if not _has_plugin(name)]
    if missing:
        suite = _codename().replace(_OLD, _NEW)
        found = _unpacked(suite, *(f"docker-{name}" for name in missing))
        target = CONFIG / "cli-plugins"
        target.mkdir(parents=True, exist_ok=True)
        for name in missing:
            plugin = next(found.glob(f"usr/**/cli-plugins/docker-{name}"))
            shutil.move(plugin, target / plugin.name)
        shutil.rmtree(found)
        if not all(_has_plugin(name) for name in missing):
            sys.exit(f"Docker's plugins {' and '.join(missing)} of {suite} do not run here.")


def _add_promtool() -> None:
    if find_promtool() is None and shutil.which("apt-get") is not None:
        found = _unpacked(_codename(), "prometheus")
        PROMTOOL.parent.mkdir(exist_ok=True)
        shutil.move(found / "usr/bin/promtool", PROMTOOL)
        shutil.rmtree(found)


def _make_base() -> None:
    unread = (f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in _UNREAD)
    make = [
        *("mmdebstrap", "--quiet", "--variant=minbase", "--format=tar", f"--include={_PACKAGES}"),
        *("--dpkgopt=force-unsafe-io", *unread, f"--customize-hook={_LIKE_PYTHON_SLIM}"),
        *(_codename(), "-", *map(str, _sources())),
    ]
    part = BASE.with_suffix(".part")
    with subprocess.Popen(make, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL) as made:
        _run("zstd", "-1", "-T0", "--quiet", "--force", "-o", str(part), stdin=made.stdout)
    if made.returncode:
        sys.exit(f"mmdebstrap failed with status {made.returncode}.")
    part.rename(BASE)


def _has_plugin(name: str) -> bool:
    return _succeeds(["docker", "--config", str(CONFIG), name, "version"]) or _succeeds(
        ["docker", name, "version"]
    )


def _unpacked(suite: str, *packages: str) -> Path:
    """Downloads packages of a Debian suite and unpacks them, without installing them."""
    target = FOLDER / "unpacked"
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    with _apt(suite) as apt:
        _run(*apt, "download", *packages, cwd=target)
    for archive in target.glob("*.deb"):
        _run("dpkg", "-x", str(archive), str(target))
    return target


@contextmanager
def _apt(suite: str) -> Iterator[list[str]]:
    """`apt-get` with lists of its own, so that others may update theirs meanwhile."""
    with TemporaryDirectory(prefix="envserver-apt-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        for part in ("lists/partial", "cache/archives/partial", "sources"):
            (folder / part).mkdir(parents=True)
        for path in _sources():
            kept = folder / "sources" / (path.name if path.suffix == ".sources" else "own.list")
            kept.write_text(path.read_text().replace(_codename(), suite))
        apt = [
            *("apt-get", "-qq", "-o", "DPkg::Lock::Timeout=600", "-o", "Dir::Etc::sourcelist=none"),
            *("-o", f"Dir::Etc::sourceparts={folder}/sources", "-o", f"Dir::Cache={folder}/cache"),
            *("-o", f"Dir::State::lists={folder}/lists", "-o", "APT::Sandbox::User=root"),
        ]
        _run(*apt, "update")
        yield apt


def _sources() -> list[Path]:
    """The files in which this machine names where its distribution's packages come from."""
    etc = Path("/etc/apt")
    named = [etc / "sources.list", *(etc / f"sources.list.d/{n}.sources" for n in _DISTRIBUTIONS)]
    return [path for path in named if path.exists() and _codename() in path.read_text()]


_DISTRIBUTIONS: Final = ("debian", "ubuntu")


def _codename() -> str:
    return platform.freedesktop_os_release()["VERSION_CODENAME"]


def _succeeds(words: list[str]) -> bool:
    return subprocess.run(words, capture_output=True, check=False).returncode == 0


def _run(*words: str, cwd: Path | None = None, stdin: object = subprocess.DEVNULL) -> None:
    environ = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    done = subprocess.run(words, cwd=cwd, stdin=stdin, env=environ, check=False)  # type: ignore[call-overload]
    if done.returncode:
        sys.exit(f"This failed: {' '.join(words)}")


if __name__ == "__main__":
    main()
