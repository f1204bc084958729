"""The resource usage that a sandbox reports for its programs."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from support.sandboxes import sandboxes

from envserver import Sandbox, Sandboxes, SandboxLimits, SandboxSpec

pytestmark = pytest.mark.asyncio(loop_scope="module")

MB = 1 << 20


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def boxes() -> AsyncIterator[Sandboxes]:
    async with sandboxes() as those:
        yield those


@pytest_asyncio.fixture(loop_scope="module")
async def box(boxes: Sandboxes) -> AsyncIterator[Sandbox]:
    async with boxes.open(SandboxSpec(limits=SandboxLimits(wall_seconds=3600.0))) as one:
        yield one


async def test_what_programs_used_is_plausible(box: Sandbox) -> None:
    code = """
import os, time
data = bytearray(b"x" * (50 << 20))
with open("file", "wb") as file:
    file.write(data[: 8 << 20])
end = time.process_time() + 0.5
while time.process_time() < end:
    pass
print(len(open("file", "rb").read()), time.process_time())
"""
    began = time.monotonic()
    result = await box.run_python(code)
    elapsed, used = time.monotonic() - began, result.usage
    size, cpu_seconds = map(float, result.stdout.split())
    assert size == 8 * MB
    assert cpu_seconds * 0.9 < used.cpu_seconds < cpu_seconds * 2
    assert used.cpu_seconds * 0.9 < used.wall_seconds <= elapsed
    assert 50 < used.peak_memory_mb < 120
    assert 8 * MB - 4096 < used.written_bytes < 9 * MB
    assert 8 * MB - 4096 < used.read_bytes < 9 * MB
    assert 8 <= used.disk_mb < 9
    assert (used.output_bytes, used.executions, used.killed) == (len(result.stdout), 1, {})
    assert used.peak_processes == 1


async def test_children_are_counted_too(box: Sandbox) -> None:
    used = (
        await box.run_python("""
import os, time
for _ in range(2):
    if os.fork() == 0:
        while time.process_time() < 0.2: pass
        os._exit(0)
os.wait(), os.wait()
""")
    ).usage
    assert used.cpu_seconds > 0.35
    assert used.peak_processes >= 3
    left = await box.run_python("""
import os, time
if os.fork() == 0:
    while time.process_time() < 0.05: pass
    open("spun", "w")
    while True: pass
while not os.path.exists("spun"): time.sleep(0.02)
""")
    assert left.ok and left.usage.cpu_seconds > 0.02


async def test_the_total_is_of_all_programs(box: Sandbox) -> None:
    first = (await box.run_python("data = bytes(40 << 20); print('one')")).usage
    second = (await box.exec(["sh", "-c", "echo second; echo more >&2"])).usage
    killed = (await box.exec(["sleep", "9"], limits=SandboxLimits(wall_seconds=0.1))).usage
    total = await box.total()
    assert total.executions == 3
    assert total.killed == killed.killed == {"wall": 1}
    assert total.output_bytes == 4 + 12
    assert total.wall_seconds == pytest.approx(
        first.wall_seconds + second.wall_seconds + killed.wall_seconds
    )
    assert total.peak_memory_mb == max(
        first.peak_memory_mb, second.peak_memory_mb, killed.peak_memory_mb
    )
