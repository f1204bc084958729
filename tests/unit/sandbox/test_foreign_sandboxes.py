"""Sandboxes of somebody else: the class in docs/sandboxes.md, against a cloud that plays it."""

from __future__ import annotations

import base64
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import pytest_asyncio
from aiohttp import web
from envserver_records.errors import ConfigError, SandboxLost, SandboxUnavailable
from support.sandboxes import archive, sandboxes

from envserver import InputError, SandboxConfig, Sandboxes, SandboxLimits, SandboxSpec
from envserver.sandbox.elsewhere import foreign
from envserver.sandbox.maker import sandboxes_at
from envserver.sandbox.watched import WatchedSandboxes

pytestmark = pytest.mark.asyncio(loop_scope="module")

DOCS = Path(__file__).parents[3] / "docs" / "sandboxes.md"
LIMITS = SandboxLimits(wall_seconds=3600.0)


class Cloud:
    """The routes of the example's service, over real sandboxes."""

    def __init__(self, boxes: Sandboxes) -> None:
        self.boxes = boxes
        self.open: dict[str, AsyncExitStack] = {}
        self.is_broken = False
        self.app = web.Application(middlewares=[self.answered])
        self.app.add_routes(
            [
                web.post("/boxes", self.make),
                web.post("/boxes/{id}/run", self.run),
                web.get("/boxes/{id}/files", self.read),
                web.put("/boxes/{id}/files", self.write),
                web.delete("/boxes/{id}", self.end),
            ]
        )
        self.made: dict[str, object] = {}

    @web.middleware
    async def answered(self, request: web.Request, handler: object) -> web.StreamResponse:
        if self.is_broken:
            raise web.HTTPServiceUnavailable
        return await handler(request)  # type: ignore[operator,no-any-return]

    async def make(self, request: web.Request) -> web.Response:
        stack = AsyncExitStack()
        env = (await request.json())["env"]
        box = await stack.enter_async_context(self.boxes.open(SandboxSpec(env=env, limits=LIMITS)))
        self.open[box.id], self.made[box.id] = stack, box
        return web.json_response({"id": box.id})

    async def run(self, request: web.Request) -> web.Response:
        wanted = await request.json()
        result = await self.box(request).exec(
            wanted["argv"],
            stdin=base64.b64decode(wanted["stdin"]),
            cwd=wanted["cwd"],
            env=wanted["env"],
            limits=SandboxLimits(wall_seconds=wanted["seconds"]),
        )
        told = {
            "exit": result.exit,
            "stdout": base64.b64encode(result.stdout).decode(),
            "stderr": base64.b64encode(result.stderr).decode(),
            "seconds": result.usage.wall_seconds,
            "cpu_seconds": result.usage.cpu_seconds,
            "timed_out": result.killed_by == "wall",
        }
        return web.json_response(told)

    async def read(self, request: web.Request) -> web.Response:
        try:
            return web.Response(body=await self.box(request).read(request.query["path"]))
        except InputError:
            raise web.HTTPNotFound from None

    async def write(self, request: web.Request) -> web.Response:
        await self.box(request).write(request.query["path"], await request.read())
        return web.Response()

    async def end(self, request: web.Request) -> web.Response:
        if (stack := self.open.pop(request.match_info["id"], None)) is not None:
            await stack.aclose()
        return web.Response()

    def box(self, request: web.Request):  # type: ignore[no-untyped-def]
        return self.made[request.match_info["id"]]


@pytest_asyncio.fixture(loop_scope="module")
async def cloud(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Cloud]:
    async with sandboxes() as boxes:
        cloud = Cloud(boxes)
        runner = web.AppRunner(cloud.app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        monkeypatch.setenv("EXAMPLE_CLOUD_URL", f"http://127.0.0.1:{port}")
        try:
            yield cloud
        finally:
            await runner.cleanup()


@pytest.fixture
def reference(tmp_path: Path) -> str:
    (code,) = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    (tmp_path / "example_cloud.py").write_text(code)
    assert 55 <= len(code.splitlines()) <= 80
    return f"{tmp_path}/example_cloud.py:ExampleCloud"


async def test_the_example_of_the_docs_makes_sandboxes(cloud: Cloud, reference: str) -> None:
    address = foreign(reference).address
    spec = SandboxSpec(files={"a/b.txt": b"6 7"}, archive=archive(c=b"!"), env={"COLOR": "blue"})
    async with sandboxes_at(address) as maker, maker.open(spec) as box:
        result = await box.exec(["sh", "-c", "cat a/b.txt c; cat; echo $COLOR; exit 3"], stdin=b"?")
        assert (result.exit, result.stdout) == (3, b"6 7!?blue\n")
        assert (await box.run_python("print(6 * 7)")).stdout == b"42\n"
        assert await box.read("a/b.txt") == b"6 7"
        with pytest.raises(InputError):
            await box.read("nothing")
        slow = await box.exec(["sleep", "99"], limits=SandboxLimits(wall_seconds=0.1))
        assert slow.killed_by == "wall"
        assert (await box.total()).executions == 4
        with pytest.raises(SandboxUnavailable, match="example-cloud cannot"):
            async with box.start(["cat"], env={}, wall_seconds=1.0):
                pass
    assert not cloud.open


async def test_a_failing_cloud_is_never_the_models_fault(cloud: Cloud, reference: str) -> None:
    watched = WatchedSandboxes(foreign(reference).address)
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


async def test_what_is_no_maker_is_refused(tmp_path: Path) -> None:
    (tmp_path / "none.py").write_text("class Other: pass\n")
    for wrong in (f"{tmp_path}/none.py:Other", f"{tmp_path}/none.py:Absent", "no.such:Thing"):
        with pytest.raises(ConfigError, match=r"sandbox\.maker"):
            foreign(wrong)
    with pytest.raises(ValueError, match="not from both"):
        SandboxConfig(remote="http://one:1", maker="a:B")
