"""The backend `docker`: the engine's command line, and containers that behave like any sandbox."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from envserver_records.errors import ConfigError
from support import fake_engine
from support.waiting import until

from envserver import InputError, SandboxConfig, SandboxLimits, SandboxSpec
from envserver.sandbox import SandboxClient, SandboxService, service
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
        "--memory-swap 184m",
        "/work:rw,exec,nosuid,nodev,size=8m,mode=1777,nr_inodes=4100",
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


async def test_a_real_engine_holds_it_too(docker_image: str) -> None:
    report = await probe("docker", SandboxConfig(backend="docker", docker_image=docker_image))
    assert report.works, report.failure
