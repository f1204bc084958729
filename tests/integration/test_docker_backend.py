"""The backend docker on a real engine: exact numbers, warm containers, image tasks, leftovers."""

import asyncio
import importlib.util
import io
import json
import signal
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from envserver_environments.swe.sample import SampleTask, sample_tasks
from envserver_environments.swe.trees import Entry, Tree, git_files, make_patch, tar_of, tree_of
from support.cases import write_jsonl
from support.docker_engine import Engine
from support.podman import Podman
from support.waiting import until

import envserver
from envserver import SandboxConfig, SandboxLimits, SandboxSpec
from envserver.sandbox.client import SandboxClient
from envserver.sandbox.service import SandboxService, probe

# An image has the repository with one commit in /testbed, and in the environment `testbed` of
# /opt/miniconda3 a Python with pytest (its files are those of this Python). Nothing is fetched.

_ENVIRONMENT = "opt/miniconda3/envs/testbed"
_PACKAGES = ("py", "pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments")


@contextmanager
def task_images(engine: Engine, tasks: Sequence[SampleTask]) -> Iterator[list[dict[str, Any]]]:
    """Builds an image for each task, and yields their rows; removes the images at the end."""
    names = [f"envserver-test/sweb.eval.{task.name.lower()}:latest" for task in tasks]
    base = "envserver-test/sweb.base:latest"
    try:
        _build(engine, base, engine.python_image, tar_of(_environment()))
        rows = []
        for task, name in zip(tasks, names, strict=True):
            history, commit = git_files(task.tree)
            _build(engine, name, base, tar_of({**task.tree, **history}, "testbed/"))
            rows.append(row_of(task, name, commit))
        yield rows
    finally:
        engine.run("rmi", "--force", *names, base)


def row_of(task: SampleTask, image: str, commit: str) -> dict[str, Any]:
    """The row of SWE-bench's form: the hidden tests come as a patch."""
    made = task.task().hidden
    return {
        "instance_id": f"envserver__{task.name}",
        "repo": f"envserver/{task.name}",
        "base_commit": commit,
        "image_name": image,
        "problem_statement": task.problem,
        "patch": task.gold_patch,
        "test_patch": make_patch(task.tree, {**task.tree, **tree_of(task.hidden)}),
        "FAIL_TO_PASS": json.dumps(made["fail_to_pass"]),
        "PASS_TO_PASS": json.dumps(made["pass_to_pass"]),
    }


def _environment() -> Tree:
    """The environment that tests run in: the image's Python, and pytest."""
    place = f"{_ENVIRONMENT}/lib/python3.11/site-packages"
    files = {
        f"{_ENVIRONMENT}/bin/python": Entry(b"/usr/bin/python3", "link"),
        f"{_ENVIRONMENT}/pyvenv.cfg": Entry(b"home = /usr/bin\nversion = 3.11.2\n"),
    }
    for name in _PACKAGES:
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.origin is not None
        origin = Path(spec.origin)
        whole = origin.parent.rglob("*.py") if origin.name == "__init__.py" else [origin]
        root = origin.parent.parent if origin.name == "__init__.py" else origin.parent
        for path in whole:
            files[f"{place}/{path.relative_to(root)}"] = Entry(path.read_bytes())
    return files


def _build(engine: Engine, name: str, base: str, layer: bytes) -> None:
    context = io.BytesIO()
    with tarfile.open(fileobj=context, mode="w") as tar:
        for file, data in (
            ("Dockerfile", f"FROM {base}\nADD layer.tar /\n".encode()),
            ("layer.tar", layer),
        ):
            entry = tarfile.TarInfo(file)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
    done = engine.run("build", "--tag", name, "-", input=context.getvalue(), text=False)
    assert done.returncode == 0, done.stderr


pytestmark = pytest.mark.thorough


async def test_what_a_program_used_is_told_exactly(docker_image: str) -> None:
    """Also what no sample sees: CPU time of children that nobody waits for, memory for a moment."""
    config = SandboxConfig(backend="docker", docker_image=docker_image, docker_warm=0)
    limits = SandboxLimits(memory_mb=300, disk_mb=32, cpu_seconds=1.0, wall_seconds=300.0)
    async with (
        SandboxService(config) as service,
        SandboxClient(service.address) as client,
        client.open(SandboxSpec(limits=limits)) as sandbox,
    ):
        assert (await sandbox.run_python("pass")).usage.cpu_exact
        burned = (await sandbox.run_python(_BURNS_IN_ORPHANS)).usage
        assert burned.cpu_exact and burned.cpu_seconds >= 0.4
        peak = (await sandbox.run_python("bytearray(200 << 20)")).usage
        assert peak.memory_exact and 200 <= peak.peak_memory_mb < 264
        again = (await sandbox.run_python("bytearray(100 << 20)")).usage
        assert not again.memory_exact  # an earlier program used more
        wrote = (await sandbox.run_python("open('f', 'wb').write(bytes(7 << 20))")).usage
        assert wrote.disk_mb == 7
        total = await sandbox.total()
        assert total.memory_exact and total.peak_memory_mb == peak.peak_memory_mb
        assert total.cpu_exact and total.cpu_seconds >= burned.cpu_seconds
        endless = await sandbox.run_python(_BURNS_IN_ORPHANS.replace("range(1)", "range(20)"))
        assert endless.killed_by == "cpu"


