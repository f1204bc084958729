"""The images and the compose file of docker/ in a real Docker engine, as a newcomer starts them."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from envserver_clients.http import SyncEnvClient
from support.commands import free_port, until
from support.docker_engine import Engine
from support.docker_setup import find_promtool
from support.our_images import DOCKER, Compose, Images
from support.waiting import PATIENCE

from envserver import SandboxConfig
from envserver.sandbox.service import probe

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


def doctor(engine: Engine, image: str, *options: str) -> tuple[int, str]:
    """The exit status of `envserver doctor` in a container, and what it prints."""
    done = engine.run("run", "--rm", "--network", "none", *options, image, "doctor")
    return done.returncode, done.stdout + done.stderr


def url_of(compose: Compose) -> str:
    variables = compose.container("demo")["Config"]["Env"]
    (port,) = (
        text.split("=")[1] for text in variables if text.startswith("ENVSERVER_SERVER__PORT")
    )
    return f"http://127.0.0.1:{port}"


def status(url: str, headers: dict[str, str] | None = None) -> int:
    """The status of an answer; 0 while nobody answers."""
    try:
        return httpx.get(url, headers=headers, timeout=PATIENCE).status_code
    except httpx.TransportError:
        return 0


def wait_until_ready(url: str, compose: Compose) -> None:
    until(lambda: status(f"{url}/readyz") == 200, lambda: compose.output("logs"))


def kill(engine: Engine, pid: int) -> None:
    """Sends SIGKILL to a process of the engine's machine, which may be root's."""
    words = ("--pid", "host", "--user", "0", "--network", "none", engine.python_image)
    engine.output("run", "--rm", *words, "python3", "-c", f"import os; os.kill({pid}, 9)")


def stored(url: str) -> set[str]:
    page = httpx.get(f"{url}/v1/groups", params={"limit": 1000}, timeout=PATIENCE)
    assert page.status_code == 200, page.text
    return {group["group_id"] for group in page.json()["groups"]}


def test_a_trainer_gets_every_group_once_through_a_crash_and_a_restart(
    docker_engine: Engine, demo: Compose
) -> None:
    url = url_of(demo)
    wait_until_ready(url, demo)
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


def test_it_runs_as_an_ordinary_user_on_a_root_that_is_read_only(demo: Compose) -> None:
    told = demo.container("demo")
    assert told["Config"]["User"] == "10001:0"
    assert told["HostConfig"]["ReadonlyRootfs"] and told["HostConfig"]["CapDrop"] == ["ALL"]
    assert told["State"]["Health"]["Status"] in ("healthy", "starting")
    labels = told["Config"]["Labels"]
    assert labels["org.opencontainers.image.title"] == "envserver"


def test_a_published_port_asks_for_a_token(docker_engine: Engine, server_image: str) -> None:
    volume = ("--volume", "envserver-tokens:/data")
    words = ("token", "create", "--tokens", "/data/tokens.yaml", "--role", "trainer")
    made = docker_engine.output("run", "--rm", *volume, server_image, *words, "--name", "me")
    options = (*volume, "--publish", "127.0.0.1::8000", "--detach", "--rm", server_image)
    words = ("--model", "sim", "--host", "0.0.0.0", "--server.tokens_file", "/data/tokens.yaml")
    container = docker_engine.output("run", *options, "serve", "--env", "math", *words).strip()
    try:
        places = docker_engine.run("port", container, "8000").stdout.split()
        if not places:
            pytest.skip("this engine publishes no ports")
        url = f"http://{places[0]}"
        until(lambda: status(f"{url}/v1/groups") == 401, str)  # 503 while it starts
        assert status(f"{url}/healthz") == 200
        token = {"Authorization": f"Bearer {made.split()[0]}"}
        until(lambda: status(f"{url}/v1/status", token) == 200, str)
    finally:
        docker_engine.output("rm", "--force", container)
        docker_engine.output("volume", "rm", "--force", "envserver-tokens")


def test_any_user_runs_programs_of_a_model_in_a_default_container(
    docker_engine: Engine, server_image: str
) -> None:
    """As OpenShift does it: a user id that no account has, of the group root."""
    options = ("--user", "123456:0", "--read-only", "--tmpfs", "/tmp:exec", "--network", "none")
    words = "--model sim --sim.latency_seconds 0 --sim.solve_probability 1"
    words += " --env.ensure_scores_are_not_same false"
    words += " --env.group_size 2 --env.total_steps 2 --out /data/o.jsonl"
    script = f"envserver process --env code {words} && cat /data/o.jsonl"
    run = ("run", "--rm", *options, "--entrypoint", "sh", server_image, "-c", script)
    groups = [orjson.loads(x) for x in docker_engine.output(*run).splitlines() if x[:1] == "{"]
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
    options = [word for option in ALLOWED for word in ("--security-opt", option)]
    status, allowed = doctor(docker_engine, server_image, *options)
    assert status == 0 and "Sandboxes use the backend namespace." in allowed
    profile = tmp_path / "seccomp.json"
    profile.write_bytes(orjson.dumps(FORBIDDEN))
    status, nothing = doctor(docker_engine, server_image, "--security-opt", f"seccomp={profile}")
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
    look = (
        "run",
        "--rm",
        "--network",
        "none",
        image,
        "sh",
        "-c",
        "stat -c %a /work; git --version",
    )
    mode, git = images.engine.output(*look).splitlines()
    assert mode == "1777" and git.startswith("git version")
    report = await probe("docker", SandboxConfig(backend="docker", docker_image=image))
    assert report.works, report.failure


def test_every_profile_can_be_read(images: Images) -> None:
    for profile in ("demo", "cpu", "gpu", "observe"):
        told = orjson.loads(Compose(images, profile).output("config", "--format", "json"))
        assert told["services"]


def test_the_alarms_are_rules_of_prometheus(docker_engine: Engine) -> None:
    promtool = find_promtool()
    if promtool is None:
        pytest.skip("promtool is missing: make docker-engine finds it on Debian and Ubuntu")
    for words in (("rules", "alerts.yml"), ("config", "--syntax-only", "prometheus.yml")):
        check = [promtool, "check", *words]
        done = subprocess.run(check, cwd=DOCKER, capture_output=True, text=True, check=False)
        assert done.returncode == 0 and "SUCCESS" in done.stdout, done.stdout + done.stderr
