"""Sandboxes that others make: an engine's containers and their pool, and makers of users.

The maker is the class in docs/sandboxes.md, against a cloud that plays it.
"""

import base64
import contextlib
import re
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from envserver_records.errors import SandboxImageMissing, SandboxLost, SandboxUnavailable
from support import fake_engine
from support.cases import cases_of
from support.sandboxes import archive, sandboxes
from support.waiting import until

from envserver import InputError, Sandbox, SandboxConfig, Sandboxes, SandboxLimits, SandboxSpec
from envserver.sandbox import docker, service
from envserver.sandbox.client import SandboxClient
from envserver.sandbox.container import CgroupAccounts
from envserver.sandbox.docker import find_engine, new_prefix, remove_leftovers
from envserver.sandbox.opening import WatchedSandboxes, sandboxes_at
from envserver.sandbox.service import SandboxService, probe
from envserver.sandbox.source import custom_sandboxes

CASES = cases_of(__file__)

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


async def test_a_closed_container_is_gone(engine: Path, containers: SandboxClient) -> None:
    async with containers.open(SandboxSpec()) as sandbox:
        assert (await sandbox.exec(["true"])).ok
    names = [w[w.index("--name") + 1] for w in fake_engine.commands(engine) if w[0] == "run"]
    pids = [int((engine / name).read_text()) for name in names]
    await until(lambda: not [pid for pid in pids if Path(f"/proc/{pid}").exists()])


@pytest.mark.thorough
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


@pytest.mark.thorough
async def test_images_are_pulled_only_where_that_is_allowed(engine: Path) -> None:
    wanted = SandboxConfig(backend="docker", docker_image="pulled")
    refused = await probe("docker", wanted)
    assert "No such image: pulled" in refused.failure
    report = await probe("docker", wanted.model_copy(update={"docker_pull": "missing"}))
    assert report.works, report.failure
    assert ["pull", "--quiet", "pulled"] in fake_engine.commands(engine)


async def test_a_missing_sandbox_image_is_not_cured_by_retries(containers: SandboxClient) -> None:
    with pytest.raises(SandboxImageMissing, match="lacks an image: other") as missing:
        async with containers.open(SandboxSpec(image="other")):
            pass
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
    own = msgspec.structs.replace(found, prefix=ours)
    assert remove_leftovers(own) == [f"{ours}-c"]
    removed = [words[3:] for words in fake_engine.commands(engine) if words[0] == "rm"]
    assert removed == [of_gone, [f"{ours}-c"]]


