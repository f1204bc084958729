"""The backend `docker`: the engine's command line, and containers that behave like any sandbox."""

from __future__ import annotations

import subprocess
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from envserver_records.errors import ConfigError, SandboxImageMissing
from support import fake_engine
from support.waiting import until

from envserver import InputError, SandboxConfig, SandboxLimits, SandboxSpec
from envserver.sandbox import (
    SandboxClient,
    SandboxService,
    docker_leftovers,
    find_engine,
    service,
)
from envserver.sandbox.cgroups import CgroupAccounts
from envserver.sandbox.docker_leftovers import new_prefix, remove_leftovers
from envserver.sandbox.service import probe

CONFIG = SandboxConfig(backend="docker", docker_image=fake_engine.IMAGE)


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a stand-in for Docker that the server finds."""
    fake_engine.install(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(service, "_held", {})
    return tmp_path


@pytest.fixture
async def containers(engine: Path) -> AsyncIterator[SandboxClient]:
    async with SandboxService(CONFIG) as running, SandboxClient(running.address) as client:
        yield client


async def test_a_container_holds_all_that_walls_promise(engine: Path) -> None:
    report = await probe("docker", CONFIG)
    assert report.works, report.failure
    (told, *_) = [words for words in fake_engine.commands(engine) if words[0] == "run"]
    line = " ".join(told)
    for words in (
        "--network none",
        "--cap-drop ALL",
        "--security-opt no-new-privileges",
        "--user 1000:1000",
        "--read-only",
        "--pids-limit 12",
        "--memory-swap 168m",
        "/work:rw,exec,nosuid,nodev,size=8m,mode=1777,nr_inodes=4096",
        "--pull never",
    ):
        assert words in line


async def test_a_container_is_used_like_any_sandbox(containers: SandboxClient) -> None:
    spec = SandboxSpec(
        files={"a/b.txt": b"here"}, preload=("envserver_tools.inside", "json"), env={"X": "1"}
    )
    async with containers.open(spec) as sandbox:
        assert sandbox.isolation == "docker"
        assert await sandbox.read("a/b.txt") == b"here"
        await sandbox.write("c.bin", bytes(range(256)) * 5000)
        told = await sandbox.exec(
            ["bash", "-c", "cat - a/b.txt; echo $X; wc -c < c.bin"], stdin=b"i"
        )
        assert told.stdout == b"ihere1\n1280000\n"
        warm = await sandbox.run_python(
            "import envserver_tools.inside; print(len(envserver_tools.inside.TOOLS))"
        )
        assert warm.ok, warm.stderr
        slow = await sandbox.run_python("while 1: pass", limits=SandboxLimits(wall_seconds=0.3))
        assert slow.killed_by == "wall"
        left = await sandbox.exec(["bash", "-c", "(setsid sleep 60 &) ; exit 3"])
        assert left.exit == 3
        assert (await sandbox.total()).executions == 4
        with pytest.raises(InputError):
            await sandbox.read("nothing")


async def test_a_closed_container_is_gone(engine: Path, containers: SandboxClient) -> None:
    async with containers.open(SandboxSpec()) as sandbox:
        assert (await sandbox.exec(["true"])).ok
    names = [w[w.index("--name") + 1] for w in fake_engine.commands(engine) if w[0] == "run"]
    pids = [int((engine / name).read_text()) for name in names]
    await until(lambda: not [pid for pid in pids if Path(f"/proc/{pid}").exists()])


@pytest.mark.parametrize(
    ("image", "reason"), [("", "no image is named"), ("other", "No such image: other")]
)
async def test_what_is_missing_is_said(engine: Path, image: str, reason: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        await SandboxService(SandboxConfig(backend="docker", docker_image=image)).__aenter__()
    assert reason in refusal.value.message


async def test_a_kind_of_sandbox_that_is_used_again_gets_a_warm_container(
    engine: Path, containers: SandboxClient
) -> None:
    before = _runs(engine)
    for _ in range(4):
        async with containers.open(SandboxSpec()):
            pass
    await until(lambda: _runs(engine) == before + 5)  # one more, for the next


def _runs(engine: Path) -> int:
    return sum(words[0] == "run" for words in fake_engine.commands(engine))


async def test_images_are_pulled_only_where_that_is_allowed(engine: Path) -> None:
    wanted = SandboxConfig(backend="docker", docker_image="pulled")
    refused = await probe("docker", wanted)
    assert "No such image: pulled" in refused.failure
    report = await probe("docker", wanted.model_copy(update={"docker_pull": "missing"}))
    assert report.works, report.failure
    assert ["pull", "--quiet", "pulled"] in fake_engine.commands(engine)


async def test_a_missing_image_of_a_sandbox_is_a_failure_that_no_retry_cures(
    containers: SandboxClient,
) -> None:
    with pytest.raises(SandboxImageMissing, match="lacks an image: other") as missing:
        await containers.create(SandboxSpec(image="other"))
    assert missing.value.detail["missing"] == "other"


def test_only_containers_of_servers_that_are_gone_are_removed(engine: Path) -> None:
    ours = new_prefix()
    *here, pid, started, _ = ours.split("-")
    with subprocess.Popen(["true"]) as gone:
        gone.wait()
    service = "0" * 8
    of_gone = ["-".join([*here, str(gone.pid), started, service, "a"])]
    of_gone.append("-".join([*here, pid, str(int(started) - 1), service, "b"]))  # its id came again
    others = [f"{ours}-c", "-".join([here[0], "another-1", pid, started, service, "d"]), "e"]
    (engine / "left").write_text("\n".join(of_gone + others))
    found = find_engine(fake_engine.IMAGE)
    assert remove_leftovers(found) == of_gone
    assert remove_leftovers(found, ours) == [f"{ours}-c"]
    removed = [words[3:] for words in fake_engine.commands(engine) if words[0] == "rm"]
    assert removed == [of_gone, [f"{ours}-c"]]


def test_containers_stay_of_servers_whose_processes_cannot_be_seen(
    engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where /proc is mounted with `hidepid`, it has no processes of other users."""

    def refuse(pid: int, signal: int) -> None:
        raise PermissionError

    (engine / "left").write_text(f"{new_prefix()}-a")
    monkeypatch.setattr(docker_leftovers, "_start_time", lambda pid: None)
    monkeypatch.setattr(docker_leftovers.os, "kill", refuse)
    assert remove_leftovers(find_engine(fake_engine.IMAGE)) == []


