"""Builds and runs the images of docker/ in the tests' engine, without a registry."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import orjson

from .docker_engine import Engine

DOCKER: Final = Path(__file__).parents[2] / "docker"
_CERTIFICATES: Final = Path("/etc/ssl/certs/ca-certificates.crt")
_SECRET: Final = "/run/secrets/ca.crt"
_TAKEN: Final = ("index-url", "extra-index-url", "trusted-host", "timeout")


class Images:
    """The images of this repository; each is built once, later only what has changed.

    Args:
        folder: where this machine's settings of pip are kept for the time of the tests.
    """

    def __init__(self, engine: Engine, folder: Path) -> None:
        self.engine = engine
        self._pip = folder / "pip.conf"
        self._pip.write_text(_settings_of_pip())
        self.variables = {
            **engine.variables,
            "BASE": engine.python_image,
            "PIP_CONF": str(self._pip),
            "CA_FILE": str(_CERTIFICATES),
        }

    def build(self, file: str, name: str, *words: str, base: str = "") -> str:
        """Builds docker/`file`; returns `name`."""
        self.engine.output(
            *("build", "--network", "host", "--file", DOCKER / file, "--tag", name),
            *("--build-arg", f"BASE={base or self.engine.python_image}"),
            *("--secret", f"id=pip,src={self._pip}", "--secret", f"id=ca,src={_CERTIFICATES}"),
            *(*words, DOCKER.parent),
        )
        return name

    def server(self) -> str:
        """The image of docker/Dockerfile."""
        return self.build("Dockerfile", "envserver")


class Compose:
    """A project of docker/compose.yaml with one profile.

    Args:
        variables: of compose.yaml.
    """

    def __init__(self, images: Images, profile: str, **variables: str) -> None:
        self._engine = images.engine
        self._profile = profile
        self._variables = {**images.variables, **variables}

    def output(self, *words: str) -> str:
        files = (DOCKER / "compose.yaml", DOCKER / "compose.mirror.yaml")
        done = self._engine.run(
            "compose",
            *(word for file in files for word in ("--file", file)),
            *("--profile", self._profile, *words),
            env={**os.environ, **self._variables},
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    @contextlib.contextmanager
    def up(self) -> Iterator[None]:
        """Builds and starts it, and waits until all is healthy; removes it, data included."""
        try:
            self.output("up", "--build", "--detach", "--wait")
            yield
        finally:
            self.output("down", "--volumes", "--timeout", "5")

    def container(self, service: str) -> dict[str, Any]:
        """What the engine knows about the container of a service."""
        name = self.output("ps", "--all", "--quiet", service).strip()
        (told,) = orjson.loads(self._engine.output("inspect", name))
        return dict(told)


def _settings_of_pip() -> str:
    """This machine's pip settings, as far as they hold in a container: no folders of its own."""
    told = subprocess.check_output([sys.executable, "-m", "pip", "config", "list"], text=True)
    lines = ["[global]", f"cert = {_SECRET}"]
    for line in told.splitlines():
        name, _, value = line.partition("=")
        setting = name.rpartition(".")[2]
        values = [word for word in value.strip("'\"").split() if not word.startswith("file:")]
        if setting in _TAKEN and values:
            lines.append(f"{setting} = {' '.join(values)}")
    return "\n".join(lines) + "\n"
