"""Environments whose tasks or servers are container images, on a real Docker or Podman."""

import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import orjson
import pytest
from support.docker_engine import Engine
from support.installed import ASK, LIBRARIES, LOOK, add_libraries, build_wheels
from support.openenv_server import OPENING, played, transcript

import envserver
from envserver.sandbox import service

SERVER = Path(__file__).parents[1] / "support" / "openenv_in_an_image.py"
TOML = '[environment]\ndocker_image = "{image}"\n[verifier]\nenv = {{ WANTED = "6" }}\n'
TESTS = """\
cd /app
if [ "$(cat total.txt)" = "$WANTED" ] && [ -x run.sh ] && [ "$(./run.sh)" = ran ] \\
    && [ ! -e old.txt ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
"""
SOLVES = """\
ls /tests /app 2>&1
test -e /.dockerenv || test -e /run/.containerenv && echo in a container
cd /app && awk '{ sum += $1 } END { print sum }' numbers.txt > total.txt && rm old.txt
"""
Build = Callable[..., str]


@pytest.fixture
def build(docker_engine: Engine, docker_image: str, tmp_path: Path) -> Iterator[Build]:
    """Builds images on the engine's image with Python, and removes them."""
    with ExitStack() as made:

        def of(lines: str, **files: str) -> str:
            folder, name = tmp_path / "image", f"envserver-test-{uuid.uuid4().hex}"
            folder.mkdir()
            for file, text in {"Dockerfile": f"FROM {docker_image}\n{lines}", **files}.items():
                path = folder / file.replace("_", ".")
                path.write_text(text)
                path.chmod(0o755)
            docker_engine.output("build", "--tag", name, folder)
            made.callback(docker_engine.output, "rmi", "--force", name)
            return name

        yield of


def test_a_task_of_harbor_is_played_and_judged_in_its_image(
    build: Build, docker_image: str, tmp_path: Path
) -> None:
    files = {"numbers_txt": "1\n2\n3\n", "old_txt": "old", "run_sh": "#!/bin/sh\necho ran\n"}
    image = build("COPY *.txt run.sh /app/\n", **files)
    task = tmp_path / "tasks/sum"
    for name, text in {
        "task.toml": TOML.format(image=image),
        "instruction.md": "Write the sum of /app/numbers.txt into /app/total.txt.",
        "tests/test.sh": TESTS,
        "solution/solve.sh": SOLVES,
    }.items():
        (task / name).parent.mkdir(parents=True, exist_ok=True)
        (task / name).write_text(text)
    made = envserver.process(
        f"harbor:{task.parent}",
        model="sim",
        env={"total_steps": 1, "group_size": 2, "ensure_scores_are_not_same": False},
        sim={"solve_probability": 1.0, "openers": False, "latency_seconds": 0},
        sandbox={"backend": "docker", "docker_image": docker_image},
        workers={"processes": 1},
    )
    (group,) = made.groups
    assert [one.score.reward for one in group.trajectories] == [1.0, 1.0]
    for one in group.trajectories:
        assert one.output["deleted"] == ["old.txt"]
        (seen,) = (message["content"] for message in one.messages if message["role"] == "tool")
        assert "in a container" in seen and "test.sh" not in seen


async def test_the_server_of_an_openenv_image_is_started_and_ended(
    build: Build, docker_engine: Engine, tmp_path: Path
) -> None:
    lines = 'COPY server.py /server.py\nCMD ["python3", "/server.py"]\n'
    image = build(lines, server_py=SERVER.read_text())
    result = await played(f"docker://{image}", transcript(tmp_path / "t.json", OPENING, "4", "7"))
    (group,) = result.groups
    assert [one.score.reward for one in group.trajectories] == pytest.approx([1.1, 1.1])
    assert not docker_engine.output("ps", "--all", "--quiet", "--filter", f"ancestor={image}")


async def test_an_openenv_image_whose_server_ends_is_told_with_its_last_output(
    build: Build, docker_engine: Engine, tmp_path: Path
) -> None:
    image = build('CMD ["python3", "-c", "raise SystemExit(\'no configuration\')"]\n')
    script = transcript(tmp_path / "t.json", OPENING, "4")
    with pytest.raises(envserver.ConfigError, match="has ended: no configuration"):
        await played(f"docker://{image}", script)
    assert not docker_engine.output("ps", "--all", "--quiet", "--filter", f"ancestor={image}")


# envserver installed in a container with Docker's default settings, its filter of calls included

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
    for backend in service.ORDER:
        told = container.run("/opt/venv/bin/python", "-c", ASK, backend, LOOK, user=user)
        seen, tries = orjson.loads(told.splitlines()[-1])
        assert seen == "" or tries < 0, f"{backend}: {seen}"
        assert "graders" not in seen, "the view of programs is wrong, not the machine"
        works += [backend] if tries > 20 else []
    assert works, "no backend works in the container"
    told = orjson.loads(container.run("/opt/venv/bin/envserver", "doctor", "--json", user=user))
    assert told["backend"] == works[0]
