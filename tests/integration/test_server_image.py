"""The images and the compose file of docker/ in a real Docker engine, as a newcomer starts them."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import httpx
import orjson
import pytest
from envserver_clients.http import SyncEnvClient
from support.commands import free_port, until
from support.docker_engine import Engine
from support.docker_setup import find_promtool
from support.waiting import PATIENCE

from envserver import SandboxConfig
from envserver.sandbox.service import probe

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
        """Inspects the container of a service."""
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


DEMO = "--sim.latency_seconds 0 --env.group_size 2 --env.ensure_scores_are_not_same false"
GROUPS = 24
# What a container needs for the strongest backend, as `doctor` says it.
ALLOWED = ("seccomp=unconfined", "systempaths=unconfined")
FORBIDDEN = {
    "defaultAction": "SCMP_ACT_ALLOW",
    "syscalls": [{"names": ["unshare", "landlock_create_ruleset"], "action": "SCMP_ACT_ERRNO"}],
}


@pytest.fixture(scope="module")
def images(docker_engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Images:
    return Images(docker_engine, tmp_path_factory.mktemp("pip"))


@pytest.fixture(scope="module")
def server_image(images: Images) -> str:
    return images.server()


@pytest.fixture(scope="module")
def demo(images: Images) -> Iterator[Compose]:
    """`docker compose --profile demo up`, on a free port; it makes GROUPS groups."""
    flags = f"{DEMO} --env.total_steps {GROUPS} --rollouts.max_queued_groups {GROUPS}"
    compose = Compose(images, "demo", PORT=str(free_port()), ENVSERVER_FLAGS=flags)
    with compose.up():
        yield compose


def docker(engine: Engine, line: str, *more: str) -> str:
    """What `docker LINE MORE` prints, which must succeed."""
    return engine.output(*line.split(), *more)


def doctor(engine: Engine, image: str, options: str = "") -> tuple[int, str]:
    """The exit status of `envserver doctor` in a container, and what it prints."""
    done = engine.run(*f"run --rm --network none {options} {image} doctor".split())
    return done.returncode, done.stdout + done.stderr


def url_of(compose: Compose) -> str:
    variables = compose.container("demo")["Config"]["Env"]
    (port,) = (
        text.split("=")[1] for text in variables if text.startswith("ENVSERVER_SERVER__PORT")
    )
    return f"http://127.0.0.1:{port}"


def status(url: str, headers: dict[str, str] | None = None) -> int:
    """The status of an answer; 0 while nobody answers."""
    with suppress(httpx.TransportError):
        return httpx.get(url, headers=headers, timeout=PATIENCE).status_code
    return 0


def wait_until_ready(url: str, compose: Compose) -> None:
    until(lambda: status(f"{url}/readyz") == 200, lambda: compose.output("logs"))


def kill(engine: Engine, pid: int) -> None:
    """Sends SIGKILL to a process of the engine's machine, which may be root's."""
    program = f"import os; os.kill({pid}, 9)"
    line = f"run --rm --pid host --user 0 --network none {engine.python_image} python3 -c"
    docker(engine, line, program)


def stored(url: str) -> set[str]:
    page = httpx.get(f"{url}/v1/groups", params={"limit": 1000}, timeout=PATIENCE)
    assert page.status_code == 200, page.text
    return {group["group_id"] for group in page.json()["groups"]}


def test_a_trainer_gets_every_group_once_through_a_crash_and_a_restart(
    docker_engine: Engine, demo: Compose
) -> None:
    url = url_of(demo)
    wait_until_ready(url, demo)
    # It runs as an ordinary user, on a root that is read-only.
    told = demo.container("demo")
    assert told["Config"]["User"] == "10001:0"
    assert told["HostConfig"]["ReadonlyRootfs"] and told["HostConfig"]["CapDrop"] == ["ALL"]
    assert told["State"]["Health"]["Status"] in ("healthy", "starting")
    assert told["Config"]["Labels"]["org.opencontainers.image.title"] == "envserver"
    until(lambda: len(stored(url)) == GROUPS, lambda: demo.output("logs"))
    made = stored(url)
    taken: list[str] = []
    with SyncEnvClient(url, run="trainer", batch_size=4) as trainer:

        def take() -> None:
            batch = next(trainer.batches(idle_seconds=PATIENCE))
            taken.extend(group.group_id for group in batch.groups)
            assert batch.rows
            trainer.ack(batch)

        take()
        before = next(trainer.batches(idle_seconds=PATIENCE))
        kill(docker_engine, demo.container("demo")["State"]["Pid"])
        until(lambda: demo.container("demo")["RestartCount"] == 1, str)
        wait_until_ready(url, demo)
        assert stored(url) >= made
        trainer.ack(before)  # its lease outlived the crash
        taken.extend(group.group_id for group in before.groups)
        take()

        demo.output("stop")
        assert demo.container("demo")["State"]["ExitCode"] == 0  # drained, not killed
        demo.output("start")
        wait_until_ready(url, demo)
        while len(taken) < GROUPS:
            take()
    assert len(taken) == len(set(taken))
    assert made <= set(taken)


def test_any_user_runs_programs_in_a_container(docker_engine: Engine, server_image: str) -> None:
    """As OpenShift does it: a user id that no account has, of the group root."""
    words = (
        "--model sim --sim.latency_seconds 0 --sim.solve_probability 1 --env.group_size 2"
        " --env.ensure_scores_are_not_same false --env.total_steps 2 --out /data/o.jsonl"
    )
    script = f"envserver process --env code {words} && cat /data/o.jsonl"
    options = "--user 123456:0 --read-only --tmpfs /tmp:exec --network none --entrypoint sh"
    said = docker(docker_engine, f"run --rm {options} {server_image} -c", script)
    groups = [orjson.loads(line) for line in said.splitlines() if line[:1] == "{"]
    # Nothing but the tests of a task, run on the model's program, gives a reward of 1.
    assert [group["scores"] for group in groups] == [[1.0, 1.0], [1.0, 1.0]]


def test_doctor_says_what_works_in_a_container_and_what_to_allow(
    docker_engine: Engine, server_image: str, tmp_path: Path
) -> None:
    status, by_default = doctor(docker_engine, server_image)
    if status == 0:  # the kernel has Landlock
        assert "Sandboxes use the backend landlock." in by_default
    for option in ALLOWED:
        assert f"--security-opt {option}" in by_default
    options = " ".join(f"--security-opt {option}" for option in ALLOWED)
    status, allowed = doctor(docker_engine, server_image, options)
    assert status == 0 and "Sandboxes use the backend namespace." in allowed
    profile = tmp_path / "seccomp.json"
    profile.write_bytes(orjson.dumps(FORBIDDEN))
    status, nothing = doctor(docker_engine, server_image, f"--security-opt seccomp={profile}")
    assert status == 1 and "No sandbox backend works" in nothing
    for option in ALLOWED:
        assert f"--security-opt {option}" in nothing


async def test_sandboxes_run_in_the_image_made_for_them(
    images: Images, docker_image: str, tmp_path: Path
) -> None:
    image = images.build("Dockerfile.sandbox", "envserver-sandbox")
    found: dict[str, Any]
    (found,) = orjson.loads(images.engine.output("inspect", image))
    assert found["Config"]["User"] == "1000:1000"
    report = await probe("docker", SandboxConfig(backend="docker", docker_image=image))
    assert report.works, report.failure


def test_every_profile_can_be_read_and_the_alarms_are_rules_of_prometheus(images: Images) -> None:
    for profile in ("demo", "cpu", "gpu", "observe"):
        told = orjson.loads(Compose(images, profile).output("config", "--format", "json"))
        assert told["services"]
    promtool = find_promtool()
    if promtool is None:
        pytest.skip("promtool is missing: make docker-engine finds it on Debian and Ubuntu")
    for words in (("rules", "alerts.yml"), ("config", "--syntax-only", "prometheus.yml")):
        check = [promtool, "check", *words]
        done = subprocess.run(check, cwd=DOCKER, capture_output=True, text=True, check=False)
        assert done.returncode == 0 and "SUCCESS" in done.stdout, done.stdout + done.stderr


# docker/Dockerfile.vllm on a stand-in for vLLM's image: how the engine is started. The image for
# CPUs is not built here: it takes gigabytes. docker/README.md says how it was tried.

# Takes the place of vLLM: it answers with how it was started.
SERVER = """
import http.server, importlib, json, os, sys
words = sys.argv[1:]
extension, name = words[words.index("--worker-extension-cls") + 1].split(".")
names = ("VLLM_SERVER_DEV_MODE", "VLLM_ALLOW_RUNTIME_LORA_UPDATING", "HOME")
facts = {
    "words": words,
    "extension": hasattr(getattr(importlib.import_module(extension), name), "envserver_reload"),
    "variables": {name: os.environ[name] for name in names},
    "user": [os.getuid(), os.getgid()],
    "writable": os.access("/models", os.W_OK),
}
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(facts).encode())
place = words[words.index("--host") + 1], int(words[words.index("--port") + 1])
http.server.HTTPServer(place, Answer).serve_forever()
"""
STAND_IN = """
ARG BASE
FROM ${BASE}
COPY api_server.py /stand-in/vllm/entrypoints/openai/
RUN ln -s /stand-in/vllm "$(python3 -c 'import site; print(site.getsitepackages()[0])')/vllm"
"""


def test_vllm_is_started_with_what_envserver_uses(images: Images, tmp_path: Path) -> None:
    engine, folder, port = images.engine, tmp_path / "stand-in", free_port()
    folder.mkdir()
    (folder / "Dockerfile").write_text(STAND_IN)
    (folder / "api_server.py").write_text(SERVER)
    base = f"--build-arg BASE={engine.python_image}"
    docker(engine, f"build --network host --tag vllm-stand-in {base}", str(folder))
    image = images.build("Dockerfile.vllm", "envserver-engine:gpu", base="vllm-stand-in")
    options = f"--env HOST=127.0.0.1 --env PORT={port} --user 123456:0 --read-only"
    line = f"run --detach --network host {options} {image} --model Qwen/Qwen3-4B"
    container = docker(engine, line).strip()
    try:
        url = f"http://127.0.0.1:{port}"
        until(lambda: status(url) == 200, lambda: engine.output("logs", container))
        facts = httpx.get(url, timeout=PATIENCE).json()
        words = " ".join(facts["words"])
        for part in (
            "--enable-scale-out",
            "--enable-auto-tool-choice --tool-call-parser hermes",
            "--model Qwen/Qwen3-4B",
        ):
            assert part in words
        assert facts["extension"] and facts["user"] == [123456, 0]
        assert facts["variables"] == {
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
            "HOME": "/models",
        }
        assert engine.run("exec", container, "engine", "healthy").returncode == 0
    finally:
        docker(engine, f"rm --force --volumes {container}")