def test_containers_stay_of_servers_whose_processes_cannot_be_seen(
    engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where /proc is mounted with `hidepid`, it has no processes of other users."""

    def refuse(pid: int, signal: int) -> None:
        raise PermissionError

    (engine / "left").write_text(f"{new_prefix()}-a")
    monkeypatch.setattr(docker, "_start_time", lambda pid: None)
    monkeypatch.setattr(docker.os, "kill", refuse)
    assert remove_leftovers(find_engine(fake_engine.IMAGE)) == []


@pytest.mark.parametrize("files", CASES.values(), ids=CASES)
def test_cgroup_numbers_are_read_in_both_layouts(tmp_path: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    accounts = CgroupAccounts(str(tmp_path))
    assert accounts.cpu_exact
    before = time.process_time()  # of this process, which plays the server
    counted = accounts.cpu_seconds(living=7.0)
    assert 900 - time.process_time() <= counted <= 900 - before
    assert (accounts.peak_memory(), accounts.peak_tasks(), accounts.memory_kills()) == (4000, 3, 2)


async def test_a_real_engine_holds_it_too(docker_image: str) -> None:
    report = await probe("docker", SandboxConfig(backend="docker", docker_image=docker_image))
    assert report.works, report.failure


DOCS = Path(__file__).parents[3] / "docs" / "sandboxes.md"
LIMITS = SandboxLimits(wall_seconds=3600.0)


class Cloud:
    """The routes of the example's service, over real sandboxes."""

    def __init__(self, boxes: Sandboxes) -> None:
        self.boxes = boxes
        self.open: dict[str, tuple[AsyncExitStack, Sandbox]] = {}
        self.is_broken = False
        self.app = web.Application(client_max_size=1 << 24)
        self.app.router.add_route("*", "/boxes{path:.*}", self.answer)

    async def answer(self, request: web.Request) -> web.Response:
        if self.is_broken:
            raise web.HTTPServiceUnavailable
        path = request.query.get("path", "")
        match request.method, request.path.split("/")[2:]:
            case "POST", []:
                stack, env = AsyncExitStack(), (await request.json())["env"]
                spec = SandboxSpec(env=env, limits=LIMITS)
                box = await stack.enter_async_context(self.boxes.open(spec))
                self.open[box.id] = stack, box
                return web.json_response({"id": box.id})
            case "POST", [name, "run"]:
                return web.json_response(await self.run(name, **await request.json()))
            case "GET", [name, "files"]:
                try:
                    return web.Response(body=await self.open[name][1].read(path))
                except InputError:
                    raise web.HTTPNotFound from None
            case "PUT", [name, "files"]:
                await self.open[name][1].write(path, await request.read())
            case "DELETE", [name] if name in self.open:
                await self.open.pop(name)[0].aclose()
        return web.Response()

    async def run(
        self, name: str, argv: list[str], stdin: str, seconds: float, **more: Any
    ) -> dict[str, Any]:
        limits = SandboxLimits(wall_seconds=seconds)
        given = base64.b64decode(stdin)
        result = await self.open[name][1].exec(argv, stdin=given, limits=limits, **more)
        return {
            "exit": result.exit,
            "stdout": base64.b64encode(result.stdout).decode(),
            "stderr": base64.b64encode(result.stderr).decode(),
            "seconds": result.usage.wall_seconds,
            "cpu_seconds": result.usage.cpu_seconds,
            "timed_out": result.killed_by == "wall",
        }


@pytest.fixture
async def cloud(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Cloud]:
    async with sandboxes() as boxes, TestServer((cloud := Cloud(boxes)).app) as server:
        monkeypatch.setenv("EXAMPLE_CLOUD_URL", str(server.make_url("/")).rstrip("/"))
        yield cloud


@pytest.fixture
def reference(tmp_path: Path) -> str:
    blocks = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    (code,) = (block for block in blocks if "class ExampleCloud" in block)
    (tmp_path / "example_cloud.py").write_text(code)
    assert 55 <= len(code.splitlines()) <= 80
    return f"{tmp_path}/example_cloud.py:ExampleCloud"


@pytest.fixture(params=["docker", "foreign"])
def maker(request: pytest.FixtureRequest) -> Any:
    """Sandboxes of each maker, from whose side nothing may be left open."""
    if request.param == "docker":
        return request.getfixturevalue("containers")
    request.getfixturevalue("cloud")
    return sandboxes_at(custom_sandboxes(request.getfixturevalue("reference")).address)


@pytest.mark.thorough
async def test_foreign_sandboxes_are_used_so(maker: Any, request: pytest.FixtureRequest) -> None:
    is_ours = isinstance(maker, SandboxClient)
    spec = SandboxSpec(files={"a/b.txt": b"6 7"}, archive=archive(c=b"!"), env={"COLOR": "blue"})
    async with contextlib.AsyncExitStack() as stack:
        boxes = maker if is_ours else await stack.enter_async_context(maker)
        box = await stack.enter_async_context(boxes.open(spec))
        result = await box.exec(["sh", "-c", "cat a/b.txt c; cat; echo $COLOR; exit 3"], stdin=b"?")
        assert (result.exit, result.stdout) == (3, b"6 7!?blue\n")
        assert (await box.run_python("print(6 * 7)")).stdout == b"42\n"
        await box.write("c.bin", bytes(range(256)) * 5000)
        assert (await box.exec(["sh", "-c", "wc -c < c.bin"])).stdout == b"1280000\n"
        assert await box.read("a/b.txt") == b"6 7"
        with pytest.raises(InputError):
            await box.read("nothing")
        slow = await box.exec(["sleep", "99"], limits=SandboxLimits(wall_seconds=0.3))
        assert slow.killed_by == "wall"
        unpacked = 0 if is_ours else 1  # by a program
        assert (await box.total()).executions == 4 + unpacked
        if is_ours:
            assert box.isolation == "docker"
            left = await box.exec(["bash", "-c", "(setsid sleep 60 &) ; exit 3"])
            assert left.exit == 3
        else:
            with pytest.raises(SandboxUnavailable, match="example-cloud cannot"):
                async with box.start(["cat"], env={}, wall_seconds=1.0):
                    pass
    assert is_ours or not request.getfixturevalue("cloud").open


async def test_a_failing_cloud_is_never_the_models_fault(cloud: Cloud, reference: str) -> None:
    watched = WatchedSandboxes(custom_sandboxes(reference).address)
    async with watched.open(SandboxSpec()) as box:
        cloud.is_broken = True
        with pytest.raises(SandboxLost, match="503"):
            await box.exec(["true"])
        assert isinstance(watched.failure, SandboxLost)
        cloud.is_broken = False
    cloud.is_broken = True
    with pytest.raises(SandboxUnavailable, match="503"):
        async with watched.open(SandboxSpec()):
            pass
