"""Stands in for Docker's command line: `run` makes a container of namespaces, with what it is told.

It knows the words that `envserver.sandbox.docker` says, and writes each command line to
`commands.jsonl` beside its own executable (`install` makes that). It has two images: one is empty,
the other has what lies in `testbed` there, and a Python with what is installed here.
"""

import json
import os
import signal
import sys
import tempfile
from pathlib import Path

from envserver.sandbox import linux, namespaces, system

IMAGE = "an-image"
WITH_REPOSITORY = "acme/tool:1"
_ENVIRONMENT = "/opt/miniconda3/envs/testbed"


def install(folder: Path) -> None:
    """Puts a `docker` into `folder`."""
    program = folder / "docker"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {__file__} {folder} "$@"\n')
    program.chmod(0o755)


def commands(folder: Path) -> list[list[str]]:
    """The command lines that were heard."""
    return [json.loads(line) for line in (folder / "commands.jsonl").read_text().splitlines()]


def main(folder: Path, words: list[str]) -> None:
    with (folder / "commands.jsonl").open("a") as file:
        file.write(json.dumps(words) + "\n")
    match words:
        case ["version"] | ["image", "inspect", "an-image" | "acme/tool:1"]:
            return
        case ["image", "inspect", "pulled"] if (folder / "pulled").exists():
            return
        case ["image", "inspect", name]:
            sys.exit(f"Error: No such image: {name}")
        case ["kill", name]:
            os.kill(int((folder / name).read_text()), signal.SIGKILL)
        case ["ps", *_]:
            left = folder / "left"
            print(left.read_text() if left.exists() else "")
        case ["rm", "--force", "--volumes", *_]:
            return
        case ["pull", "--quiet", "pulled"]:
            (folder / "pulled").touch()
        case ["run", *options]:
            (folder / options[options.index("--name") + 1]).write_text(str(os.getpid()))
            sys.exit(_run(folder, options))
        case _:
            sys.exit(f"unknown: {words}")


def _run(folder: Path, options: list[str]) -> int:
    image, *words = options[options.index("--entrypoint") + 2 :]
    tmpfs = [options[n + 1] for n, word in enumerate(options) if word == "--tmpfs"]

    python = os.path.realpath(sys.executable)

    def inside() -> None:
        if image == WITH_REPOSITORY:
            _furnish(folder / "testbed", python)
        for mount in tmpfs:
            place, _, settings = mount.partition(":")
            kept = [s for s in settings.split(",") if s.partition("=")[0] in _TMPFS]
            linux.mount("tmpfs", place, "tmpfs", linux.MS_NOSUID, ",".join(kept))
        linux.unshare(linux.CLONE_NEWNET | linux.CLONE_NEWIPC)
        linux.raise_loopback()
        if os.geteuid() == 0:
            namespaces.become_user(1000)
        os.execve(python, [python, *words], {"PATH": "/usr/bin:/bin"})

    namespaces.own_users()
    with tempfile.TemporaryDirectory() as root:
        visible = [*system.visible_paths(), str(folder)]
        seen = {"visible": visible, "etc": system.etc_files(), "partly": {}}
        return namespaces.enter_outer(root, seen, inside)


def _furnish(repository: Path, python: str) -> None:
    """What the image has beside the system, before its writable places hide the host's."""
    linux.mount("", "/", flags=linux.MS_REMOUNT | linux.MS_BIND)
    installed = f"lib/python3.{sys.version_info.minor}/site-packages"
    for source, place in (
        (str(repository), "/testbed"),
        (f"{sys.prefix}/{installed}", f"{_ENVIRONMENT}/{installed}"),
    ):
        Path(place).mkdir(parents=True)
        linux.mount(source, place, flags=linux.MS_BIND | linux.MS_REC)
    Path(_ENVIRONMENT, "bin").mkdir()
    Path(_ENVIRONMENT, "bin/python").symlink_to(python)
    Path(_ENVIRONMENT, "pyvenv.cfg").write_text(f"home = {Path(python).parent}\n")


_TMPFS = ("size", "nr_inodes", "mode")

if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
