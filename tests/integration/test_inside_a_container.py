"""envserver installed in a container with Docker's default settings, its filter of calls included.

The container has no network: wheels of this project are built here, and the libraries are those of
these tests, so the image needs the same version of Python.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest
from support.docker_engine import Engine
from support.installed import ASK, LIBRARIES, LOOK, add_libraries, build_wheels

from envserver.sandbox import selection

INSTALL = """
set -e
python3 -m venv --without-pip /opt/venv
PYTHONPATH=/libraries python3 -m pip --python /opt/venv/bin/python install \\
  --quiet --no-index --no-deps --no-compile --no-warn-script-location /wheels/*.whl
cp -r /wheels/site/. /opt/venv/lib/python3.*/site-packages
"""


class Container:
    """A running container with envserver in /opt/venv."""

    def __init__(self, engine: Engine, name: str) -> None:
        self._engine = engine
        self._name = name

    def run(self, *words: object, user: int = 0) -> str:
        """The standard output of a command that must succeed."""
        who = ["--user", f"{user}:{user}", "--env", "HOME=/tmp", "--workdir", "/tmp"]
        return self._engine.output("exec", *who, self._name, *map(str, words))


@pytest.fixture(scope="module")
def container(docker_engine: Engine) -> Iterator[Container]:
    image, once = docker_engine.python_image, ("run", "--rm", "--network", "none")
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    found = docker_engine.output(*once, image, "python3", "--version").split()[-1]
    if not found.startswith(f"{version}."):
        pytest.skip(f"{image} has Python {found}; ENVSERVER_TEST_IMAGE may name one with {version}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        build_wheels(folder)
        (folder / "site").mkdir()
        add_libraries(folder / "site", Path("/libraries"))
        mounts = ["--volume", f"{LIBRARIES}:/libraries:ro", "--volume", f"{folder}:/wheels:ro"]
        started = docker_engine.output(*once, "--detach", *mounts, image, "sleep", "3600")
        running = Container(docker_engine, started.strip())
        try:
            running.run("sh", "-c", INSTALL)
            yield running
        finally:
            docker_engine.output("kill", running._name)


@pytest.mark.parametrize("user", [0, 1000])
def test_graders_are_hidden_or_the_backend_is_refused(container: Container, user: int) -> None:
    works = []
    for backend in selection.ORDER:
        told = container.run("/opt/venv/bin/python", "-c", ASK, backend, LOOK, user=user)
        seen, tries = orjson.loads(told.splitlines()[-1])
        assert seen == "" or tries < 0, f"{backend}: {seen}"
        assert "graders" not in seen, "the view of programs is wrong, not the machine"
        works += [backend] if tries > 20 else []
    assert works, "no backend works in the container"
    told = orjson.loads(container.run("/opt/venv/bin/envserver", "doctor", "--json", user=user))
    assert told["backend"] == works[0]