# Linux reaps the children of a process that ignores SIGCHLD, and adds their time to nobody's.
_BURNS_IN_ORPHANS = """
import os, signal, time
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for _ in range(1):
    if os.fork() == 0:
        while time.process_time() < 0.4:
            pass
        os._exit(0)
    try:
        os.wait()
    except ChildProcessError:
        pass
"""


async def test_the_kernel_ends_what_takes_too_much_memory(docker_image: str) -> None:
    config = SandboxConfig(backend="docker", docker_image=docker_image, docker_warm=0)
    limits = SandboxLimits(memory_mb=32, disk_mb=200)
    async with (
        SandboxService(config) as service,
        SandboxClient(service.address) as client,
        client.open(SandboxSpec(limits=limits)) as sandbox,
    ):
        full = await sandbox.run_python(_FILLS_THE_FOLDERS)
        assert full.killed_by in ("memory", "disk")
        assert full.usage.peak_memory_mb <= 32 + 200 + 64


# Files of all three folders together are more memory than the container has.
_FILLS_THE_FOLDERS = """
for number in range(190):
    for folder in ("/work", "/tmp", "/dev/shm"):
        with open(f"{folder}/{number}", "wb") as file:
            file.write(bytes(1 << 20))
"""


def test_what_a_killed_server_leaves_is_removed_and_no_other_servers(
    docker_engine: Engine, docker_image: str, tmp_path: Path
) -> None:
    script = tmp_path / "hold.py"
    script.write_text(_HOLDS.format(image=docker_image))
    words = [sys.executable, str(script)]
    with (
        subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as dead,
        subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as alive,
    ):
        try:
            for process in (dead, alive):
                assert process.stdout is not None
                assert "open\n" in iter(process.stdout.readline, "")
            left = [name for name in _names(docker_engine) if f"-{dead.pid}-" in name]
            docker_engine.output("pause", *left)  # at least one; they cannot end by themselves
            dead.kill()
            dead.wait()
            config = SandboxConfig(backend="docker", docker_image=docker_image)
            assert asyncio.run(probe("docker", config)).works
            names = _names(docker_engine)
            assert not any(f"-{dead.pid}-" in name for name in names)
            assert any(f"-{alive.pid}-" in name for name in names)
        finally:
            dead.kill()
            alive.send_signal(signal.SIGKILL)


def _names(engine: Engine) -> list[str]:
    return engine.output("ps", "--all", "--format", "{{.Names}}").split()


_HOLDS = """
import asyncio
from envserver import SandboxConfig, SandboxSpec
from envserver.sandbox.client import SandboxClient
from envserver.sandbox.service import SandboxService

async def main():
    config = SandboxConfig(backend="docker", docker_image={image!r})
    async with SandboxService(config) as service, SandboxClient(service.address) as client:
        async with client.open(SandboxSpec()):
            print("open", flush=True)
            await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.mark.parametrize("count", [1, pytest.param(20, marks=pytest.mark.slow)])
def test_tasks_in_images_are_solved_and_judged(
    docker_engine: Engine,
    docker_image: str,
    tmp_path: Path,
    count: int,
    tell: Callable[[str], None],
) -> None:
    """Each of the shipped tasks is an image of its own, in SWE-bench's layout."""
    with task_images(docker_engine, sample_tasks()[:count]) as rows:
        result = _play(rows, docker_image, tmp_path)
    rewards = {one.task_id: [t.score.reward for t in one.trajectories] for one in result.groups}
    assert len(rewards) == count
    assert all(found == [1.0, 1.0] for found in rewards.values()), rewards
    tell(f"docker: {count} tasks in images solved twice each")


def _play(rows: list[dict[str, Any]], image: str, folder: Path) -> Any:
    path = write_jsonl(folder / "rows.jsonl", rows)
    return envserver.process(
        "swe",
        model="sim",
        env={
            "data_set": "swe_bench",
            "data_path": str(path),
            "total_steps": len(rows),
            "group_size": 2,
            "ensure_scores_are_not_same": False,
        },
        sim={"solve_probability": 1.0, "openers": False, "latency_seconds": 0},
        sandbox={"backend": "docker", "docker_image": image},
        workers={"processes": 2},
    )


@pytest.mark.slow
async def test_podman_holds_what_docker_does(podman: Podman, podman_image: str) -> None:
    report = await probe("docker", SandboxConfig(backend="docker", docker_image=podman_image))
    assert report.works, report.failure
    await test_what_a_program_used_is_told_exactly(podman_image)
    await until(lambda: not podman.run("ps", "--all", "--quiet").stdout.split())
