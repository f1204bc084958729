"""Stands in for Docker's command line: `run` makes a container of namespaces, with what it is told.

It knows the words that `envserver.sandbox.docker` says, and writes each command line to
`commands.jsonl` beside its own executable (`install` makes that).
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from pathlib import Path

from envserver.sandbox import linux, namespaces, system

IMAGE = "an-image"


def install(folder: Path) -> None:
    """Puts a `docker` into `folder`."""
    program = folder / "docker"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {__file__} {folder} "$@"\n')
    program.chmod(0o755)


def commands(folder: Path) -> list[list[str]]:
    """The command lines that were heard."""
    lines = (folder / "commands.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def main(folder: Path, words: list[str]) -> None:
    with (folder / "commands.jsonl").open("a") as file:
        file.write(json.dumps(words) + "\n")
    match words:
        case ["version"] | ["image", "inspect", "an-image"]:
            return
        case ["image", "inspect", name]:
            sys.exit(f"Error: No such image: {name}")
        case ["kill", name]:
            os.kill(int((folder / name).read_text()), signal.SIGKILL)
        case ["run", *options]:
            (folder / options[options.index("--name") + 1]).write_text(str(os.getpid()))
            sys.exit(_run(options))
        case _:
            sys.exit(f"unknown: {words}")


def _run(options: list[str]) -> int:
    after_image = options.index(IMAGE) + 1
    tmpfs = [options[n + 1] for n, word in enumerate(options) if word == "--tmpfs"]

    python = os.path.realpath(sys.executable)

    def inside() -> None:
        for mount in (*tmpfs, "/dev/shm:size=1m"):
            place, _, settings = mount.partition(":")
            kept = [s for s in settings.split(",") if s.partition("=")[0] in _TMPFS]
            linux.mount("tmpfs", place, "tmpfs", linux.MS_NOSUID, ",".join(kept))
        linux.unshare(linux.CLONE_NEWNET | linux.CLONE_NEWIPC)
        linux.raise_loopback()
        if os.geteuid() == 0:
            namespaces.become_user(1000)
        os.execve(python, [python, *options[after_image:]], {"PATH": "/usr/bin:/bin"})

    namespaces.own_users()
    with tempfile.TemporaryDirectory() as root:
        return namespaces.enter_outer(root, system.visible_paths(), system.etc_files(), inside)


_TMPFS = ("size", "nr_inodes", "mode")

if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
