"""Sandboxes by the thousand, and the end of each of their processes: nothing lost, nothing left."""

import asyncio
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from envserver_records.errors import SandboxLost, SandboxUnavailable
from support.process_tree import (
    alive_with,
    command,
    descendants,
    mounts,
    open_files,
    own_megabytes,
    parents,
)
from support.sandbox_holder import STAY, STAYING
from support.sandboxes import sandboxes
from support.waiting import PATIENCE, until

from envserver import ExecResult, Sandboxes, SandboxLimits, SandboxSpec

pytestmark = pytest.mark.thorough

AT_A_TIME = 16
TESTS = Path(__file__).parents[1]


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where services have their directories: short to write, and open to the users of sandboxes."""
    with tempfile.TemporaryDirectory(prefix="churn-") as name:
        Path(name).chmod(0o755)
        monkeypatch.setattr(tempfile, "tempdir", name)
        yield Path(name)


# Many short executions.

LEAVE = """
import ctypes, os, time
ctypes.CDLL(None).prctl(15, MARK.encode())
for _ in range(3):
    if os.fork() == 0:
        os.setsid()
        time.sleep(3600)
        os._exit(0)
"""
Kind = tuple[str, str, Callable[[ExecResult], bool]]
KINDS: list[Kind] = [
    ("exit status", "raise SystemExit(41)", lambda result: result.exit == 41),
    ("output", "print('é' * 1000)", lambda result: result.stdout.decode() == "é" * 1000 + "\n"),
    ("fork and leave", LEAVE, lambda result: result.ok),
    ("spin", "while True: pass", lambda result: result.killed_by == "wall"),
    (
        "900 MB",
        "data = bytearray(b'x') * (900 << 20)",
        lambda result: result.killed_by == "memory" or result.exit == 1,
    ),
    ("end itself", "import os; os.kill(os.getpid(), 9)", lambda result: result.signal == 9),
    (
        "20 MB file",
        "import os; print(open('file', 'wb').write(bytes(20 << 20)))",
        lambda result: result.stdout == b"20971520\n",
    ),
    ("trouble", "1 / 0", lambda result: result.exit == 1 and b"ZeroDivision" in result.stderr),
]


async def run_one(boxes: Sandboxes, kind: Kind, mark: str) -> str:
    """Empty, or what went wrong."""
    name, source, is_right = kind
    limits = SandboxLimits(wall_seconds=0.2 if name == "spin" else 600, memory_mb=256)
    async with boxes.open(SandboxSpec(limits=limits)) as box:
        result = await box.run_python(f"MARK = {mark!r}\n{source}")
    return "" if is_right(result) else f"{name}: {result}"


async def run_many(boxes: Sandboxes, count: int, mark: str) -> list[str]:
    """All that went wrong in `count` executions, AT_A_TIME of them together."""
    waiting = iter(range(count))
    wrong: list[str] = []
    done = 0

    async def worker() -> None:
        nonlocal done
        for number in waiting:
            wrong.append(await run_one(boxes, KINDS[number % len(KINDS)], mark))
            done += 1

    await asyncio.gather(*[worker() for _ in range(AT_A_TIME)])
    assert done == count
    return [text for text in wrong if text]


def ours(word: str) -> list[int]:
    """Processes below this one of that kind: supervisor, or zygote."""
    here = descendants(os.getpid())
    return sorted(pid for pid in here if f"envserver.sandbox.{word}" in command(pid))


def lasting() -> tuple[int, int, int]:
    """The supervisor, the zygote that holds the outer backend, and the one inside it."""
    (supervisor,) = ours("supervisor")
    known, zygotes = parents(), ours("zygote")
    (outer,) = [pid for pid in zygotes if known[pid] == supervisor]
    (inner,) = [pid for pid in zygotes if known[pid] == outer]
    return supervisor, outer, inner


def cgroups() -> int:
    return sum(int(line.split()[2]) for line in Path("/proc/cgroups").read_text().splitlines()[1:])


def held(pids: tuple[int, ...]) -> dict[str, int]:
    """What must not grow, of these processes and this one."""
    here = [os.getpid(), *pids]
    return {
        "processes": len(descendants(os.getpid())),
        "descriptors": sum(open_files(pid) for pid in here),
        "mounts": sum(mounts(pid) for pid in here),
        "files": len(list(Path(tempfile.gettempdir()).rglob("*"))),
    }


# A few sandboxes may be kept ready or not: their processes, and the supervisor's hold on them.
READY = {"processes": 2, "descriptors": 4, "mounts": 0, "files": 0}


def grown(pids: tuple[int, ...], before: dict[str, int]) -> dict[str, int]:
    """Returns what is held beyond `before` and what may be kept ready."""
    more = {name: count - before[name] for name, count in held(pids).items()}
    return {name: count for name, count in more.items() if count > READY[name]}


@pytest.mark.parametrize(
    "count", [300, pytest.param(2000, marks=pytest.mark.slow)], ids=["300", "2000"]
)
async def test_many_executions_leave_nothing_and_lose_nothing(count: int, temporary: Path) -> None:
    mark = f"hx{secrets.token_hex(5)}"
    async with sandboxes() as boxes:
        assert await run_many(boxes, 2 * AT_A_TIME, mark) == []
        await until(lambda: alive_with(mark) == [])
        pids = lasting()
        before, memory, groups = held(pids), [own_megabytes(pid) for pid in pids], cgroups()
        assert await run_many(boxes, count, mark) == []
        await until(lambda: grown(pids, before) == {})
        after = [own_megabytes(pid) for pid in pids]
        assert max(new - old for new, old in zip(after, memory, strict=True)) < 2
        assert cgroups() - groups < count / 10  # others of this machine come and go
        assert alive_with(mark) == []
    assert ours("supervisor") + ours("zygote") == []
    assert list(temporary.iterdir()) == []


# Processes that are killed.


@asynccontextmanager
async def staying(boxes: Sandboxes, mark: str) -> AsyncIterator[list[asyncio.Task[ExecResult]]]:
    """Programs that run, with what they have forked, until somebody ends them."""
    source = f"MARK = {mark!r}{STAY}"
    async with AsyncExitStack() as stack:
        opened = [await stack.enter_async_context(boxes.open(STAYING)) for _ in range(4)]
        running = [asyncio.create_task(box.run_python(source)) for box in opened]
        await until(lambda: len(alive_with(mark)) == 2 * len(running))
        try:
            yield running
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)


async def next_result(boxes: Sandboxes) -> ExecResult:
    """Of a program in a new sandbox, as soon as one can be made."""
    async with asyncio.timeout(PATIENCE):
        while True:
            try:
                async with boxes.open(SandboxSpec()) as box:
                    return await box.run_python("print('again')")
            except (SandboxUnavailable, SandboxLost):  # lost: of the process that is dying
                await asyncio.sleep(0.05)


@pytest.mark.parametrize("victim", [0, 1, 2], ids=["supervisor", "outer zygote", "zygote"])
async def test_the_end_of_a_process_loses_its_programs_and_nothing_else(victim: int) -> None:
    mark = f"hx{secrets.token_hex(5)}"
    async with sandboxes() as boxes:
        async with staying(boxes, mark) as running:
            os.kill(lasting()[victim], signal.SIGKILL)
            ends = await asyncio.wait_for(
                asyncio.gather(*running, return_exceptions=True), PATIENCE
            )
            assert [type(end) for end in ends] == [SandboxLost] * len(running)
            await until(lambda: alive_with(mark) == [])
            result = await next_result(boxes)
            assert (result.stdout, result.ok) == (b"again\n", True)
        assert alive_with(mark) == []
    assert ours("supervisor") + ours("zygote") == []


@pytest.mark.parametrize("backend", ["auto", "landlock", "unsafe-local"])
async def test_nothing_lives_on_when_the_server_is_killed(backend: str, temporary: Path) -> None:
    mark = f"hx{secrets.token_hex(5)}"
    holder = subprocess.Popen(
        [sys.executable, "-m", "support.sandbox_holder", backend, mark],
        cwd=TESTS,
        env={**os.environ, "TMPDIR": str(temporary)},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert holder.stdout is not None
        lines = iter(holder.stdout.readline, "")
        if not await asyncio.to_thread(lambda: any("running" in line for line in lines)):
            assert backend == "landlock", "no sandbox was made"
            pytest.skip("Landlock cannot be tried here: see `envserver doctor`")
        below = descendants(holder.pid)
        assert len(alive_with(mark)) == 1 + 2 * 4  # the holder itself has it too
    finally:
        holder.kill()
        holder.communicate()
    await until(lambda: alive_with(mark) == [] and not any(command(pid) for pid in below))
    await until(lambda: list(temporary.iterdir()) == [])