@pytest.mark.parametrize(
    "files",
    [
        {
            "cpuacct/cpuacct.usage": "900000000000",
            "memory/memory.usage_in_bytes": "1000",
            "memory/memory.max_usage_in_bytes": "5000",
            "memory/memory.oom_control": "oom_kill_disable 0\noom_kill 2",
            "pids/pids.peak": "4",
        },
        {
            "cgroup.controllers": "cpu memory pids",
            "cpu.stat": "usage_usec 900000000\nuser_usec 1",
            "memory.current": "1000",
            "memory.peak": "5000",
            "memory.events": "max 3\noom_kill 2",
            "pids.peak": "4",
        },
    ],
    ids=["version 1", "version 2"],
)
def test_the_numbers_of_cgroups_are_read_in_both_layouts(
    tmp_path: Path, files: dict[str, str]
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    accounts = CgroupAccounts(str(tmp_path))
    assert accounts.cpu_exact
    before = time.process_time()  # of this process, which plays the server
    counted = accounts.cpu_seconds(living=7.0)
    assert 900 - time.process_time() <= counted <= 900 - before
    found = accounts.peak_memory(), accounts.peak_tasks(), accounts.memory_kills()
    assert found == (4000, 3, 2)


async def test_a_real_engine_holds_it_too(docker_image: str) -> None:
    report = await probe("docker", SandboxConfig(backend="docker", docker_image=docker_image))
    assert report.works, report.failure
